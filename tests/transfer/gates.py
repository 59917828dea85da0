"""What tests of the async shell share: gates that real workers stop at, and a device run by hand."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio.lowlevel
import anyio.to_thread
from anyio import CapacityLimiter

from transfer import (
    BlockLayout,
    Copy,
    Engine,
    HostDevice,
    Launch,
    Operation,
    Pool,
    State,
)
from transfer._device import PlainDevice
from transfer._fence import CompletionQueue, Fence
from transfer._storage import MappedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from transfer._work import HandleLike, Route, Work

PATIENCE = 60.0
"""Seconds after which a test that waits for an event gives up; nothing is timed by it."""

BYTES = 4096
LAYOUT = BlockLayout.raw(BYTES)


class Gate:
    """A callable for `Launch`: says that its worker is inside, waits until opened, then acts."""

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self.entered = threading.Event()
        self.passed = threading.Event()
        self._open = threading.Event()
        self._action = action

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE)
        if self._action is not None:
            self._action()
        self.passed.set()

    def open(self) -> None:
        """Let it through."""
        self._open.set()

    async def reached(self) -> None:
        """Wait until a worker is inside, without blocking the loop."""
        assert await in_thread(lambda: self.entered.wait(PATIENCE))

    async def left(self) -> None:
        """Wait until the worker went through, without blocking the loop."""
        assert await in_thread(lambda: self.passed.wait(PATIENCE))


async def in_thread(function: Callable[[], bool]) -> bool:
    """Wait for a thread elsewhere; a limiter of its own, so nothing queues behind other tests."""
    return await anyio.to_thread.run_sync(function, limiter=CapacityLimiter(1))


@contextmanager
def gates(count: int) -> Iterator[list[Gate]]:
    """Gates that are open at the end whatever happens, so no worker stays behind."""
    made = [Gate() for _ in range(count)]
    try:
        yield made
    finally:
        for gate in made:
            gate.open()


def host_engine(*, threads: int = 2, drain_deadline: float = PATIENCE) -> Engine:
    """An engine whose copies always go through a worker thread."""
    return Engine(HostDevice(threads=threads, inline_bytes_max=0), drain_deadline=drain_deadline)


def foreign_pool(blocks: int = 4) -> Pool:
    """A pool over memory that a host program owns."""
    return Pool(LAYOUT, blocks, MappedStorage(BYTES, blocks), name="foreign", foreign=True)


class FakeStorage(MappedStorage):
    """Host memory that says it is a device's."""

    kind = "fake:0"


def device_pool(blocks: int = 4) -> Pool:
    """A pool of memory of another kind than the host's."""
    return Pool(LAYOUT, blocks, FakeStorage(BYTES, blocks), name="device pool")


class Posted(NamedTuple):
    """What a `HandDevice` was given."""

    work: Work
    fence: Fence
    waits: tuple[Fence, ...]


class HandDevice(PlainDevice):
    """A device that does nothing until the test says so. Streams are strings; events are bytes.

    Attributes:
        posted: what was enqueued, in order.
        joined: (stream, fence) of every `join`.
        marks: fences that `record` gave out, with the stream.
        on_enqueue: called before anything is posted; may raise.
        after_enqueue: called when it is posted; may raise.
        on_start: called by `start`; may raise.
        chained: whether it can wait for its own fences.
        running: whether it is started.
    """

    def __init__(self, name: str = "hand", *, ordered: bool = False, chained: bool = False) -> None:
        self.name = name
        self.routes: frozenset[Route] = frozenset(
            {(Launch, name), (Copy, "fake:0", "fake:0"), (Copy, "fake:0", "host")}
        )
        self.ordered = ordered
        self.chained = chained
        self.completions = CompletionQueue()
        self.posted: list[Posted] = []
        self.joined: list[tuple[object, Fence]] = []
        self.marks: list[tuple[object, Fence]] = []
        self.on_enqueue: Callable[[], None] = _nothing
        self.after_enqueue: Callable[[], None] = _nothing
        self.on_start: Callable[[], None] = _nothing
        self.running = False

    def start(self) -> None:
        """Note it."""
        self.on_start()
        self.running = True

    def close(self) -> None:
        """Note it."""
        self.running = False

    def check(self, work: Work) -> None:
        """Everything is fine."""

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Note it."""
        self.on_enqueue()
        fence = Fence()
        self.posted.append(Posted(work, fence, tuple(waits)))
        self.after_enqueue()
        return fence

    def can_wait(self, fence: Fence) -> bool:
        """Only for its own fences, and only if it was made so."""
        own = [posted.fence for posted in self.posted] + [mark for _, mark in self.marks]
        return self.chained and fence in own

    def owns_stream(self, stream: object) -> bool:
        """Strings are streams, bytes are events."""
        return isinstance(stream, str | bytes)

    def stream_key(self, stream: object) -> Hashable | None:
        """A stream's name; None for an event."""
        return stream if isinstance(stream, str) else None

    def record(self, stream: object) -> Fence:
        """Note it."""
        fence = Fence()
        self.marks.append((stream, fence))
        return fence

    def join(self, stream: object, fence: Fence) -> None:
        """Note it."""
        self.joined.append((stream, fence))

    def finish(self, fence: Fence, stream: object | None) -> None:
        """The host program's work has ended."""
        del stream
        self.completions.post(fence)

    def signal(
        self, index: int = -1, error: BaseException | None = None, *, lost: bool = False
    ) -> None:
        """Signal the fence of one thing that was posted."""
        self.completions.post(self.posted[index].fence, error, lost=lost)


def _nothing() -> None:
    """What a hook does by default."""


def hand_launch(*, reads: Sequence[HandleLike] = (), writes: Sequence[HandleLike] = ()) -> Launch:
    """Work for a `HandDevice` called "hand"."""
    return Launch(_nothing, reads=reads, writes=writes, on="hand")


def check_posted(ops: Sequence[Operation], device: HandDevice) -> None:
    """No operation whose work a device has may look as if it were not posted."""
    given = [id(posted.work) for posted in device.posted]
    for op in ops:
        if id(op.work) in given:
            assert op.state is not State.PREPARED
            assert op.posted


async def turns(count: int = 12) -> None:
    """Let the loop go round; enough for everything that needs no other thread to come to rest."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()
