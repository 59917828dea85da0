"""Hits and fetches: a prefix that is leased, and its bytes brought to the caller's pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, final

import numpy as np

from tiers._errors import FormatError
from tiers._form import dense, memory
from tiers._residency import Residency
from tiers._store_put import group_size
from tiers._store_removals import cause_of, fault_name
from tiers.host import gather, join
from transfer._drain import wait_unstoppable
from transfer._errors import (
    CompletionLost,
    EngineClosed,
    LayoutMismatch,
    LeaseError,
    TransferError,
    WouldBlock,
)
from transfer._handle import Block, Blocks
from transfer._state import State
from transfer._wait import wait_woken
from transfer._work import Copy, Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tiers._flight import Flight, Flights
    from tiers._index import Entry
    from tiers._key import Provenance
    from tiers._store_core import Core
    from transfer._handle import Handle
    from transfer._operation import Operation
    from transfer._work import Work

TAKES_AT_ONCE: Final = 4
"""Operations of a load that the engine is given at a time; what lands meanwhile shares the next one."""
WAITING: Final = 0
VALID: Final = 1
INVALID: Final = 2


@final
class Hit:
    """The longest prefix whose every component is there, as a lease.

    The lease is taken on ``with`` and given back at its end. What was evicted in between makes the
    prefix shorter.

    Attributes:
        entries: the records of the pages.
        page_size: tokens of a page.
    """

    def __init__(
        self, core: Core, entries: list[Entry], *, page_size: int, whose: Provenance | None
    ) -> None:
        self.entries = entries
        self.page_size = page_size
        self._whose = whose
        self._core = core
        self._entered = False

    def __repr__(self) -> str:
        return f"<hit of {self.pages} pages>"

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def pages(self) -> int:
        """Leading pages that are there."""
        return len(self.entries)

    @property
    def tokens(self) -> int:
        """Leading tokens that are there."""
        return len(self.entries) * self.page_size

    @property
    def leased(self) -> bool:
        """Whether it is entered and not left."""
        return self._entered

    def __enter__(self) -> Hit:
        """Lease the pages.

        Raises:
            LeaseError: it is leased already.
        """
        if self._entered:
            raise LeaseError(f"{self!r} is entered a second time")
        resident = Residency.RESIDENT
        gone = next((i for i, e in enumerate(self.entries) if e.residency is not resident), None)
        if gone is not None:
            self.entries = self.entries[:gone]
        self._entered = True
        for depth, entry in enumerate(self.entries):
            entry.leases += 1
            if not entry.provenance and self._whose is not None:
                self._core.claim(entry, self._whose, depth)
        self._core.counts["leases"] += len(self.entries)
        self._core.hits[self.give_up] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._entered:
            raise LeaseError(f"{self!r} is not entered: there is nothing to leave")
        self._entered = False
        self.give_up()

    def give_up(self) -> None:
        """End the leases, if they have not ended: a store that is closed keeps none."""
        core = self._core
        if core.hits.pop(self.give_up, 0) is not None:
            return
        for entry in self.entries:
            entry.leases -= 1
            core.settle(entry)
        core.runner.ring()


@final
class Load:
    """One call that wants pages: to its own blocks, or with none, checked only.

    Args:
        flights: the store's reads.
        entries: the pages, leased by the caller.
        target: the caller's blocks, one for each page or more; None to check only.

    Raises:
        LayoutMismatch: fewer blocks than pages, or blocks of another layout.
    """

    def __init__(self, flights: Flights, entries: Sequence[Entry], target: Handle | None) -> None:
        self.entries = entries
        self.faults: dict[int, BaseException] = {}
        self._flights = flights
        self._core = core = flights.core
        self._parts = bytearray(len(entries))
        self._left = len(entries)
        self._mine: list[Flight] = []
        self._landed: list[tuple[int, Flight]] = []
        self._watchers: list[Callable[[], None]] = []
        self._ops: dict[Operation, None] = {}
        self._order: tuple[Operation, ...] = ()
        self._lost: CompletionLost | None = None
        self._keys_valid = True
        self._target = None if target is None else _leading(target, len(entries))
        self._places: dict[str, tuple[int, int]] | None = {}
        form = core.form
        if target is not None:
            layout = target.pool.layout
            is_host = target.pool.kind == "host"
            self._places = dense(layout, form.layout, form.inputs) if is_host else None
            for name in form.copied:
                dense(layout, form.layout, (name,))
        self._raw = self._places is None
        self._group_size = group_size(form, len(entries))

    # The call

    async def run(self, after: object) -> int:
        """Bring every page; the number of valid leading ones, after all parts have ended.

        Raises:
            CompletionLost: the end of a part cannot be learnt; names it.
        """
        if not self.entries:
            return 0
        core = self._core
        try:
            if self._target is not None:
                await self._open(self._target, after)
            if core.closing:
                raise EngineClosed("the store was closed before the pages were read")
            core.pumps.append(self.flush)
            for number, entry in enumerate(self.entries):
                flight = self._flights.want(entry, self, number, raw=self._raw)
                self._mine.append(flight)
            self.flush()
            while self._left:
                await wait_woken(self._watchers)
        finally:
            await self._leave()
        if self._lost is not None:
            raise self._lost
        return self.valid

    @property
    def valid(self) -> int:
        """Leading pages that are whole and right."""
        if not self._keys_valid:
            return 0
        bad = next((i for i, part in enumerate(self._parts) if part != VALID), None)
        return len(self._parts) if bad is None else bad

    async def _open(self, target: Handle, after: object) -> None:
        """Order everything behind `after`: by the copy of the keys, or by a step that does nothing."""
        core = self._core
        work: Work
        if core.form.copied:
            assert core.host is not None  # noqa: S101 - they are kept in host memory
            slots = [entry.host for entry in self.entries if entry.host is not None]
            source = gather(slots)
            work = Copy(source, target, names=core.form.copied)
        else:
            work = Launch(_nothing, writes=[target])
        op = await core.runner.engine.submit(work, after=after, name="fetch")
        self._order = (op,)
        self._ops[op] = None
        self._left += 1
        for entry in self.entries:
            entry.reads += 1
        core.runner.watch(op, self._opened)

    def _opened(self, op: Operation) -> None:
        """The keys are there, or not."""
        if not op.settled:
            self._lose(op)
            return
        self._ops.pop(op, None)
        if op.state is not State.COMPLETED:
            self._keys_valid = False
            self._core.faults[fault_name(cause_of(op))] += 1
        for entry in self.entries:
            entry.reads -= 1
            self._core.settle(entry)
        self._done(1)

    # Parts, as flights land

    def landed(self, flight: Flight, number: int) -> None:
        """See `Taker.landed`; decoded together with what lands at the same time."""
        self._landed.append((number, flight))
        self._core.runner.ring()

    def missed(self, number: int, error: BaseException) -> None:
        """See `Taker.missed`."""
        if isinstance(error, CompletionLost):
            self._lost = CompletionLost(f"page {number} of the fetch: {error}")
        self._end_part(number, error)

    def flush(self) -> None:
        """Take what has landed to where it is wanted; more together when there is enough to do."""
        while self._landed and len(self._ops) < TAKES_AT_ONCE:
            group = self._landed[: self._group_size]
            try:
                self._take(group)
            except WouldBlock:
                self._core.runner.wait_room()
                return
            except (TransferError, LeaseError) as error:
                for number, _ in group:
                    self._end_part(number, error)
                self._release(group)
            del self._landed[: len(group)]

    def _take(self, group: list[tuple[int, Flight]]) -> None:
        found: dict[int, FormatError] = {}
        work = self._work(group, found)
        op = self._core.runner.submit(
            work, partial(self._taken, group, found), after=self._order, name="fetch pages"
        )
        self._ops[op] = None

    def _work(self, group: list[tuple[int, Flight]], found: dict[int, FormatError]) -> Work:
        form, target = self._core.form, self._target
        flights = [flight for _, flight in group]
        if target is not None and self._raw:
            raws = [f.stage.raw for f in flights if f.stage is not None and f.stage.raw]
            return Copy(join(raws), _pick(target, group), names=form.inputs)
        sources = [self._source(flight) for flight in flights]
        blocks = [None] * len(group) if target is None else _pick(target, group).ids
        jobs = [
            (number, flight.entry, form.outputs(source), self._into(block))
            for (number, flight), source, block in zip(group, sources, blocks, strict=True)
        ]

        def decode() -> None:
            for number, entry, encoded, into in jobs:
                try:
                    if target is None:
                        form.check(entry, encoded)
                    else:
                        form.decode(entry, encoded, into)
                except FormatError as error:
                    found[number] = error

        nbytes = sum(len(view) for *_, into in jobs for view in into.values())
        writes = [] if target is None else [_pick(target, group)]
        return Launch(decode, reads=[join(sources)], writes=writes, nbytes=nbytes)

    def _source(self, flight: Flight) -> Block:
        if flight.stage is not None and flight.stage.blob is not None:
            return flight.stage.blob
        assert flight.entry.host is not None  # noqa: S101 - without a stage it is there
        return flight.entry.host.block

    def _into(self, block: int | None) -> dict[str, memoryview]:
        if block is None or self._target is None:
            return {}
        pool = self._target.pool
        return memory(pool, int(block), self._places or {}, self._core.form.layout)

    def _taken(
        self, group: list[tuple[int, Flight]], found: dict[int, FormatError], op: Operation
    ) -> None:
        if not op.settled:
            self._lose(op)
            return
        self._ops.pop(op, None)
        failed = None if op.state is State.COMPLETED else cause_of(op)
        for number, flight in group:
            error = failed or found.get(number)
            if isinstance(error, FormatError):
                self._flights.judge(flight.entry, error)
            self._end_part(number, error)
        self._release(group)

    def _release(self, group: list[tuple[int, Flight]]) -> None:
        for number, flight in group:
            self._flights.leave(flight, self, number)

    def _end_part(self, number: int, error: BaseException | None) -> None:
        if self._parts[number] == WAITING:
            self._parts[number] = VALID if error is None else INVALID
            if error is not None:
                self.faults[number] = error
            self._done(1)

    def _lose(self, op: Operation) -> None:
        """Something may go on in the caller's pages for ever; say so at once."""
        self._lost = CompletionLost(f"fetch: the end of {op!r} cannot be learnt: {op.error}")
        self._left = 0
        self._wake()

    def _done(self, parts: int) -> None:
        self._left = max(0, self._left - parts)
        if not self._left:
            self._wake()

    def _wake(self) -> None:
        for watcher in list(self._watchers):
            watcher()

    # Leaving

    async def _leave(self) -> None:
        """Let go of what is not under way, and of foreign pages only when they are quiet."""
        core = self._core
        if self.flush in core.pumps:
            core.pumps.remove(self.flush)
        self._landed = []
        for number, flight in enumerate(self._mine):
            self._flights.leave(flight, self, number)
        for op in list(self._ops):
            op.cancel()
        target = self._target
        if target is not None and target.pool.foreign and not self._quiet():
            caught = await wait_unstoppable(self._quiet, core.waiters)
            if caught is not None:
                raise caught

    def _quiet(self) -> bool:
        return all(op.decided for op in self._ops)


def _nothing() -> None:
    """What comes before the first byte."""


def _leading(handle: Handle, count: int) -> Handle:
    if len(handle) < count:
        raise LayoutMismatch(f"fetch: found {len(handle)} blocks, expected {count}")
    return handle if isinstance(handle, Block) or len(handle) == count else handle[:count]


def _pick(target: Handle, group: Sequence[tuple[int, Flight]]) -> Handle:
    if isinstance(target, Block):
        return target
    numbers = np.array([number for number, _ in group], dtype=np.int64)
    return Blocks(target.pool, target.ids[numbers], target.generations[numbers])
