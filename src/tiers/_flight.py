"""Reading pages: one read for each page however many want it, and a load for each who does.

A flight brings the bytes of one page to a stage. It belongs to the store: whoever asked first may leave,
the others are served. A load is one call that wants pages; it takes them from flights as these land.
"""

from __future__ import annotations

import errno
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, final

from tiers._errors import FormatError, TierError
from tiers._form import dense, memory
from tiers._health import PASSING
from tiers._store_removals import cause_of, fault_name
from transfer._errors import CompletionLost, LeaseError, TransferError, WouldBlock
from transfer._state import State
from transfer._work import Launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers._form import Form, Stage, Stages
    from tiers._index import Entry
    from tiers._store_core import Core
    from transfer._operation import Operation
    from transfer._work import Work

STRIKES_MAX: Final = 3
"""Reads of one page that may fail in passing, one after the other, before it is given up."""


class Taker(Protocol):
    """Who waits for a flight."""

    def landed(self, flight: Flight, number: int) -> None:
        """The bytes are in the flight's stage; call `Flights.leave` when done with them."""
        ...

    def missed(self, number: int, error: BaseException) -> None:
        """There are none."""
        ...


@final
class Flight:
    """The read of one page.

    Attributes:
        entry: the page.
        raw: whether it is decoded into the stage's raw block, once for all takers.
        stage: where it lands; None before it is started, and for pages that lie in host memory.
        down: whether the bytes are there.
        takers: who waits, or works on the bytes, by number of theirs.
    """

    __slots__ = ("down", "entry", "lost", "raw", "stage", "takers")

    def __init__(self, entry: Entry, *, raw: bool) -> None:
        self.entry = entry
        self.raw = raw
        self.stage: Stage | None = None
        self.down = False
        self.lost = False
        self.takers: dict[tuple[Taker, int], None] = {}


