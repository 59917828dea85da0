"""A device driven by hand, and a ledger over it: nothing happens until a test says so."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, cast, final

from transfer._errors import TransferError
from transfer._extent import BlockLayout
from transfer._fence import CompletionQueue, Fence
from transfer._lane import Lane
from transfer._ledger import Ledger
from transfer._memory import HostPool
from transfer._work import Copy, Launch

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from transfer._fence import Completion
    from transfer._handle import Handle
    from transfer._operation import Driver, Operation, Transition
    from transfer._state import State
    from transfer._work import HandleLike, Route, Work


@final
class HandFence(Fence):
    """A fence that knows whose it is, so that a failing test can say so."""

    __slots__ = ("device", "work")

    def __init__(self, device: HandDevice, work: Work | None) -> None:
        self.device = device
        self.work = work


@final
class HandStream:
    """A queue of a hand-driven device."""

    def __init__(self, device: HandDevice) -> None:
        self.device = device


@final
class HandDevice:
    """Takes everything, logs what it was given, ends nothing by itself.

    Attributes:
        posted: what was enqueued and has not been ended: work by fence, in order.
        log: everything that was ever enqueued, with what it had to wait for.
        waits_for: devices whose fences its queues can wait for.
        mood: what the next `enqueue` raises; None accepts.
        joined: fences that streams were put behind.
    """

    def __init__(
        self,
        name: str = "hand",
        *,
        kind: str = "host",
        ordered: bool = False,
        routes: Iterable[Route] | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.ordered = ordered
        self.routes = frozenset(
            [(Copy, kind, kind), (Launch, kind)] if routes is None else list(routes)
        )
        self.completions = CompletionQueue()
        self.posted: dict[Fence, Work] = {}
        self.log: list[tuple[Work, tuple[Fence, ...]]] = []
        self.waits_for: set[HandDevice] = set()
        self.mood: BaseException | None = None
        self.joined: list[tuple[object, Fence]] = []
        self.finished: list[tuple[Fence, object]] = []

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to stop."""

    def check(self, work: Work) -> None:
        """Accept all work."""

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Post, or raise what the test asked for."""
        mood, self.mood = self.mood, None
        if mood is not None:
            raise mood
        fence = HandFence(self, work)
        self.posted[fence] = work
        self.log.append((work, tuple(waits)))
        return fence

    def can_wait(self, fence: Fence) -> bool:
        """Whether the test allowed it."""
        return isinstance(fence, HandFence) and fence.device in self.waits_for

    def owns_stream(self, stream: object) -> bool:
        """Whether the stream was made for this device; strings starting with "event" are events."""
        return (isinstance(stream, HandStream) and stream.device is self) or (
            isinstance(stream, str) and stream.startswith("event")
        )

    def stream_key(self, stream: object) -> Hashable | None:
        """The stream itself; None for an event."""
        return stream if isinstance(stream, HandStream) else None

    def record(self, stream: object) -> Fence:
        """A fence in a stream."""
        del stream
        return HandFence(self, None)

    def join(self, stream: object, fence: Fence) -> None:
        """Remember it."""
        self.joined.append((stream, fence))

    def finish(self, fence: Fence, stream: object | None) -> None:
        """Remember it."""
        self.finished.append((fence, stream))


@final
class NoDriver:
    """Stands for an engine where no test asks an operation to wait."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __repr__(self) -> str:
        return "<no engine>"

    def cancel(self, op: Operation) -> None:
        self.calls.append(("cancel", op))

    async def wait(self, op: Operation) -> None:
        self.calls.append(("wait", op))

    async def wait_posted(self, op: Operation) -> None:
        self.calls.append(("wait_posted", op))

    def order_before(self, op: Operation, stream: object) -> None:
        self.calls.append(("order_before", op, stream))

    def finish(self, op: Operation, stream: object | None) -> None:
        self.calls.append(("finish", op, stream))


