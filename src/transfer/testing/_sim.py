"""SimDevice: a device whose every byte moves when a test says so, the same way for the same seed.

The fault model, for all that is simulated here:

* Between `enqueue` and the signal bytes move a few at a time, in the order of each stream, and in
  any order between streams and between the parts of one copy. The source is read when its bytes
  move. A buffer that is reused too early is therefore damaged, or damages its successor.
* Nothing stops work that was posted: not a cancel, not a loss, not closing the device. Bytes go on
  moving after all of them for as long as somebody steps.
* A fence signals once, behind the last byte of its work, whatever an earlier part raised.
* A wait for a fence or event that was never recorded waits for nothing, as on CUDA.
* Memory that was given back and is still touched is counted in `touched_unmapped`.
* The device itself never errs, loses or repeats a signal: that is what `FaultyDevice` adds.
* There is no clock: a step takes no time unless the test lets `run` sleep between steps.

Not modelled: caches and torn words (a byte moves whole), reordering inside a stream, more than one
process.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING, final

import anyio

from transfer._errors import SubmitError, WrongDevice
from transfer._fence import CompletionQueue, Fence
from transfer._loop import current_loop
from transfer._routing import route_name
from transfer._work import Copy, External, Launch
from transfer.testing._memory import KeptStorage, SimStorage
from transfer.testing._stream import (
    Call,
    Moves,
    Record,
    Run,
    SimEvent,
    SimFence,
    SimStream,
    Wait,
    scatter,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from transfer._loop import Loop
    from transfer._storage import Storage
    from transfer._work import Route, Work

_STEPS_AT_ONCE = 16  # in auto mode, so that other callbacks of the loop get their turn


@final
class SimDevice:
    """A device that moves bytes only when it is stepped.

    Who steps: the test calls `step` or `run_until_idle`; or a task of the test runs `run`, on
    whatever clock the loop has; or, with ``auto=True``, a callback of the loop does.

    Args:
        kind: the memory it serves besides the host's: ``"sim:0"``, or ``"host"`` alone.
        seed: the one source of every choice.
        chunk: smallest and largest number of bytes that one step moves.
        lanes: streams of its own that posted work is spread over.
        parts: how many parts of one copy advance on their own.
        ordered: whether ``after=`` must be given; by default where the memory is not the host's.
        auto: step in callbacks of the loop that started it.
        peers: other devices whose fences its streams can wait for.
        name: for messages and statistics.

    Attributes:
        random: drawn from for every choice.
        steps: how many steps were done.
        touched_unmapped: how often bytes moved in memory that had been given back.
    """

    def __init__(
        self,
        *,
        kind: str = "sim:0",
        seed: int = 0,
        chunk: tuple[int, int] = (1, 16),
        lanes: int = 2,
        parts: int = 2,
        ordered: bool | None = None,
        auto: bool = False,
        peers: Iterable[SimDevice] = (),
        name: str = "",
    ) -> None:
        self.kind = kind
        self.name = name or kind
        self.ordered = kind != "host" if ordered is None else ordered
        self.auto = auto
        self.completions = CompletionQueue()
        self.random = Random(seed)
        self.steps = 0
        self.touched_unmapped = 0
        self.routes: frozenset[Route] = frozenset(
            {(Copy, kind, kind), (Copy, kind, "host"), (Copy, "host", kind)}
            | {(Launch, kind), (External, kind)}
        )
        self._chunk = chunk
        self._parts = parts
        self._peers = frozenset(peers)
        self._numbers = itertools.count()
        self._streams: list[SimStream] = []
        self._own = [self.stream() for _ in range(lanes)]
        self._external: dict[SimFence, list[Wait]] = {}
        self._started = False
        self._loop: Loop | None = None
        self._ticking = False
        self._work: anyio.Event | None = None
        self._waiters: list[SimDevice] = []
        for peer in self._peers:
            peer._waiters.append(self)

    def __repr__(self) -> str:
        return f"<{self.name}, {sum(len(s.items) for s in self._streams)} items queued>"

    # Stepping

    def step(self, count: int = 1) -> int:
        """Do up to `count` steps of whatever streams can advance; how many were done."""
        for done in range(count):
            able = [s for s in self._streams if s.items and s.items[0].ready()]
            if not able:
                return done
            stream = able[0] if len(able) == 1 else self.random.choice(able)
            self.steps += 1
            if stream.items[0].advance(self):
                stream.items.popleft()
                if stream.once and not stream.items:
                    self._streams.remove(stream)
        return count

    def run_until_idle(self) -> int:
        """Step until nothing can advance; how many steps that took."""
        done = 0
        while self.step():
            done += 1
        return done

    async def run(self, *, tick: float = 0.0) -> None:
        """Step once every `tick` seconds of the loop's clock, until cancelled; sleeps when idle."""
        while True:
            if self.step():
                await anyio.sleep(tick)
            else:
                self._work = anyio.Event()
                await self._work.wait()

    @property
    def idle(self) -> bool:
        """Whether no step would do anything."""
        return not any(s.items and s.items[0].ready() for s in self._streams)

    def kick(self) -> None:
        """Something was queued, or may advance now."""
        if self._loop is not None:
            if not self._ticking:
                self._ticking = True
                self._loop.post(self._tick)
        elif self._work is not None:
            self._work.set()

    def _tick(self) -> None:
        self._ticking = False
        self.step(_STEPS_AT_ONCE)
        if not self.idle:
            self.kick()

    def signal(self, fence: SimFence, *, report: bool) -> None:
        """A fence has signaled: report it, and let devices that may wait for it go on."""
        fence.signaled = True
        if report:
            self.completions.post(fence, fence.error)
        for waiter in self._waiters:
            waiter.kick()

    def draw_chunk(self) -> int:
        """Bytes that the next step moves."""
        return self.random.randint(*self._chunk)

    def touch(self, storages: Iterable[Storage]) -> None:
        """Count a use of memory that was given back."""
        for storage in storages:
            if isinstance(storage, (SimStorage, KeptStorage)) and storage.closed:
                self.touched_unmapped += 1

    # The device protocol

    def start(self) -> None:
        """Accept work; legal again after `close`."""
        if self._started:
            raise RuntimeError(f"{self!r} is started already")
        self._started = True
        self._loop = current_loop() if self.auto else None

    def close(self) -> None:
        """Accept no more work. What is posted goes on for as long as somebody steps."""
        self._started = False

    def check(self, work: Work) -> None:
        """Refuse work of another device, and streams of another device.

        Raises:
            WrongDevice: says what was found and what is expected.
        """
        if work.route not in self.routes:
            served = ", ".join(sorted(map(route_name, self.routes)))
            raise WrongDevice(f"{self.name} serves {served}; found {route_name(work.route)}")
        if isinstance(work, Launch) and work.stream is not None:
            self._stream_of(work.stream)

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Post work behind `waits`.

        Raises:
            SubmitError: the device is not started.
        """
        if not self._started:
            raise SubmitError(f"{self!r} is not started")
        fence = self._fence()
        before = [Wait(f) for f in waits if isinstance(f, SimFence)]
        if isinstance(work, External):
            self._external[fence] = before
        elif isinstance(work, Launch):
            given = work.stream
            stream = self.random.choice(self._own) if given is None else self._stream_of(given)
            args = () if work.on == "host" else (stream,)
            self._post(stream, before, Call(work.fn, args, fence), fence)
        else:
            assert isinstance(work, Copy)
            body = Moves(scatter(_runs(work), self._parts, self.random))
            self._post(self.random.choice(self._own), before, body, fence)
        return fence

    def _fence(self) -> SimFence:
        return SimFence(self)

    def _post(
        self, stream: SimStream, before: list[Wait], body: Moves | Call, fence: SimFence
    ) -> None:
        stream.push(*before, body, Record(fence))

    def can_wait(self, fence: Fence) -> bool:
        """Whether `fence` is recorded in a stream of this device or of a peer."""
        return (
            isinstance(fence, SimFence)
            and fence.recorded
            and (fence.device is self or fence.device in self._peers)
        )

    # Streams

    def stream(self, name: str = "", *, once: bool = False) -> SimStream:
        """A new stream, for the host program's own work.

        Args:
            name: for messages.
            once: forget it when it first runs empty.
        """
        stream = SimStream(self, name or f"stream {next(self._numbers)}", once=once)
        self._streams.append(stream)
        return stream

    def event(self) -> SimEvent:
        """A new event that was not recorded yet."""
        return SimEvent(self)

    def _stream_of(self, stream: object) -> SimStream:
        if isinstance(stream, SimStream) and stream.device is self:
            return stream
        raise WrongDevice(f"{stream!r} is no stream of {self.name}")

    def owns_stream(self, stream: object) -> bool:
        """Whether it is a stream or event of this device."""
        return isinstance(stream, (SimStream, SimEvent)) and stream.device is self

    def stream_key(self, stream: object) -> Hashable | None:
        """The stream itself; None for an event."""
        return None if isinstance(stream, SimEvent) else self._stream_of(stream)

    def record(self, stream: object) -> Fence:
        """A fence behind what a stream holds now, or behind an event.

        Raises:
            BadWork: the event was never recorded.
        """
        fence = SimFence(self)
        if isinstance(stream, SimEvent):
            stream.check_recorded()
            watch = self.stream("watch", once=True)
            watch.push(Wait(stream.fence), Record(fence))
        else:
            self._stream_of(stream).push(Record(fence))
        return fence

    def join(self, stream: object, fence: Fence) -> None:
        """Make later work of `stream` wait for `fence`."""
        assert isinstance(fence, SimFence)
        self._stream_of(stream).push(Wait(fence))

    def finish(self, fence: Fence, stream: object | None) -> None:
        """Let the fence of an `External` signal behind what `stream` holds now.

        Raises:
            TypeError: no stream, and the memory is not the host's.
        """
        assert isinstance(fence, SimFence)
        if stream is None and self.kind != "host":
            raise TypeError(f"{self!r} needs a stream to finish behind, got None")
        where = self.stream("finish", once=True) if stream is None else self._stream_of(stream)
        where.push(*self._external.pop(fence), Record(fence))


def _runs(work: Copy) -> list[Run]:
    """Every run of bytes of every block of a copy."""
    src, dst = work.src.pool, work.dst.pool
    return [
        Run(
            (dst.storage, dst.address(dst_plane, int(target)) + dst_offset),
            (src.storage, src.address(src_plane, int(source)) + src_offset),
            nbytes,
        )
        for source, target in zip(work.src.ids, work.dst.ids, strict=True)
        for src_plane, src_offset, dst_plane, dst_offset, nbytes in work.runs.rows
    ]
