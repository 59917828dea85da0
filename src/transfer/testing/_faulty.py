"""FaultyDevice: any device, with the faults of a plan.

It wraps the protocol and nothing else, so that it fits a device that does not exist yet. All its
decisions fall on the engine's thread: in `enqueue`, and where the loop opens the queue of
completions. The wrapped device reports to its own queue from any thread; what the plan says is
done to a completion when the loop comes to look.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import TYPE_CHECKING, final

from transfer._errors import CompletionLost, SubmitError, TransferError
from transfer._fence import Completion, CompletionQueue, Fence
from transfer._handle import Blocks
from transfer._work import Copy, External, FileRead, FileWrite, Launch
from transfer.testing._plan import Fault, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from transfer._device import Device
    from transfer._work import Work


class InjectedFault(TransferError):
    """What a fault of a plan reports as the device's error."""


class _Queue(CompletionQueue):
    """A queue that takes over what the wrapped device reported when the loop opens it."""

    __slots__ = ("_pull",)

    def __init__(self, pull: Callable[[], None]) -> None:
        super().__init__()
        self._pull = pull

    def open(self) -> None:
        super().open()
        self._pull()


@final
class FaultyDevice:
    """Wraps any device and makes its calls fail as a plan says.

    Args:
        inner: the device.
        plan: which call meets which fault.
        watch: called with each fault and the work that it strikes.

    Attributes:
        injected: how often each fault struck.
    """

    def __init__(
        self,
        inner: Device,
        plan: FaultPlan,
        *,
        watch: Callable[[Fault, Work], None] | None = None,
    ) -> None:
        self.inner = inner
        self.plan = plan
        self._watch = watch
        self.name = inner.name
        self.routes = inner.routes
        self.ordered = inner.ordered
        self.completions: CompletionQueue = _Queue(self._pull)
        self.injected: Counter[Fault] = Counter()
        self._numbers = itertools.count()
        self._verdicts: dict[Fence, Fault] = {}
        self._outer: dict[Fence, Fence] = {}
        self._delayed: deque[tuple[Fence, Work, Sequence[Fence]]] = deque()
        self._withheld: deque[Completion] = deque()
        inner.completions.wake = self.completions.ring

    def __repr__(self) -> str:
        return f"FaultyDevice({self.inner!r}, {self.plan!r})"

    # Releasing

    @property
    def pending(self) -> int:
        """How many delays and withheld signals wait for `release`."""
        return len(self._delayed) + len(self._withheld)

    def release(self, count: int | None = None) -> int:
        """Let delayed work begin and withheld signals go, oldest first; how many there were."""
        released = 0
        while self.pending and released != count:
            released += 1
            if self._delayed:
                self._begin(*self._delayed.popleft())
            else:
                self.completions.items.append(self._withheld.popleft())
                self.completions.ring()
        return released

    def _begin(self, outer: Fence, work: Work, waits: Sequence[Fence]) -> None:
        try:
            fence = self.inner.enqueue(work, waits)
        except SubmitError as error:
            self.completions.post(outer, error)
            return
        self._outer[fence] = outer

    # Completions

    def _pull(self) -> None:
        queue = self.inner.completions
        queue.open()
        while queue.items:
            done = queue.items.popleft()
            self._judge(done._replace(fence=self._outer.pop(done.fence, done.fence)))

    def _judge(self, done: Completion) -> None:
        fault = self._verdicts.pop(done.fence, None)
        if fault in (Fault.WITHHOLD, Fault.LOSE, Fault.POISON):
            self._withheld.append(done)
            return
        if fault in (Fault.ERROR, Fault.PARTIAL) and done.error is None:
            done = done._replace(error=InjectedFault(f"{self.name}: {fault.value}"))
        if fault is Fault.TWICE:
            self._withheld.append(done)
        # Without a wake-up: the loop is just about to look.
        self.completions.items.append(done)

    # The device protocol

    def start(self) -> None:
        """See the wrapped device."""
        self.inner.start()

    def close(self) -> None:
        """See the wrapped device."""
        self.inner.close()

    def check(self, work: Work) -> None:
        """See the wrapped device."""
        self.inner.check(work)

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Post `work` as the plan says.

        Raises:
            SubmitError: the plan or the device refused; nothing was posted.
            CompletionLost: posted, and the plan keeps the fence.
            KeyboardInterrupt: the plan interrupts.
        """
        number = next(self._numbers)
        fault = self._fitting(self.plan.draw(number), work)
        if fault is None:
            return self.inner.enqueue(work, waits)
        self.injected[fault] += 1
        if self._watch is not None:
            self._watch(fault, work)
        return self._enqueue(fault, work, waits, number)

    @staticmethod
    def _fitting(fault: Fault | None, work: Work) -> Fault | None:
        """The fault, unless the work has no such way to fail."""
        if isinstance(work, External) or (isinstance(work, Launch) and work.stream is not None):
            return fault if fault is Fault.REFUSE else None
        if fault is Fault.PARTIAL and first_part(work, 1) is None:
            return None
        return fault

    def _enqueue(self, fault: Fault, work: Work, waits: Sequence[Fence], number: int) -> Fence:
        if fault is Fault.REFUSE:
            raise SubmitError(f"{self.name}: the plan refuses call {number}")
        if fault is Fault.INTERRUPT_EARLY:
            raise KeyboardInterrupt
        if fault is Fault.DELAY:
            fence = Fence()
            self._delayed.append((fence, work, waits))
            return fence
        if fault is Fault.PARTIAL:
            return self._partly(work, waits, number)
        fence = self.inner.enqueue(work, waits)
        if fault is Fault.INTERRUPT:
            raise KeyboardInterrupt
        if fault in (Fault.UNFENCED, Fault.FENCED):
            kept = fence if fault is Fault.FENCED else None
            raise CompletionLost(f"{self.name}: {fault.value}", fence=kept)
        self._verdicts[fence] = fault
        if fault in (Fault.LOSE, Fault.LATE, Fault.POISON):
            error = InjectedFault(f"{self.name}: {fault.value}")
            self.completions.post(fence, error, lost=True, poisoned=fault is Fault.POISON)
        return fence

    def _partly(self, work: Work, waits: Sequence[Fence], number: int) -> Fence:
        """Post some of the blocks; their end is the end of the whole, with an error."""
        count = self.plan.random(number).randrange(1, width(work))
        part = first_part(work, count)
        assert part is not None
        fence = self.inner.enqueue(part, waits)
        self._verdicts[fence] = Fault.PARTIAL
        return fence

    def can_wait(self, fence: Fence) -> bool:
        """See the wrapped device; never for work that is delayed."""
        return self.inner.can_wait(fence)

    def owns_stream(self, stream: object) -> bool:
        """See the wrapped device."""
        return self.inner.owns_stream(stream)

    def stream_key(self, stream: object) -> Hashable | None:
        """See the wrapped device."""
        return self.inner.stream_key(stream)

    def record(self, stream: object) -> Fence:
        """See the wrapped device."""
        return self.inner.record(stream)

    def join(self, stream: object, fence: Fence) -> None:
        """See the wrapped device."""
        self.inner.join(stream, fence)

    def finish(self, fence: Fence, stream: object | None) -> None:
        """See the wrapped device."""
        self.inner.finish(fence, stream)


def width(work: Work) -> int:
    """Into how many pieces a piece of work can be cut: blocks of a batch, spans of a file."""
    if isinstance(work, Copy):
        return len(work.src)
    if isinstance(work, (FileRead, FileWrite)):
        return len(work.spans)
    return 1


def first_part(work: Work, count: int) -> Work | None:
    """The first `count` pieces of a piece of work, or None where it has no more than those.

    The first part of a file is left under its first name, as a write that failed never is: the
    plan is a device that breaks its promise.
    """
    if count >= width(work):
        return None
    if isinstance(work, Copy):
        assert isinstance(work.src, Blocks)
        assert isinstance(work.dst, Blocks)
        return Copy(work.src[:count], work.dst[:count], names=work.names)
    if isinstance(work, FileRead):
        return FileRead(work.path, work.spans[:count], offset=work.offset)
    assert isinstance(work, FileWrite)
    return FileWrite(work.path, work.spans[:count], offset=work.offset, sync=work.sync)