def nothing() -> None:
    """The callable of launches that no device ever calls."""


@final
class Rig:
    """A ledger, hand-driven devices and a pool.

    Attributes:
        trace: every transition, in order.
        left: lanes as operations left them.
    """

    def __init__(
        self,
        *,
        devices: int = 1,
        blocks: int = 16,
        nbytes: int = 64,
        streams: bool = False,
        quarantine_bytes_max: int | None = None,
        trace: Callable[[Transition], None] | None = None,
    ) -> None:
        self.devices = [HandDevice(f"hand{number}") for number in range(devices)]
        if streams:
            for device in self.devices:
                device.waits_for = {device}
        self.lanes = [Lane(device) for device in self.devices]
        self.trace: list[Transition] = []
        self.left: list[Lane] = []
        self.driver = NoDriver()
        self.ledger = Ledger(
            cast("Driver", self.driver),
            trace=self.trace.append if trace is None else trace,
            quarantine_bytes_max=quarantine_bytes_max,
            settled=self.left.append,
        )
        self.pool = HostPool(BlockLayout.raw(nbytes), blocks, name="pool")

    @property
    def device(self) -> HandDevice:
        """The first device."""
        return self.devices[0]

    @property
    def lane(self) -> Lane:
        """The first device's lane."""
        return self.lanes[0]

    def prepare(
        self,
        *,
        reads: Iterable[HandleLike] = (),
        writes: Iterable[HandleLike] = (),
        after: Sequence[Operation] = (),
        lane: int = 0,
        name: str = "",
        stream: HandStream | None = None,
    ) -> Operation:
        """Prepare a launch on some blocks."""
        work = Launch(nothing, reads=reads, writes=writes, stream=stream, nbytes=1)
        return self.ledger.prepare(work, self.lanes[lane], after, name=name)

    def submit(
        self,
        *,
        reads: Iterable[HandleLike] = (),
        writes: Iterable[HandleLike] = (),
        after: Sequence[Operation] = (),
        lane: int = 0,
        name: str = "",
        stream: HandStream | None = None,
    ) -> Operation:
        """Prepare a launch on some blocks, and start it."""
        op = self.prepare(
            reads=reads, writes=writes, after=after, lane=lane, name=name, stream=stream
        )
        self.ledger.start(op)
        return op

    def signal(
        self,
        op: Operation,
        error: BaseException | None = None,
        *,
        lost: bool = False,
        poisoned: bool = False,
    ) -> None:
        """Let the fence of a posted operation signal, and reap it."""
        assert op.fence is not None
        device = op.lane.device
        device.completions.post(op.fence, error, lost=lost, poisoned=poisoned)
        if not lost:
            cast("HandDevice", device).posted.pop(op.fence, None)
        self.reap()

    def reap(self) -> None:
        """Hand all completions to the ledger."""
        for device in self.devices:
            items: deque[Completion] = device.completions.items
            while items:
                self.ledger.complete(items[0])
                items.popleft()

    def events(self, op: Operation) -> list[str]:
        """Names of the events that `op` has seen."""
        return [step.event.name for step in self.trace if step.serial == op.serial]


def states(*ops: Operation) -> list[State]:
    """The states of some operations."""
    return [op.state for op in ops]


def outcome(op: Operation) -> TransferError | None:
    """What waiting for an operation raises."""
    try:
        op.raise_outcome()
    except TransferError as error:
        return error
    return None


def move(src: Handle, dst: Handle, names: tuple[str, ...] | None = None) -> None:
    """Copy blocks on the spot, by the runs and addresses that a device would use."""
    runs = src.pool.runs_to(dst.pool, names)
    for source, target in zip(src.ids, dst.ids, strict=True):
        for sp, so, dp, do, nbytes in runs.rows:
            ctypes.memmove(
                dst.pool.address(dp, int(target)) + do,
                src.pool.address(sp, int(source)) + so,
                nbytes,
            )
