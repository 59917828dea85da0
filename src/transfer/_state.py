"""The life of an operation as a table. The table is the program.

Nothing else in the library decides what an event does to an operation. An absent cell raises
`IllegalTransition` and changes nothing. There is no timeout event: a deadline is a CANCEL, and a
cancel never changes who may touch memory.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from transfer._errors import IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Mapping


class State(enum.Enum):
    """Where an operation is, and with it who may touch its bytes."""

    PREPARED = "prepared"
    """Holds are taken, nothing was handed to a device."""
    IN_FLIGHT = "in flight"
    """Handed to the device: the device may touch the bytes."""
    ABANDONED = "abandoned"
    """Cancelled after SUBMIT: it runs on, its result will be dropped."""
    QUARANTINED = "quarantined"
    """Whether it still runs can no longer be learnt: assume that it does."""
    COMPLETED = "completed"
    """The fence signaled; the destination is valid."""
    FAILED = "failed"
    """Known to be quiet; the destination is undefined."""
    CANCELLED = "cancelled"
    """Known to be quiet; the result is unwanted."""

    # Members are singletons: identity hashing is the default for plain objects, and several times
    # faster than Enum's own hash, which the table look-up would otherwise pay on every event.
    __hash__ = object.__hash__


class Event(enum.Enum):
    """What can happen to an operation."""

    SUBMIT = "submit"
    """Applied *before* the device is called, so posted work can never look unposted."""
    COMPLETE = "complete"
    """The fence signaled without error."""
    FAIL = "fail"
    """An error *and* a quiet device."""
    CANCEL = "cancel"
    """Somebody no longer wants the result."""
    LOSE = "lose"
    """The end can no longer be learnt."""
    QUIESCE = "quiesce"
    """Outside proof that a lost operation is silent."""

    __hash__ = object.__hash__


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        State.PREPARED: MappingProxyType(
            {
                Event.SUBMIT: State.IN_FLIGHT,
                Event.FAIL: State.FAILED,
                Event.CANCEL: State.CANCELLED,
            }
        ),
        State.IN_FLIGHT: MappingProxyType(
            {
                Event.COMPLETE: State.COMPLETED,
                Event.FAIL: State.FAILED,
                Event.CANCEL: State.ABANDONED,
                Event.LOSE: State.QUARANTINED,
            }
        ),
        State.ABANDONED: MappingProxyType(
            {
                Event.COMPLETE: State.CANCELLED,
                Event.FAIL: State.CANCELLED,
                Event.CANCEL: State.ABANDONED,
                Event.LOSE: State.QUARANTINED,
            }
        ),
        State.QUARANTINED: MappingProxyType(
            {
                Event.CANCEL: State.QUARANTINED,
                Event.QUIESCE: State.FAILED,
            }
        ),
        State.COMPLETED: MappingProxyType({Event.CANCEL: State.COMPLETED}),
        State.FAILED: MappingProxyType({Event.CANCEL: State.FAILED}),
        State.CANCELLED: MappingProxyType({Event.CANCEL: State.CANCELLED}),
    }
)
"""``TRANSITIONS[state][event]`` is the next state; an absent cell is illegal."""

SETTLED: Final = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
"""States in which nothing touches the bytes any more."""


def step(state: State, event: Event) -> State:
    """Return the state that `event` leads to from `state`.

    Raises:
        IllegalTransition: the table has no such cell.
    """
    row = TRANSITIONS[state]
    if event not in row:
        raise IllegalTransition(
            f"{event.name} in {state.name}: expected one of "
            f"{', '.join(e.name for e in Event if e in row)}"
        )
    return row[event]
