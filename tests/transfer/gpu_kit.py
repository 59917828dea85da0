"""A GPU that is not there: streams, events and copies on host memory, and faults on demand.

Its rules are CUDA's where the device depends on them: a stream is first in, first out; a wait is for
the record that it saw; a query of an event that was never recorded says "done"; once the context is
lost, every call says so.
"""

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.transfer.gpu_tiles import move_tiles

from transfer._cuda_api import CudaError
from transfer._cuda_memory import DeviceStorage, paged
from transfer._cuda_pinned import PinnedStorage
from transfer._extent import BlockLayout, HasBlockLayout
from transfer._memory import Pool
from transfer._pieces import Rows

if TYPE_CHECKING:
    from random import Random

    from transfer._extent import Int64Array


@dataclass(eq=False)
class FakeEvent:
    """Counts records: those that were queued, and those that a stream has got to."""

    queued: int = 0
    reached: int = 0
    dropped: bool = False
    handle: int = 0


@dataclass(eq=False)
class FakeStream:
    """Commands in order."""

    commands: deque[tuple[str, Any]] = field(default_factory=deque)
    held: bool = False
    captured: bool = False
    dropped: bool = False
    handle: int = 0
    urgent: bool = False


@dataclass(eq=False)
class Device:
    """What cuda.core's streams carry."""

    device_id: int = 0


class CoreStream:
    """A caller's stream, as cuda.core has it."""

    def __init__(self, stream: FakeStream, ordinal: int = 0) -> None:
        self.stream = stream
        self.device = Device(ordinal)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.handle


class CoreEvent:
    """A caller's event, as cuda.core has it."""

    is_done = False

    def __init__(self, event: FakeEvent, ordinal: int = 0) -> None:
        self.handle = event.handle
        self.device = Device(ordinal)


