"""What a device is: something that takes work and, later, says that it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from transfer._fence import CompletionQueue, Fence
    from transfer._work import Route, Work


class Device(Protocol):
    """Takes work on the engine's thread, does it elsewhere, reports through `completions`.

    Attributes:
        name: for messages and statistics.
        routes: which descriptors and kinds of memory it serves; no two devices of an engine share
            one.
        ordered: whether ``after=`` must be given, since other queues may touch its memory.
        completions: where the ends of its work appear, from any thread.
    """

    name: str
    routes: frozenset[Route]
    ordered: bool
    completions: CompletionQueue

    def start(self) -> None:
        """Start threads; called once, on the engine's thread."""
        ...

    def close(self) -> None:
        """Stop threads that are idle; never waits for one that is not. May be repeated."""
        ...

    def check(self, work: Work) -> None:
        """Refuse work that can be seen to be wrong, before anything is taken.

        Raises:
            BadWork: says what was found and what is expected.
        """
        ...

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Post `work` behind `waits`; never blocks.

        Returns:
            The fence of what was posted. Every fence returned signals exactly once, after the last
            part of the work is quiet, whatever the first part raised.

        Raises:
            SubmitError, EngineClosed, DevicePoisoned: *nothing* was posted.
            CompletionLost: something was posted, and no fence could be made for it.
        """
        ...

    def can_wait(self, fence: Fence) -> bool:
        """Whether `enqueue` can put work behind this unsignaled fence by itself."""
        ...

    def owns_stream(self, stream: object) -> bool:
        """Whether `stream` is a stream or event of this device."""
        ...

    def stream_key(self, stream: object) -> Hashable | None:
        """What identifies a stream; None for a bare event, which covers no operations."""
        ...

    def record(self, stream: object) -> Fence:
        """A fence that signals when `stream` has done all that is queued on it now."""
        ...

    def join(self, stream: object, fence: Fence) -> None:
        """Make later work of `stream` wait for `fence`."""
        ...

    def finish(self, fence: Fence, stream: object | None) -> None:
        """Let the fence of an `External` signal once `stream` has done what is queued now."""
        ...


@runtime_checkable
class InstantDevice(Protocol):
    """A device that can do small work inside a call, so that there is no end to wait for."""

    def instant(self, work: Work) -> bool:
        """Do `work` now, on the calling thread, and return True; or touch nothing, and False."""
        ...


class PlainDevice:
    """What devices without streams answer; a base for host devices.

    Attributes:
        ordered: False: nothing else touches host memory behind the engine's back.
    """

    ordered = False

    def can_wait(self, fence: Fence) -> bool:
        """Worker threads never wait for predecessors."""
        del fence
        return False

    def owns_stream(self, stream: object) -> bool:
        """There are none."""
        del stream
        return False

    def stream_key(self, stream: object) -> Hashable | None:
        """There are none."""
        raise TypeError(f"{self!r} has no streams, got {stream!r}")

    def record(self, stream: object) -> Fence:
        """There are none."""
        raise TypeError(f"{self!r} has no streams, got {stream!r}")

    def join(self, stream: object, fence: Fence) -> None:
        """There are none."""
        raise TypeError(f"{self!r} has no streams to put behind {fence!r}, got {stream!r}")
