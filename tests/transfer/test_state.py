"""The table, by its laws: each law is a predicate over any table, and together they pin this one.

Nothing here repeats the table. A sweep changes every cell to everything else it could be, and each
of the changed tables has to break a law.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import TypeAlias

import pytest

from transfer._errors import IllegalTransition
from transfer._state import SETTLED, TRANSITIONS, Event, State, step

Table: TypeAlias = Mapping[tuple[State, Event], State]
"""(state, event) to next state; an absent key is an empty cell."""

PREPARED, IN_FLIGHT, ABANDONED = State.PREPARED, State.IN_FLIGHT, State.ABANDONED
QUARANTINED, COMPLETED = State.QUARANTINED, State.COMPLETED
FAILED, CANCELLED = State.FAILED, State.CANCELLED
SUBMIT, COMPLETE, FAIL = Event.SUBMIT, Event.COMPLETE, Event.FAIL
CANCEL, LOSE, QUIESCE = Event.CANCEL, Event.LOSE, Event.QUIESCE

DEVICE_HAS_IT = {IN_FLIGHT, ABANDONED, QUARANTINED}
"""States in which a device may touch the bytes."""
PROOFS = {COMPLETE, FAIL, QUIESCE}
OPEN = set(State) - SETTLED


def edges(table: Table) -> Iterator[tuple[State, Event, State]]:
    """Every filled cell."""
    return ((state, event, after) for (state, event), after in table.items())


def reachable(table: Table, start: Iterable[State]) -> set[State]:
    """The states that can be reached from `start`, itself included, by graph search."""
    seen = set(start)
    stack = list(seen)
    while stack:
        here = stack.pop()
        for state, _, after in edges(table):
            if state is here and after not in seen:
                seen.add(after)
                stack.append(after)
    return seen


def toucher(state: State) -> str:
    """Who may touch the bytes in a state."""
    return "device" if state in DEVICE_HAS_IT else "nobody"


def accepts(table: Table, state: State) -> set[Event]:
    """The events that a state has cells for."""
    return {event for before, event, _ in edges(table) if before is state}


def law_1(table: Table) -> bool:
    """What a device had settles by a proof: COMPLETE, FAIL or QUIESCE."""
    return all(
        event in PROOFS
        for state, event, after in edges(table)
        if state in DEVICE_HAS_IT and after in SETTLED
    )


def law_2(table: Table) -> bool:
    """CANCEL is total, idempotent, and never changes who may touch memory."""
    if any((state, CANCEL) not in table for state in State):
        return False
    return all(
        table[table[state, CANCEL], CANCEL] is table[state, CANCEL]
        and toucher(table[state, CANCEL]) == toucher(state)
        for state in State
    )


def law_3(table: Table) -> bool:
    """Nothing touches memory before SUBMIT, and SUBMIT happens once."""
    untouched = reachable(
        {cell: after for cell, after in table.items() if cell[1] is not SUBMIT}, [PREPARED]
    )
    if untouched & DEVICE_HAS_IT:
        return False
    behind = reachable(table, [after for _, event, after in edges(table) if event is SUBMIT])
    return not any(state in behind for state, event, _ in edges(table) if event is SUBMIT)


def law_4(table: Table) -> bool:
    """QUARANTINED is left by QUIESCE only."""
    return all(
        event is QUIESCE
        for state, event, after in edges(table)
        if state is QUARANTINED and after is not QUARANTINED
    )


def law_5(table: Table) -> bool:
    """Settled states absorb."""
    return all(after is state for state, _, after in edges(table) if state in SETTLED)


def law_6(table: Table) -> bool:
    """COMPLETED is entered from IN_FLIGHT by COMPLETE only."""
    return all(
        (state, event) == (IN_FLIGHT, COMPLETE)
        for state, event, after in edges(table)
        if after is COMPLETED and state is not COMPLETED
    )


def law_7(table: Table) -> bool:
    """Every state can be reached and can reach a settled one."""
    if reachable(table, [PREPARED]) != set(State):
        return False
    return all(reachable(table, [state]) & SETTLED for state in State)


def law_8(table: Table) -> bool:
    """No event but these six: time is none of them, a deadline is a CANCEL."""
    return {event for _, event, _ in edges(table)} == {
        SUBMIT,
        COMPLETE,
        FAIL,
        CANCEL,
        LOSE,
        QUIESCE,
    }


def law_9(table: Table) -> bool:
    """Settled states accept CANCEL only."""
    return all(accepts(table, state) == {CANCEL} for state in SETTLED)


def law_10(table: Table) -> bool:
    """What an open state accepts."""
    return (
        accepts(table, PREPARED) == {SUBMIT, FAIL, CANCEL}
        and accepts(table, IN_FLIGHT) == {COMPLETE, FAIL, CANCEL, LOSE}
        and accepts(table, ABANDONED) == {COMPLETE, FAIL, CANCEL, LOSE}
        and accepts(table, QUARANTINED) == {CANCEL, QUIESCE}
    )


def law_11(table: Table) -> bool:
    """LOSE leads to QUARANTINED; COMPLETE and FAIL settle."""
    return all(
        (event is not LOSE or after is QUARANTINED)
        and (event not in (COMPLETE, FAIL) or after in SETTLED)
        for _, event, after in edges(table)
    )


def law_12(table: Table) -> bool:
    """Each settled state tells how it was reached; QUIESCE settles, CANCEL settles PREPARED."""
    for state, event, after in edges(table):
        if state in SETTLED:
            continue
        if after is CANCELLED and not ((state, event) == (PREPARED, CANCEL) or state is ABANDONED):
            return False
        failing = (event is FAIL and state in (PREPARED, IN_FLIGHT)) or event is QUIESCE
        if after is FAILED and not failing:
            return False
        if event is QUIESCE and after not in SETTLED:
            return False
    return table.get((PREPARED, CANCEL)) in SETTLED


LAWS: list[Callable[[Table], bool]] = [
    law_1,
    law_2,
    law_3,
    law_4,
    law_5,
    law_6,
    law_7,
    law_8,
    law_9,
    law_10,
    law_11,
    law_12,
]


def flat() -> dict[tuple[State, Event], State]:
    """The library's table, cell by cell."""
    return {
        (state, event): after for state, row in TRANSITIONS.items() for event, after in row.items()
    }