class FakeDriver:
    """Stands for `transfer._cuda_driver.CudaDriver`.

    Args:
        ordinal: number of the GPU.
        manual: nothing runs but in `run`; otherwise a thread runs what can run.

    Attributes:
        shuffle: draws which stream goes on; None for the first that can.
    """

    def __init__(self, ordinal: int = 0, *, manual: bool = False) -> None:
        self.ordinal = ordinal
        self.calls: Counter[str] = Counter()
        self.faults: dict[tuple[str, int], int] = {}
        self.lost: int | None = None
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.memory: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.captures = False
        self.opened = 0
        self.scopes = 0
        self.log: list[tuple[str, Any]] = []
        self.shuffle: Random | None = None
        self._changed = threading.Condition(threading.RLock())
        self._stopping = False
        self._manual = manual
        self._thread = threading.Thread(target=self._serve, name="fake gpu", daemon=True)
        if not manual:
            self._thread.start()

    # Faults

    def fail(self, name: str, nth: int, code: int = 2) -> None:
        """Make the nth call from now on of one name answer `code`; it then does nothing."""
        self.faults[name, self.calls[name] + nth] = code

    def _enter(self, name: str) -> None:
        with self._changed:
            self.calls[name] += 1
            code = self.faults.pop((name, self.calls[name]), None)
        if code is not None:
            raise CudaError(code, name, "injected")
        if self.lost is not None:
            raise CudaError(self.lost, name, "the context is lost")

    def lose_context(self, code: int = 700) -> None:
        """From now on every call answers `code`."""
        with self._changed:
            self.lost = code
            self._changed.notify_all()

    # Running

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if not self._manual:
            self._thread.join()

    def _serve(self) -> None:
        with self._changed:
            while not self._stopping:
                if not self._advance():
                    self._changed.wait()

    def run(self) -> None:
        """Run all that can run."""
        with self._changed:
            while self._advance():
                pass

    def step(self) -> bool:
        """Run one command; whether there was one that could run."""
        with self._changed:
            return self._advance()

    def _advance(self) -> bool:
        if self.lost is not None:
            return False
        streams = self.streams
        if self.shuffle is not None:
            streams = self.shuffle.sample(streams, len(streams))
        for stream in streams:
            if stream.held or not stream.commands:
                continue
            name, what = stream.commands[0]
            if name == "wait" and what[0].reached < what[1]:
                continue
            stream.commands.popleft()
            if name == "record":
                what[0].reached = max(what[0].reached, what[1])
            elif name == "call":
                what()
            self._changed.notify_all()
            return True
        return False

    def hold(self, stream: FakeStream) -> None:
        """Let a stream stand still, as behind a kernel that spins."""
        with self._changed:
            stream.held = True

    def let_go(self, stream: FakeStream) -> None:
        """Let it run again."""
        with self._changed:
            stream.held = False
            self._changed.notify_all()

    def queue(self, stream: FakeStream, call: Callable[[], None]) -> None:
        """Put work of a caller on a stream."""
        with self._changed:
            stream.commands.append(("call", call))
            self._changed.notify_all()

    # What the device asks

    def open(self) -> None:
        self._enter("open")
        self.opened += 1

    def shut(self) -> None:
        self._enter("shut")
        self.opened -= 1

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.scopes += 1
        try:
            yield
        finally:
            self.scopes -= 1

    def context(self) -> AbstractContextManager[None]:
        return self.scope()

    def adopt_thread(self) -> None:
        self._enter("adopt_thread")

    def bus_id(self) -> str:
        return "0000:00:00.0"

    def attribute(self, name: str) -> int:
        return {"CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1}[name]

    def stream(self, *, urgent: bool = False) -> FakeStream:
        self._enter("stream")
        made = FakeStream(handle=len(self.streams) + 100, urgent=urgent)
        with self._changed:
            self.streams.append(made)
        return made

    def stream_of(self, handle: int) -> FakeStream:
        return self.streams[handle - 100]

    def drop_stream(self, stream: FakeStream) -> None:
        self._enter("drop_stream")
        assert not stream.commands
        stream.dropped = True

    def capturing(self, stream: FakeStream) -> bool:
        return stream.captured

    def caller_captures(self) -> bool:
        return self.captures

    def event(self, *, blocking: bool) -> FakeEvent:
        self._enter("event")
        made = FakeEvent(handle=len(self.events) + 1)
        self.events.append(made)
        return made

    def event_of(self, handle: int) -> FakeEvent:
        return self.events[handle - 1]

    def drop_event(self, event: FakeEvent) -> None:
        self._enter("drop_event")
        assert not event.dropped
        event.dropped = True

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._enter("record")
        assert not event.dropped
        assert not stream.dropped
        with self._changed:
            event.queued += 1
            stream.commands.append(("record", (event, event.queued)))
            self._changed.notify_all()

    def done(self, event: FakeEvent) -> bool:
        self._enter("done")
        return event.reached >= event.queued

    def sync(self, event: FakeEvent) -> None:
        self._enter("sync")
        with self._changed:
            wanted = event.queued
            self._changed.wait_for(lambda: event.reached >= wanted or self.lost or self._stopping)
            if self.lost:
                raise CudaError(self.lost, "sync", "the context is lost")

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._enter("wait")
        assert not event.dropped
        with self._changed:
            stream.commands.append(("wait", (event, event.queued)))
            self._changed.notify_all()

    def copy(self, dst: int, src: int, nbytes: int, stream: FakeStream) -> None:
        self._enter("copy")
        self.log.append(("copy", nbytes))
        self.queue(stream, lambda: self._memmove(dst, src, nbytes))

    def copy_rows(self, rows: Rows, stream: FakeStream) -> None:
        self._enter("copy_rows")
        self.log.append(("copy_rows", rows.number))

        def call() -> None:
            for row in range(rows.number):
                dst, src = rows.dst + row * rows.dst_step, rows.src + row * rows.src_step
                self._memmove(dst, src, rows.nbytes)

        self.queue(stream, call)

    def copy_batch(
        self, dst: "Int64Array", src: "Int64Array", nbytes: "Int64Array", stream: FakeStream
    ) -> None:
        self._enter("copy_batch")
        parts = list(zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True))
        self.log.append(("copy_batch", len(parts)))

        def call() -> None:
            for part in parts:
                self._memmove(*part)

        self.queue(stream, call)

    @staticmethod
    def _memmove(dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    def _make(self, nbytes: int) -> int:
        raw = ctypes.create_string_buffer(nbytes + 64)
        address = -(-ctypes.addressof(raw) // 64) * 64
        self.memory[address] = raw
        return address

    def allocate(self, nbytes: int) -> int:
        self._enter("allocate")
        return self._make(nbytes)

    def free(self, address: int) -> None:
        self._enter("free")
        del self.memory[address]

    def allocate_host(self, nbytes: int) -> int:
        self._enter("allocate_host")
        return self._make(nbytes)

    def free_host(self, address: int) -> None:
        self._enter("free_host")
        del self.memory[address]

    def register(self, address: int, nbytes: int) -> None:
        self._enter("register")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self._enter("unregister")
        del self.registered[address]


class FakeKernels:
    """Stands for the Triton kernels: the same arguments, the same bytes."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.movers: dict[tuple[int, bool], Any] = {
            (word, large): f"move {word}"
            for word, large in ((8, True), (8, False), (4, False), (1, False))
        }
        self.loaded: list[Any] = []
        self.units: list[int] = []

    def load(self, program: Any) -> None:
        self.loaded.append(program)

    def launch(self, stream: FakeStream, units: int, program: Any, items: int, *args: int) -> None:
        try:
            self._driver._enter("launch")
        except CudaError as error:
            raise RuntimeError(f"Triton Error [CUDA]: {error}") from error
        self.units.append(units)
        word = int(program.split()[1])
        assert items == args[1] * args[2]
        self._driver.log.append(("launch", items))
        self._driver.queue(stream, lambda: move_tiles(word, *args))

    def lend(self, stream: FakeStream) -> FakeStream:
        return stream


def device_pool(layout: HasBlockLayout, blocks: int, kind: str = "cuda:0") -> Pool:
    """A `DevicePool` on host memory."""
    plan: BlockLayout = paged(layout.block_layout)
    storage = DeviceStorage(plan, blocks, "cpu")
    storage.kind = kind
    return Pool(plan, blocks, storage, name="device pool")


def pinned_pool(layout: HasBlockLayout, blocks: int, driver: FakeDriver, **options: Any) -> Pool:
    """A `PinnedPool` whose registrations are the fake driver's."""
    plan = layout.block_layout
    return Pool(
        plan, blocks, PinnedStorage(plan.nbytes, blocks, driver, **options), name="pinned pool"
    )
