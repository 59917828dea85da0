"""An owner: a task that leases blocks, moves them about, cancels, waits, and sometimes errs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

import anyio

from kvhold.campaigns._model import Cell, Record, Version, ancestors
from kvhold.campaigns._requests import Requests
from kvhold.campaigns._world import GPU
from transfer import (
    BadWork,
    CompletionLost,
    DevicePoisoned,
    HoldConflict,
    LeaseError,
    NotPosted,
    OperationCancelled,
    OperationFailed,
    PoolExhausted,
    StaleBlock,
    State,
    SubmitError,
    TransferError,
    WouldBlock,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvhold.campaigns._world import World
    from transfer import Block
    from transfer._work import Work
    from transfer.testing import SimStream

_OUTCOMES: Final = (
    OperationFailed,
    OperationCancelled,
    CompletionLost,
    SubmitError,
    DevicePoisoned,
)


@final
class Owner:
    """One of a schedule's tasks.

    Args:
        world: what it runs in.
        name: of this owner, for the names of its operations.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.random = world.random
        self.requests = Requests(world, name)
        self.cells: list[Cell] = []
        self.records: list[Record] = []
        self.stale: list[Block] = []
        self.foreign: list[Cell] = []

    def own(self, block: Block) -> None:
        """Take a block of memory that the host program owns."""
        cell = Cell(block, None)
        self.world.cells[block.pool, block.id] = cell
        self.foreign.append(cell)
        self._write(cell)

    async def pause(self, most: int = 4) -> None:
        """Give the devices and the others their turn."""
        for _ in range(self.random.randint(1, most)):
            await asyncio.sleep(0)

    async def live(self, quota: int) -> None:
        """Act until `quota` operations were begun and a block was reused, then let go of all."""
        actions: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (6, self.lease),
            (12, self.move),
            (3, self.cancel),
            (4, self.wait),
            (4, self.run_and_leave),
            (3, self.release),
            (2, self.write),
            (2, self.err),
            (1, self.produce),
            (1, self.drain),
        ]
        weights = [weight for weight, _ in actions]
        rounds = 0
        while rounds < 40 * quota and (self._begun < quota or not self.world.reuses):
            rounds += 1
            (action,) = self.random.choices([action for _, action in actions], weights)
            await action()
            await self.pause()
        if self.random.random() < 0.5:
            for record in self.records:
                await self.outcome(record)
        while self.cells:
            await self.release()

    @property
    def _begun(self) -> int:
        return len(self.records)

    # Blocks

    async def lease(self) -> None:
        """Lease blocks and write something of its own into them."""
        if len(self.cells) >= 5:
            await self.release()
            return
        pool = self.random.choice((self.world.pages, self.world.slots))
        for _ in range(self.random.randint(1, 2)):
            try:
                lease = pool.lease()
            except PoolExhausted:
                return
            cell = Cell(lease.handle, lease)
            self.world.cells[pool, cell.block.id] = cell
            self.cells.append(cell)
            self._write(cell)

    def _write(self, cell: Cell) -> None:
        """Write into a block that no operation holds: at once on the host, in a stream on a GPU."""
        data = self.world.pattern()
        if cell.block.pool.kind == "host":
            cell.block.view(write=True)[:] = data
        else:
            self._fill(cell, data, self.world.stream())
        cell.version = Version(data)

    @staticmethod
    def _fill(cell: Cell, data: bytes, stream: SimStream) -> None:
        half = len(data) // 2
        stream.fill(cell.block, data[:half])
        stream.fill(cell.block, data[half:], plane=1)
        cell.stream = stream
        cell.fill = stream.event().fence

    async def write(self) -> None:
        """Overwrite a block of its own; one that is held must refuse to be looked into."""
        cell = self._pick(self.cells)
        if cell is None or not cell.filled:
            return
        if not cell.pending():
            self._write(cell)
        elif cell.block.pool.kind == "host" and not self.world.schedule.naive:
            # What has been refused or ended since is the engine's to know; what is pending is held.
            try:
                cell.block.view(write=True)
            except LeaseError:
                return
            self.world.report("outcome", f"{cell.block!r} is held and was lent out for writing")

    async def release(self) -> None:
        """Give a block back, whatever still touches it."""
        cell = self._pick(self.cells)
        if cell is not None:
            await self._release(cell)

    async def _release(self, cell: Cell) -> None:
        assert cell.lease is not None  # noqa: S101 - foreign cells are kept apart
        self.cells.remove(cell)
        while not cell.filled:  # noqa: ASYNC110 - turns of the loop are what makes it come true
            await asyncio.sleep(0)
        del self.world.cells[cell.block.pool, cell.block.id]
        cell.lease.release()
        self.stale.append(cell.block)

    def _pick(self, cells: list[Cell]) -> Cell | None:
        return self.random.choice(cells) if cells else None

    # Operations

    async def move(self) -> None:
        """Begin one operation on blocks of its own, ordered behind what touches them."""
        chosen = self.requests.choose(self.cells)
        if chosen is None:
            return
        record, work, after = chosen
        await self._submit(record, work, after)

    async def _submit(self, record: Record, work: Work, after: tuple[object, ...]) -> None:
        engine, world = self.world.engine, self.world
        self._begin(record, work)
        try:
            if self.random.random() < 0.3:
                record.op = engine.submit_nowait(work, after=after, name=record.name)
            else:
                record.op = await engine.submit(work, after=after, name=record.name)
        except WouldBlock:
            world.model.refuse(record)
        except (CompletionLost, KeyboardInterrupt):
            if not record.lost:
                world.report("outcome", f"{record.name} was lost at the call and is not known lost")
        except (TransferError, HoldConflict) as error:
            self._refused(record, error)

    def _begin(self, record: Record, work: Work) -> None:
        self.world.operations += 1
        self.records.append(record)
        self.world.works[id(work)] = record
        self.requests.works.append(work)
        self.world.model.add(record)

    def _refused(self, record: Record, error: Exception) -> None:
        self.world.model.refuse(record)
        # Behind a lost operation there is no success: it fails at the call, or later.
        doomed = any(earlier.lost for earlier in ancestors(record.after))
        if not (record.disturbed or doomed or self.world.poisoned):
            self.world.report("outcome", f"{record.name} was refused without a reason: {error}")

    async def cancel(self) -> None:
        """Cancel any operation of its own, whatever its state."""
        known = [r for r in self.records if r.op is not None]
        unposted = [r for r in known if r.state is State.PREPARED]
        record = self.random.choice(unposted or known) if known else None
        if record is not None and record.op is not None:
            record.cancelled = True
            # A cancelled operation can let others be posted, and there an interrupt can strike.
            with suppress(KeyboardInterrupt):
                record.op.cancel()

    async def wait(self) -> None:
        """Wait for any operation of its own."""
        if self.records:
            await self.outcome(self.random.choice(self.records[-6:]))

    async def outcome(self, record: Record) -> None:
        """Wait for an operation; when that returns, nothing holds its blocks any more."""
        if record.op is None:
            return
        try:
            await record.op.wait()
        except CompletionLost:
            return
        except _OUTCOMES:
            pass
        self._check_let_go(record)

    def _check_let_go(self, record: Record) -> None:
        for cell in (*record.reads, *record.writes):
            if cell in self.cells and record.op in self.world.engine.holders(cell.block):
                self.world.report("outcome", f"{record.name} has ended and still holds a block")

    async def run_and_leave(self) -> None:
        """Make a call that owns its operation, and cancel the task or the scope that makes it."""
        cells = [*self.foreign, *self.cells] if self.random.random() < 0.4 else self.cells
        chosen = self.requests.choose(cells)
        if chosen is None:
            return
        record, work, after = chosen
        self._begin(record, work)
        run = self.world.engine.run(work, after=after, name=record.name)
        scope = anyio.CancelScope()

        async def within() -> None:
            with scope:
                await run

        task = asyncio.ensure_future(within())
        await self.pause(8)
        native = self.random.random() < 0.5
        record.cancelled = not task.done()
        task.cancel() if native else scope.cancel()
        await asyncio.wait((task,))
        self._check_left(record, task)

    def _check_left(self, record: Record, task: asyncio.Future[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if record.state.value == "prepared" and not record.settled:
            self.world.model.refuse(record)  # it never came so far as to hold anything
        elif isinstance(error, (HoldConflict, TransferError)) and not isinstance(
            error, (OperationFailed, OperationCancelled, CompletionLost)
        ):
            self._refused(record, error)
        elif error is not None and not isinstance(error, (*_OUTCOMES, KeyboardInterrupt)):
            self.world.report("outcome", f"{record.name} raised {error!r}")
        foreign = any(cell.block.pool.foreign for cell in (*record.reads, *record.writes))
        if (
            foreign
            and not record.settled
            and not isinstance(error, (CompletionLost, KeyboardInterrupt))
        ):
            self.world.report("outcome", f"{record.name} was left with foreign blocks in use")

    async def produce(self) -> None:
        """Write a page in a stream while an `External` holds it."""
        cell = self._pick([c for c in self.cells if c.block.pool.kind == GPU and not c.pending()])
        if cell is None or not cell.filled:
            return
        record, work, data = self.requests.external(cell)
        await self._submit(record, work, ())
        if record.op is None or record.op.decided:
            return
        stream = self.world.stream()
        self._fill(cell, data, stream)
        await self.pause()
        try:
            record.op.finish(stream)
        except NotPosted:
            return

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        if self.random.random() < 0.3:
            await self.world.engine.drain()

    # Errors of the caller

    async def err(self) -> None:
        """Do what a caller must not; each has its own error, and changes nothing."""
        if self.world.schedule.naive:
            return
        await self.random.choice((self.use_stale, self.forget_order, self.release_twice))()

    async def use_stale(self) -> None:
        """Name a block by a handle of an earlier lease."""
        if not self.stale:
            return
        block = self.random.choice(self.stale)
        self._must_raise(self.requests.onto(block, self.cells), StaleBlock)

    async def forget_order(self) -> None:
        """Name a block that an operation writes, without order."""
        busy = [c for c in self.cells if any(c in r.writes for r in c.pending())]
        cell = self._pick(busy)
        if cell is not None:
            self._must_raise(self.requests.onto(cell.block, []), HoldConflict)

    def _must_raise(self, work: Work | None, expected: type[Exception]) -> None:
        if work is None:
            return
        try:
            self.world.engine.submit_nowait(work, after=(), name="wrong")
        except (expected, WouldBlock):
            return
        except (TransferError, BadWork) as error:
            if not self.world.poisoned and not isinstance(error, SubmitError):
                self.world.report("outcome", f"expected {expected.__name__}, found {error!r}")
            return
        self.world.report("outcome", f"{work!r} should have raised {expected.__name__}")

    async def release_twice(self) -> None:
        """Give a block back that was given back."""
        cell = self._pick(self.cells)
        if cell is None or cell.lease is None or cell.pending() or not cell.filled:
            return
        await self._release(cell)
        counts = cell.block.pool.counts()
        try:
            cell.lease.release()
        except LeaseError:
            if cell.block.pool.counts() == counts:
                return
        self.world.report("outcome", f"a second release of {cell.block!r} changed something")