def mutants() -> Iterator[tuple[tuple[State, Event], State | None, Table]]:
    """Every table that differs from the library's in exactly one cell."""
    table = flat()
    for cell in product(State, Event):
        for value in (*State, None):
            if value is table.get(cell):
                continue
            changed = {key: after for key, after in table.items() if key != cell}
            if value is not None:
                changed[cell] = value
            yield cell, value, changed


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_table_obeys(law: Callable[[Table], bool]) -> None:
    assert law(flat())


def test_every_single_change_of_a_cell_breaks_a_law() -> None:
    total = 0
    alive = []
    for cell, value, table in mutants():
        total += 1
        if all(law(table) for law in LAWS):
            alive.append((cell, value))
    print(
        f"{total} mutants of {len(State) * len(Event)} cells, {total - len(alive)} killed by a law"
    )
    assert alive == []
    assert total == 294


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_law_can_be_broken(law: Callable[[Table], bool]) -> None:
    # A law that no change can break would say nothing.
    assert any(not law(table) for _, _, table in mutants())


def test_the_law_of_events_sees_a_timeout() -> None:
    # An event is lost, or only seems to be there: the set of events is what this law is about.
    without = {cell: after for cell, after in flat().items() if cell[1] is not QUIESCE}
    assert not law_8(without)
    assert not any("TIME" in event.name or "DEADLINE" in event.name for event in Event)


def test_the_settled_states_are_those_where_nothing_touches_the_bytes() -> None:
    assert {COMPLETED, FAILED, CANCELLED} == SETTLED
    assert not SETTLED & DEVICE_HAS_IT


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_step_takes_the_cell_or_refuses_by_name(state: State, event: Event) -> None:
    row = TRANSITIONS[state]
    if event in row:
        assert step(state, event) is row[event]
        return
    with pytest.raises(
        IllegalTransition, match=f"{event.name} in {state.name}: expected"
    ) as caught:
        step(state, event)
    for legal in row:
        assert legal.name in str(caught.value)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[PREPARED][COMPLETE] = COMPLETED  # type: ignore[index]
    with pytest.raises(TypeError):
        TRANSITIONS[PREPARED] = {}  # type: ignore[index]