@final
class Flights:
    """All flights of a store.

    Args:
        core: the store's state.
        stages: where reads land; a share of memory that writes cannot take.
        at_once: reads that the engine is given at a time.
    """

    def __init__(self, core: Core, stages: Stages, *, at_once: int = 8) -> None:
        self.core = core
        self.stages = stages
        self.reading = 0
        self._at_once = at_once
        self._queue: deque[Flight] = deque()
        self._places = dense(core.form.raw_layout, core.form.layout, core.form.inputs) or {}
        core.pumps.append(self.pump)

    @property
    def form(self) -> Form:
        """How pages are stored."""
        return self.core.form

    @property
    def queued(self) -> int:
        """Flights that are not started."""
        return len(self._queue)

    def want(self, entry: Entry, taker: Taker, number: int, *, raw: bool) -> Flight:
        """Join the flight of a page, or start one."""
        flight = entry.flight
        if flight is None or flight.raw != raw:
            flight = Flight(entry, raw=raw)
            entry.reads += 1
            if entry.flight is None:
                entry.flight = flight
            flight.takers[taker, number] = None
            if self.form.blob is None and not raw:
                self._land(flight)
            else:
                self._queue.append(flight)
                self.core.runner.ring()
            return flight
        flight.takers[taker, number] = None
        self.core.counts["joined flights"] += 1
        if flight.down:
            taker.landed(flight, number)
        return flight

    def leave(self, flight: Flight, taker: Taker, number: int) -> None:
        """A taker is done with a flight, or wants it no longer."""
        if (taker, number) in flight.takers:
            del flight.takers[taker, number]
            if not flight.takers and flight.down:
                self._close(flight)

    def drop(self, error: BaseException) -> None:
        """Give up what is not started."""
        while self._queue:
            self._miss(self._queue.popleft(), error)

    def pump(self) -> None:
        """Start what there is room for; what nobody wants any more is dropped."""
        while self._queue and self.reading < self._at_once:
            flight = self._queue[0]
            if not flight.takers:
                self._close(self._queue.popleft())
                continue
            if not self.stages.free(raw=flight.raw):
                return
            self._queue.popleft()
            flight.stage = self.stages.lease(raw=flight.raw)
            if not self._start(flight):
                flight.stage.release()
                flight.stage = None
                self._queue.appendleft(flight)
                self.core.runner.wait_room()
                return

    def _start(self, flight: Flight) -> bool:
        """Read, or unpack what lies in host memory; False if the engine has no room."""
        if self.form.blob is None:
            return self._unpack(flight)
        entry, stage, disk = flight.entry, flight.stage, self.core.disk
        assert disk is not None  # noqa: S101 - there are files
        assert entry.disk is not None  # noqa: S101
        assert stage is not None  # noqa: S101
        assert stage.blob is not None  # noqa: S101
        work = disk.read(entry.disk, stage.blob)
        return self._submit(flight, work, self._read, "read")

    def _submit(
        self, flight: Flight, work: Work, end: Callable[[Flight, Operation], None], name: str
    ) -> bool:
        try:
            self.core.runner.submit(work, partial(end, flight), name=name)
        except WouldBlock:
            return False
        except (TransferError, LeaseError) as error:
            self._miss(flight, error)
        else:
            self.reading += 1
        return True

    def _read(self, flight: Flight, op: Operation) -> None:
        """A file was read, or not."""
        if not self._ended(flight, op):
            return
        self.core.counts["bytes read"] += self.form.file_bytes
        flight.entry.strikes = 0
        self.core.reads.success()
        if not flight.raw:
            self._land(flight)
        elif not self._unpack(flight):
            self._miss(flight, TierError("the engine had no room to decode"))

    def _ended(self, flight: Flight, op: Operation) -> bool:
        """Take note of an end; whether it is the good one."""
        if not op.settled:
            flight.lost = True
            self.reading -= 1
            self._tell(flight, CompletionLost(f"the end of {op!r} cannot be learnt"))
            return False
        self.reading -= not flight.lost
        if op.state is not State.COMPLETED or flight.lost:
            self._miss(flight, cause_of(op))
            return False
        return True

    def _unpack(self, flight: Flight) -> bool:
        """Decode into the stage's raw block, once for all takers."""
        form, stage, entry = self.form, flight.stage, flight.entry
        assert stage is not None  # noqa: S101 - raw flights have one
        assert stage.raw is not None  # noqa: S101
        source = stage.blob if form.blob is not None else None
        if source is None:
            assert entry.host is not None  # noqa: S101 - without files it is there
            source = entry.host.block
        encoded = form.outputs(source)
        into = memory(stage.raw.pool, stage.raw.id, self._places, form.layout)
        work = Launch(lambda: form.decode(entry, encoded, into), reads=[source], writes=[stage.raw])
        return self._submit(flight, work, self._unpacked, "decode")

    def _unpacked(self, flight: Flight, op: Operation) -> None:
        if self._ended(flight, op):
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        flight.down = True
        if not flight.takers:
            self._close(flight)
        for taker, number in list(flight.takers):
            taker.landed(flight, number)

    def _tell(self, flight: Flight, error: BaseException) -> None:
        takers, flight.takers = list(flight.takers), {}
        for taker, number in takers:
            taker.missed(number, error)

    def _miss(self, flight: Flight, error: BaseException) -> None:
        self.judge(flight.entry, error)
        self._tell(flight, error)
        self._close(flight)

    def judge(self, entry: Entry, error: BaseException) -> None:
        """Decide what a failed read means for the page: kept, given up, or set aside.

        A fault of the system says nothing about the file, so it is kept for `STRIKES_MAX` tries. A
        file that is gone is given up; one that is too short or not what it should be is set aside.
        """
        core = self.core
        if isinstance(error, FormatError):
            core.faults[error.cause] += 1
            core.fail(entry, error, damaged=True)
            return
        core.faults[fault_name(error)] += 1
        if not isinstance(error, OSError):
            return
        if error.errno in PASSING:
            core.reads.fault(error, core.runner.now)
            entry.strikes += 1
            if entry.strikes >= STRIKES_MAX:
                core.fail(entry, error)
        else:
            core.fail(entry, error, damaged=error.errno == errno.ENODATA)

    def _close(self, flight: Flight) -> None:
        """A flight is over: nobody works on its bytes."""
        entry = flight.entry
        if entry.flight is flight:
            entry.flight = None
        if flight.stage is not None:
            flight.stage.release()
        entry.reads -= 1
        self.core.settle(entry)
        self.core.runner.ring()
