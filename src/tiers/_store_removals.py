"""Removing files, a few at a time, and what is learnt from faults of files."""

from __future__ import annotations

import errno
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Final, final

from tiers._errors import CapacityExceeded
from tiers._health import DEGRADING, Monitor
from transfer._errors import LeaseError, TransferError, WouldBlock
from transfer._state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiers._index import Entry
    from tiers._runner import Runner
    from tiers._tier import Slot
    from transfer._operation import Operation
    from transfer._work import Work

AT_ONCE: Final = 4


@final
class Removal:
    """What has to be done, one after the other, until a place is free.

    Attributes:
        entry: whose place it is.
        slot: the place.
        works: what is left to do.
    """

    __slots__ = ("entry", "slot", "works")

    def __init__(self, entry: Entry, slot: Slot, works: Sequence[Work]) -> None:
        self.entry = entry
        self.slot = slot
        self.works = deque(works)


@final
class Removals:
    """The removals of a store. Bytes count until a removal is done; one that fails is kept.

    Args:
        runner: runs them.
        monitor: learns of faults.
        faults: counts them.
        done: called with a removal whose last step has completed.

    Attributes:
        stuck: removals of which a step failed; tried again by `retry`.
    """

    def __init__(
        self,
        runner: Runner,
        monitor: Monitor,
        faults: Counter[str],
        done: Callable[[Removal], None],
    ) -> None:
        self.stuck: list[Removal] = []
        self._runner = runner
        self._monitor = monitor
        self._faults = faults
        self._done = done
        self._queue: deque[Removal] = deque()
        self._active: dict[Removal, None] = {}

    @property
    def queued(self) -> int:
        """Removals of which the next step is not posted."""
        return len(self._queue)

    def pages(self, tenant: str | None = None) -> int:
        """Pages, of one tenant or of all, whose files are on their way out."""
        moving = (*self._queue, *self._active)
        return sum(tenant is None or removal.entry.tenant == tenant for removal in moving)

    def add(self, removal: Removal) -> None:
        """Remove something when its turn comes."""
        self._queue.append(removal)
        self._runner.ring()

    def retry(self) -> None:
        """Try again what failed."""
        self._queue.extend(self.stuck)
        self.stuck = []
        self._runner.ring()

    def pump(self) -> None:
        """Post what there is room for."""
        while self._queue and len(self._active) < AT_ONCE:
            removal = self._queue.popleft()
            try:
                end = partial(self._ended, removal)
                self._runner.submit(removal.works[0], end, name="remove")
            except WouldBlock:
                self._queue.appendleft(removal)
                self._runner.wait_room()
                return
            except (TransferError, LeaseError) as error:
                self._faults[fault_name(error)] += 1
                self.stuck.append(removal)
            else:
                self._active[removal] = None

    def _ended(self, removal: Removal, op: Operation) -> None:
        if not op.settled:
            return
        del self._active[removal]
        if op.state is not State.COMPLETED:
            note_fault(op, self._faults, self._monitor, self._runner.now)
            self.stuck.append(removal)
            return
        removal.works.popleft()
        if removal.works:
            self._queue.appendleft(removal)
        else:
            self._done(removal)


def cause_of(op: Operation) -> BaseException:
    """The device's own error of an operation that did not complete."""
    error: BaseException = op.error or CapacityExceeded(f"{op!r} was cancelled")
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def fault_name(error: BaseException) -> str:
    """A word for a fault, for counting: the system's name of its number, or the error's class."""
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, str(error.errno))
    return type(error).__name__


def note_fault(op: Operation, faults: Counter[str], monitor: Monitor, now: float) -> BaseException:
    """Count the fault of a write or a removal, and let health know; the cause."""
    cause = cause_of(op)
    faults[fault_name(cause)] += 1
    if isinstance(cause, OSError) and cause.errno in DEGRADING:
        monitor.fault(cause, now)
    return cause
