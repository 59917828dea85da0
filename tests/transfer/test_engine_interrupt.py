"""Ctrl-C at every line of the shell: no block comes back early, and nothing is stranded.

The interrupt is raised by a trace function at the n-th line that runs in the shell's files, for
n = 1, 2, 3 … until nothing fires. Workers are real, and check from their own thread, while they
run, that their block was not given to anyone.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from tests.transfer.gates import LAYOUT, foreign_pool

import transfer
from transfer import (
    CompletionLost,
    Engine,
    HostDevice,
    HostPool,
    Launch,
    Operation,
    Pool,
    State,
    TransferError,
)
from transfer._handle import Block

SOURCE = Path(transfer.__file__).parent
SHELL = {
    str(SOURCE / f"_{name}.py") for name in ("engine", "drain", "home", "loop", "reaper", "wait")
}
LEDGER = {str(SOURCE / f"_{name}.py") for name in ("ledger", "book", "order", "operation")}

# A loop that is torn down drops tasks that never began.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")

BACKENDS = [
    pytest.param(("asyncio", {}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]
Backend = tuple[str, dict[str, Any]]

Tracer = Callable[[FrameType, str, Any], Any]


class Striker:
    """Raises KeyboardInterrupt at the n-th line that this thread runs in some files.

    Attributes:
        place: where it struck.
    """

    def __init__(self, number: int, files: set[str], *, masked: bool) -> None:
        self.left = number
        self.place: str | None = None
        self._files = files
        self._masked = masked

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Tracer | None:
        del event, argument
        return self.line if frame.f_code.co_filename in self._files else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Tracer | None:
        del argument
        if event == "line" and self.place is None and not self._protected(frame):
            self.left -= 1
            if self.left == 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.place)
        return self.line

    def _protected(self, frame: FrameType | None) -> bool:
        """Trio holds interrupts back while it runs callbacks."""
        while self._masked and frame is not None:
            if frame.f_code.co_name == "_reap_some":
                return True
            frame = frame.f_back
        return False


class Story:
    """One run of an engine with operations of every kind, and what must hold all along."""

    def __init__(self, number: int, files: set[str], backend: Backend) -> None:
        self.early: list[str] = []
        # Struck inside the ledger, an operation may stay in flight until the drain gives up.
        self.patience = 0.2 if files >= LEDGER else 20
        self.pool = HostPool(LAYOUT, 4)
        self.foreign = foreign_pool(2)
        self.striker = Striker(number, files, masked=backend[0] == "trio")
        self.engine = Engine(
            HostDevice(threads=1),
            in_flight_max=2,
            drain_deadline=self.patience,
            trace=lambda _: None,
        )
        self._backend = backend

    def work(self, block: Block) -> Launch:
        """Work that checks, on its own thread, that nobody else could get its block."""

        def run() -> None:
            for _ in range(20):
                if block.id in block.pool.book.free or not block.pool.book.held[block.id]:
                    self.early.append(f"{block!r} struck at {self.striker.place}")

        return Launch(run, writes=[block])

    def run(self) -> bool:
        """Live through it; whether the strike fell."""
        before = sys.gettrace()
        try:
            # Set in here: what the backend does before and after is not the shell.
            anyio.run(self._main, backend=self._backend[0], backend_options=self._backend[1])
        except KeyboardInterrupt:
            assert self.striker.place is not None
        except BaseExceptionGroup as several:  # trio names every task that was struck
            if several.split((KeyboardInterrupt, CompletionLost))[1] is not None:
                raise
        finally:
            sys.settrace(before)
        return self.striker.place is not None

    async def _main(self) -> None:
        sys.settrace(self.striker)
        async with self.engine, anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(self._own)
            group.start_soon(self._foreign)

    async def _own(self) -> None:
        lease = self.pool.lease()
        try:
            first = await self.engine.submit(self.work(lease.handle))
            second = await self.engine.submit(self.work(lease.handle), after=first)
        finally:
            lease.release()
        await second.wait_posted()
        await second.wait()
        with self.pool.lease() as block, anyio.move_on_after(0):
            await self.engine.run(self.work(block))
        with self.pool.lease() as block:
            third = await self.engine.submit(self.work(block))
        third.cancel()
        await self.engine.drain()

    async def _foreign(self) -> None:
        block = self.foreign.block(0)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await self.engine.run(self.work(block))
        await self.engine.run(self.work(block))

    def check(self) -> str:
        """Close what is left of it; everything is accounted for."""
        place = str(self.striker.place)
        left = [op for lane in self.engine._lanes for op in lane.live]
        assert all(op.state is not State.PREPARED for op in left if op.fence is not None), place
        try:
            self.engine.close_sync(self.patience)
        except CompletionLost:
            assert self.patience < 1, place
        assert self.early == [], place
        left = [op for lane in self.engine._lanes for op in lane.live if not op.decided]
        assert left == [], place
        return place


def blocks_back(pool: Pool) -> bool:
    return pool.counts().held + pool.counts().quarantined == 0


def sweep(backend: Backend, files: set[str], first: int, step: int) -> Iterator[Story]:
    """Stories struck at every `step`-th line from `first` on, until nothing fires."""
    struck = True
    gc.collect()
    gc.freeze()
    try:
        while struck:
            gc.collect()  # what an earlier story left must not be struck in this one
            story = Story(first, files, backend)
            struck = story.run()
            story.check()
            yield story
            first += step
    finally:
        gc.unfreeze()


def check_all_back(backend: Backend) -> int:
    """Strike at each line of the shell; every block is back once the engine is closed."""
    places = set()
    for story in sweep(backend, SHELL, 1, 1):
        places.add(story.striker.place)
        assert story.pool.counts() == (4, 0, 0, 0), story.striker.place
        assert blocks_back(story.foreign), story.striker.place
    return len(places)


@pytest.mark.parametrize("backend", BACKENDS)
def test_struck_at_every_line_of_the_shell(backend: Backend) -> None:
    assert check_all_back(backend) > 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_struck_anywhere_in_the_ledger_too(backend: Backend, seed: int) -> None:
    # Here a block may stay owned for too long, since an interrupt says nothing of how far a step
    # came; it is never given out early.
    assert len(list(sweep(backend, SHELL | LEDGER, 1 + seed % 13, 13))) > 50


def test_the_sweep_sees_a_block_that_comes_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: an engine that ends holds when the caller leaves is caught."""

    def naive(self: Engine, op: Operation) -> None:
        for hold in op.holds:
            hold.handle.pool.book.end(hold)

    monkeypatch.setattr("transfer._ledger.Ledger.cancel", naive)
    story = Story(sys.maxsize, SHELL, ("asyncio", {}))
    story.engine._drain_deadline = 0.2
    with suppress(BaseExceptionGroup, TransferError):
        story.run()
    with suppress(TransferError):
        story.engine.close_sync(0.2)
    assert any("generation" in line for line in story.early)
