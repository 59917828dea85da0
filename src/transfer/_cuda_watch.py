"""Events, fences and the threads that see them done.

Only what records an event makes a fence of it. An event goes back into use once its completion has
been reaped; one whose record failed is destroyed. A thread watches the heads of streams only, since
a stream is first in, first out.
"""

from __future__ import annotations

import math
import time
from collections import deque
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, final

from transfer._cuda_api import CudaError
from transfer._fence import Fence

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from transfer._cuda_api import Driver
    from transfer._fence import CompletionQueue

PAUSE: Final = 50e-6
PAUSE_MAX: Final = 500e-6
"""Seconds between looks at streams of others: the first pause, and the longest."""


@final
class CudaFence(Fence):
    """The end of posted work on one GPU.

    Attributes:
        event: recorded behind the work; None as long as it is not.
        done: the event was seen done, or can be seen no more.
    """

    __slots__ = ("done", "event")

    def __init__(self) -> None:
        self.event: Any = None
        self.done = False


@final
class Mark:
    """A recorded event and what follows once it is done."""

    __slots__ = ("event", "reached")

    def __init__(self, event: Any, reached: Callable[[], None]) -> None:
        self.event = event
        self.reached = reached


@final
class Signals:
    """Every unsignaled fence of one GPU, and its events.

    Args:
        driver: the GPU.
        completions: where ends are reported.
        spin: seconds that a thread looks before it lets the driver block; infinite to spin always.

    Attributes:
        poison: the error that took the context, if one did.
    """

    def __init__(self, driver: Driver, completions: CompletionQueue, *, spin: float) -> None:
        self.driver = driver
        self.completions = completions
        self.spin = spin
        self.poison: BaseException | None = None
        self._live: dict[Fence, None] = {}
        self._free: deque[Any] = deque()
        self._retired: deque[Any] = deque()
        self._buried: deque[Any] = deque()

    @property
    def quiet(self) -> bool:
        """Whether no fence is open."""
        return not self._live

    def open(self, fence: Fence) -> None:
        """Count a fence as one that will signal."""
        self._live[fence] = None

    def knows(self, fence: Fence) -> bool:
        """Whether a fence is open."""
        return fence in self._live

    def forget(self, fence: Fence) -> None:
        """Take a fence back that was handed to nobody."""
        self._live.pop(fence, None)

    def take_event(self) -> Any:
        """An event that no fence uses."""
        # In this order: what was retired before the look at an empty queue has been reaped.
        count = len(self._retired)
        if count and not self.completions.items:
            for _ in range(count):
                self._free.append(self._retired.popleft())
        if self._free:
            return self._free.pop()
        return self.driver.event(blocking=self.spin != math.inf)

    def give_event(self, event: Any) -> None:
        """Give an event back that nothing waits for."""
        self._retired.append(event)

    def record(self, stream: Any) -> Any:
        """Record an event on a stream; one whose record fails is never used again."""
        event = self.take_event()
        try:
            self.driver.record(event, stream)
        except CudaError:
            self.driver.drop_event(event)
            raise
        return event

    def signal(
        self, fence: Fence, error: BaseException | None = None, *, keep: bool = True
    ) -> None:
        """Report that the work of a fence is quiet. Does nothing the second time.

        Args:
            fence: which.
            error: what went wrong with it.
            keep: whether its event goes back into use.
        """
        if self._live.pop(fence, self._live) is self._live:
            return
        event = None
        if isinstance(fence, CudaFence):
            fence.done = True
            event = fence.event
        self.completions.post(fence, error, wake=False)
        if event is not None:
            (self._retired if keep else self._buried).append(event)
        self.completions.ring()

    def lose(self, fence: Fence, error: BaseException) -> None:
        """Report that the end of a fence cannot be learnt for now; `signal` may follow."""
        if fence in self._live:
            self.completions.post(fence, error, lost=True)

    def condemn(self, error: BaseException) -> None:
        """The context is gone: lose everything that is open, and let nothing new in."""
        if self.poison is None:
            self.poison = error
        while self._live:
            fence, _ = self._live.popitem()
            if isinstance(fence, CudaFence):
                fence.done = True
            self.completions.post(fence, error, lost=True, poisoned=True, wake=False)
        self.completions.ring()

    def adopt_thread(self) -> None:
        """Make the calling thread, one of ours, the GPU's; if that fails nothing can be learnt."""
        try:
            self.driver.adopt_thread()
        except CudaError as error:
            self.condemn(error)

    def failed(self, error: CudaError) -> bool:
        """Judge an error of a query or a wait; whether to ask again."""
        if error.capture:
            time.sleep(PAUSE)
            return True
        self.condemn(error)
        return False

    def await_event(self, event: Any) -> bool:
        """Wait for an event, spinning then blocking; whether it is done."""
        while self.poison is None:
            try:
                if 0 < self.spin < math.inf and self._poll(event):
                    return True
                self.driver.sync(event)
            except CudaError as error:
                if not self.failed(error):
                    return False
            else:
                return True
        return False

    def _poll(self, event: Any) -> bool:
        end = time.perf_counter() + self.spin
        while time.perf_counter() < end:
            if self.driver.done(event):
                return True
        return False

    def drop_events(self) -> None:
        """Destroy every event; only with no fence open."""
        for event in (*self._free, *self._retired, *self._buried):
            self.driver.drop_event(event)
        for events in (self._free, self._retired, self._buried):
            events.clear()


