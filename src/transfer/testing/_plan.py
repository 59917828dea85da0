"""FaultPlan: which call of a device meets which fault. Plain data, printed as code to paste."""

from __future__ import annotations

import enum
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Mapping


class Fault(enum.Enum):
    """What can go wrong with one call of a device."""

    REFUSE = "refuse"
    """Nothing is posted: `SubmitError`."""
    PARTIAL = "partly post"
    """Only the first blocks of a batch are posted; the fence signals with an error once they are quiet."""
    DELAY = "delay"
    """A fence is returned at once; the work begins when it is released."""
    WITHHOLD = "withhold the signal"
    """The work is done, its signal waits until it is released."""
    TWICE = "signal twice"
    """The signal comes, and comes again when it is released."""
    ERROR = "error"
    """The work is done, and is reported as failed."""
    LOSE = "lose the event"
    """The end is reported as lost while the work goes on; the proof comes when it is released."""
    LATE = "late signal"
    """The end is reported as lost while the work goes on; the proof comes when it is done."""
    POISON = "lose the context"
    """The whole device is reported as lost while its work goes on."""
    UNFENCED = "post without a fence"
    """The work is posted, and `CompletionLost` is raised; no proof ever comes."""
    FENCED = "post, lose, keep the fence"
    """The work is posted, and `CompletionLost` is raised with a fence that signals later."""
    INTERRUPT = "interrupt behind posting"
    """The work is posted, and `KeyboardInterrupt` comes out of `enqueue`."""
    INTERRUPT_EARLY = "interrupt before posting"
    """Nothing is posted, and `KeyboardInterrupt` comes out of `enqueue`."""

    # System calls of files
    SHORT = "short count"
    """A read or write moves fewer bytes than asked."""
    NOTHING = "count of zero"
    """A read or write moves no byte."""
    EINTR = "interrupted call"
    """A system call is interrupted before it does anything."""
    ENOSPC = "no space"
    """A system call finds the disk full."""
    EIO = "I/O error"
    """A system call reports an input or output error."""

    def __repr__(self) -> str:
        return f"Fault.{self.name}"

    __hash__ = object.__hash__


CALL_FAULTS: Final = frozenset({Fault.SHORT, Fault.NOTHING, Fault.EINTR, Fault.ENOSPC, Fault.EIO})
"""Faults of system calls; all others are faults of a device."""


@final
class FaultPlan:
    """Which call meets which fault: a pure function of the seed and the call's number.

    Args:
        seed: for `rates`, and for everything that a fault leaves open.
        rates: how likely each fault is at each call; together at most 1.
        at: faults of single calls by number, from 0; these win.

    Raises:
        ValueError: a rate below 0, or rates that sum up to more than 1.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        rates: Mapping[Fault, float] = MappingProxyType({}),
        at: Mapping[int, Fault] = MappingProxyType({}),
    ) -> None:
        if any(rate < 0 for rate in rates.values()) or sum(rates.values()) > 1:
            raise ValueError(f"rates of at least 0 and together at most 1 expected, found {rates}")
        self.seed = seed
        self.rates = dict(rates)
        self.at = dict(at)

    def __repr__(self) -> str:
        parts = [repr(self.seed)]
        if self.rates:
            parts.append(f"rates={self.rates!r}")
        if self.at:
            parts.append(f"at={self.at!r}")
        return f"FaultPlan({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FaultPlan) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def draw(self, number: int) -> Fault | None:
        """The fault of call `number`, if it meets one."""
        given = self.at.get(number)
        if given is not None or not self.rates:
            return given
        mark = self.random(number).random()
        for fault, rate in self.rates.items():
            mark -= rate
            if mark < 0:
                return fault
        return None

    def random(self, number: int) -> Random:
        """Where call `number` draws what its fault leaves open."""
        return Random(self.seed * 1_000_003 + number)
