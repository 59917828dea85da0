"""Streams, events and fences of a pretend device: queues whose heads move a few bytes at a time.

A stream is first in, first out. What lies in it is a wait for a fence, bytes to move, a callable,
or a record that signals a fence. As on CUDA, a wait for an event that was never recorded waits for
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, final

from transfer._errors import BadWork
from transfer._fence import Fence
from transfer._workers import outcome
from transfer.testing._memory import memory_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from transfer._handle import Block
    from transfer._storage import Storage
    from transfer.testing._sim import SimDevice


@final
class SimFence(Fence):
    """A fence of a `SimDevice`.

    Attributes:
        device: whose it is.
        recorded: whether something in a stream will signal it.
        signaled: whether it has.
        error: what the work in front of it raised.
    """

    __slots__ = ("device", "error", "recorded", "signaled")

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.recorded = False
        self.signaled = False
        self.error: BaseException | None = None


class Item(Protocol):
    """Something at the head of a stream."""

    def ready(self) -> bool:
        """Whether a step would do something."""
        ...

    def advance(self, device: SimDevice) -> bool:
        """Do one step; whether it was the last."""
        ...


@final
class Wait:
    """Hold the stream until a fence has signaled; one that was never recorded holds nothing."""

    __slots__ = ("fence",)

    def __init__(self, fence: SimFence) -> None:
        self.fence = fence if fence.recorded else None

    def ready(self) -> bool:
        """Whether the fence has signaled."""
        return self.fence is None or self.fence.signaled

    def advance(self, device: SimDevice) -> bool:
        """Pass."""
        del device
        return True


@final
class Run:
    """Bytes on their way from one place to another; the source is read as they move.

    Args:
        dst: where they go: storage and absolute address.
        src: where they come from, or the bytes themselves.
        nbytes: how many.
    """

    __slots__ = ("at", "dst", "nbytes", "src", "storages")

    def __init__(
        self, dst: tuple[Storage, int], src: tuple[Storage, int] | bytes, nbytes: int
    ) -> None:
        self.dst = memory_at(*dst, nbytes)
        self.storages = [dst[0]]
        if isinstance(src, bytes):
            self.src = memoryview(src)
        else:
            self.src = memory_at(*src, nbytes)
            self.storages.append(src[0])
        self.at = 0
        self.nbytes = nbytes

    def move(self, nbytes: int) -> None:
        """Move the next bytes."""
        end = min(self.at + nbytes, self.nbytes)
        self.dst[self.at : end] = self.src[self.at : end]
        self.at = end


@final
class Moves:
    """Runs of bytes in several parts that advance in any order; over with the last of them."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[list[Run]]) -> None:
        self.parts = [deque(part) for part in parts if part]

    def ready(self) -> bool:
        """Always."""
        return True

    def advance(self, device: SimDevice) -> bool:
        """Move a few bytes of any part."""
        if self.parts:
            part = device.random.choice(self.parts)
            run = part[0]
            device.touch(run.storages)
            run.move(device.draw_chunk())
            if run.at == run.nbytes:
                part.popleft()
            if not part:
                self.parts.remove(part)
        return self.over()

    def over(self) -> bool:
        """Whether every part has ended."""
        return not self.parts


@final
class Call:
    """A callable; when it returns an iterator, each of its steps is a step of the stream."""

    __slots__ = ("args", "fence", "fn", "steps")

    def __init__(
        self, fn: Callable[..., object], args: tuple[object, ...], fence: SimFence
    ) -> None:
        self.fn = fn
        self.args = args
        self.fence = fence
        self.steps: Iterator[object] | None = None

    def ready(self) -> bool:
        """Always."""
        return True

    def advance(self, device: SimDevice) -> bool:
        """Begin, or go on; what it raises is the error of its fence."""
        del device
        last: list[bool] = []
        error = outcome(lambda: last.append(self._next()))
        self.fence.error = error
        return error is not None or last[0]

    def _next(self) -> bool:
        if self.steps is None:
            result = self.fn(*self.args)
            if not isinstance(result, Iterator):
                return True
            self.steps = result
            return False
        return next(self.steps, self) is self


@final
class Record:
    """Signal a fence, and report it unless it belongs to the host program."""

    __slots__ = ("fence", "report")

    def __init__(self, fence: SimFence, *, report: bool = True) -> None:
        fence.recorded = True
        self.fence = fence
        self.report = report

    def ready(self) -> bool:
        """Always."""
        return True

    def advance(self, device: SimDevice) -> bool:
        """Signal."""
        device.signal(self.fence, report=self.report)
        return True


@final
class SimStream:
    """A queue of a pretend device, the engine's own or the host program's."""

    __slots__ = ("device", "items", "name", "once")

    def __init__(self, device: SimDevice, name: str, *, once: bool = False) -> None:
        self.device = device
        self.name = name
        self.once = once
        self.items: deque[Item] = deque()

    def __repr__(self) -> str:
        return f"<{self.name} of {self.device.name}, {len(self.items)} items>"

    def push(self, *items: Item) -> None:
        """Queue something."""
        self.items.extend(items)
        self.device.kick()

    # The host program's own work

    def fill(self, block: Block, data: bytes, *, plane: int = 0) -> None:
        """Let a kernel of the host program write `data` into a block, a few bytes at a time."""
        pool = block.pool
        where = (pool.storage, pool.address(plane, block.id))
        self.push(Moves([[Run(where, data, len(data))]] if data else []))

    def call(self, fn: Callable[[], object]) -> None:
        """Let a callable of the host program run in the stream."""
        self.push(Call(fn, (), SimFence(self.device)))

    def event(self) -> SimEvent:
        """Record an event behind what is queued now."""
        event = SimEvent(self.device)
        event.record(self)
        return event

    def wait(self, event: SimEvent) -> None:
        """Make later work wait for an event; for nothing if it was never recorded."""
        self.push(Wait(event.fence))


@final
class SimEvent:
    """A bare event: it can be waited for, and covers no operation.

    Attributes:
        fence: the place where it was recorded last.
    """

    __slots__ = ("device", "fence")

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.fence = SimFence(device)

    def record(self, stream: SimStream) -> None:
        """Signal when `stream` has done all that is queued on it now."""
        self.fence = SimFence(self.device)
        stream.push(Record(self.fence, report=False))

    def check_recorded(self) -> None:
        """Refuse an event that would wait for nothing.

        Raises:
            BadWork: it was never recorded.
        """
        if not self.fence.recorded:
            raise BadWork(f"{self!r} was never recorded: waiting for it waits for nothing")


def scatter(runs: list[Run], parts: int, random: Random) -> list[list[Run]]:
    """Deal runs out to at most `parts` parts."""
    dealt: list[list[Run]] = [[] for _ in range(parts)]
    for run in runs:
        random.choice(dealt).append(run)
    return dealt