@final
class Watch:
    """A thread that waits for the marks of one queue, in their order.

    Args:
        signals: what it reports to.
        name: of the thread.
    """

    def __init__(self, signals: Signals, name: str) -> None:
        self._signals = signals
        self._marks: SimpleQueue[Mark | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, mark: Mark) -> None:
        """Watch one more mark."""
        self._marks.put(mark)

    def stop(self) -> None:
        """End the thread behind the last mark, those that marks lead to included; do not wait."""
        self._marks.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._signals.adopt_thread()
        stopping = False
        while True:
            try:
                mark = self._marks.get(block=not stopping)
            except Empty:
                return
            if mark is None:
                stopping = True
            elif self._signals.await_event(mark.event):
                mark.reached()


@final
class Visits:
    """A thread that looks at the heads of streams that others own.

    These may stand still for seconds, so none of them is waited for alone; the pause between two
    looks grows while nothing happens, and with nothing to watch the thread sleeps.

    Args:
        signals: what it reports to.
        name: of the thread.
    """

    def __init__(self, signals: Signals, name: str) -> None:
        self._signals = signals
        self._inbox: SimpleQueue[tuple[Hashable, Mark] | None] = SimpleQueue()
        self._heads: dict[Hashable, deque[Mark]] = {}
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, key: Hashable, mark: Mark) -> None:
        """Watch one more mark of the stream `key`."""
        self._inbox.put((key, mark))

    def stop(self) -> None:
        """End the thread once nothing is watched, without waiting for it."""
        self._inbox.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._signals.adopt_thread()
        stopping = False
        pause = PAUSE
        while not (stopping and not self._heads):
            try:
                item = self._inbox.get(timeout=pause if self._heads else None)
            except Empty:
                pause = min(pause * 2, PAUSE_MAX)
            else:
                stopping = stopping or item is None
                if item is not None:
                    self._heads.setdefault(item[0], deque()).append(item[1])
            if self._look():
                pause = PAUSE

    def _look(self) -> bool:
        """Take what is done off the heads; whether there was any."""
        found = False
        for key in list(self._heads):
            marks = self._heads[key]
            while marks and self._done(marks[0]):
                marks.popleft().reached()
                found = True
            if not marks:
                del self._heads[key]
        return found

    def _done(self, mark: Mark) -> bool:
        try:
            return self._signals.poison is not None or self._signals.driver.done(mark.event)
        except CudaError as error:
            return not self._signals.failed(error)
