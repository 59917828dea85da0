"""Named, bounded, daemon worker threads, and devices whose work runs on them.

The host program's own thread pools are never used. Worker threads are daemons: a program that ends
without closing its engine still ends. An idle worker blocks without a timeout and never wakes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, final

from transfer._device import PlainDevice
from transfer._errors import ForkDetected, SubmitError, TransferError, WrongDevice
from transfer._fence import CompletionQueue, Fence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transfer._work import Route, Work

    Part = Callable[[], object]

HOLD_NS: Final = 1_000_000
"""Nanoseconds for which a worker may keep a posted completion without waking the loop."""


def outcome(part: Part) -> BaseException | None:
    """Run a part of an operation and give back what it raised.

    Whatever a part raises, `SystemExit` included, says that its thread has returned from it: that
    is a fact about the operation, and a worker that died of it would take others' work along.
    """
    try:
        part()
    except BaseException as error:  # noqa: BLE001 - the device boundary
        return error
    return None


@final
class Job:
    """The parts of one posted operation; it ends once, when the last part that began returned.

    Several workers may take part at once, each taking the next part until none is left. One that
    comes when the job has ended finds nothing to do, so a job never waits for a worker.

    Attributes:
        fence: what signals.
        work: the descriptor, and with it pools and storages; a worker forgets the job once its
            completion is posted.
        brief: whether a worker is expected to be done with it within a millisecond.
        error: the first error of a part; no further part begins after one.
    """

    __slots__ = ("_active", "_ended", "_lock", "_parts", "brief", "error", "fence", "work")

    def __init__(
        self, fence: Fence, work: Work, parts: Iterable[Part], *, brief: bool = False
    ) -> None:
        self.fence = fence
        self.work = work
        self.brief = brief
        self.error: BaseException | None = None
        self._parts = deque(parts)
        self._active = 0
        self._ended = False
        self._lock = threading.Lock()

    def run(self) -> bool:
        """Do parts until none is left; True for the one call that ends the job."""
        with self._lock:
            if self._ended:
                return False
            self._active += 1
        while self._run_next():
            pass
        with self._lock:
            self._active -= 1
            self._ended = self._active == 0
            return self._ended

    def _run_next(self) -> bool:
        try:
            part = self._parts.popleft()  # atomic: no two workers get the same part
        except IndexError:
            return False
        error = outcome(part)
        if error is not None:
            with self._lock:
                if self.error is None:
                    self.error = error
            self._parts.clear()
        return True


@final
class _Worker(threading.Thread):
    """One thread; takes jobs from the common queue until it finds None there.

    Attributes:
        returned: how many jobs it has come back from; written by this thread only.
    """

    def __init__(
        self, name: str, jobs: SimpleQueue[Job | None], completions: CompletionQueue
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.returned = 0
        self._jobs = jobs
        self._completions = completions
        self._unrung: int | None = None

    def run(self) -> None:
        """Serve until told to stop."""
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Take and do one job. On return no reference to it is left in this thread."""
        job = self._next()
        if job is None:
            return False
        last = job.run()
        self.returned += 1
        if last:
            self._completions.post(job.fence, job.error, wake=False)
            if self._unrung is None:
                self._unrung = time.monotonic_ns()
        return True

    def _next(self) -> Job | None:
        """Wait for a job. Rings first for whatever was posted, unless the next end is near."""
        try:
            job = self._jobs.get_nowait()
        except Empty:
            job = None
        else:
            if self._unrung is not None and (
                job is None or not job.brief or time.monotonic_ns() - self._unrung >= HOLD_NS
            ):
                self._ring()
            return job
        self._ring()
        return self._jobs.get()

    def _ring(self) -> None:
        if self._unrung is not None:
            self._unrung = None
            self._completions.ring()


@final
class Workers:
    """A bounded set of worker threads with one queue.

    Args:
        device: the device's name; threads are called ``kvhold-<device>-<n>``.
        threads: how many, at least 1.
        completions: where ends are posted.

    Raises:
        TransferError: a thread could not be started; none is left behind.
    """

    def __init__(self, device: str, threads: int, completions: CompletionQueue) -> None:
        self.pid = os.getpid()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._put = 0
        self._threads: list[_Worker] = []
        for number in range(threads):
            worker = _Worker(f"kvhold-{device}-{number}", self._jobs, completions)
            try:
                worker.start()
            except RuntimeError as error:
                self.close()
                raise TransferError(
                    f"{device}: thread {number + 1} of {threads} did not start: {error}"
                ) from error
            self._threads.append(worker)

    @property
    def busy(self) -> int:
        """Jobs put and not returned from, counted once for each worker that was asked."""
        return self._put - sum(worker.returned for worker in self._threads)

    @property
    def idle(self) -> int:
        """Workers that nothing is queued for and that do nothing; never too many."""
        return max(len(self._threads) - self.busy, 0)

    def put(self, job: Job, *, hands: int = 1) -> None:
        """Queue a job for `hands` workers; called on the engine's thread only."""
        self._put += hands
        for _ in range(hands):
            self._jobs.put(job)

    def close(self) -> None:
        """Let every thread end once it is idle; waits for them only if all are idle now."""
        for _ in self._threads:
            self._jobs.put(None)
        if not self.busy:
            for worker in self._threads:
                worker.join()


class WorkerDevice(PlainDevice):
    """A device whose work runs on worker threads of its own.

    Attributes:
        name: for messages, statistics and thread names.
        completions: where the ends of its work appear.
        threads: how many worker threads it has while started.
        routes: set by the class.
    """

    routes: frozenset[Route]

    def __init__(self, name: str, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{name}: {threads} threads, expected at least 1")
        self.name = name
        self.threads = threads
        self.completions = CompletionQueue()
        self._workers: Workers | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.threads} threads>"

    def start(self) -> None:
        """Start the worker threads; legal again after `close`.

        Raises:
            TransferError: a thread could not be started; none is left behind.
            RuntimeError: it is started already.
        """
        if self._workers is not None:
            raise RuntimeError(f"{self!r} is started already")
        self._workers = Workers(self.name, self.threads, self.completions)

    def close(self) -> None:
        """Let idle threads end; never waits for a busy one, which ends after what is queued."""
        workers, self._workers = self._workers, None
        if workers is not None and workers.pid == os.getpid():
            workers.close()

    def check_route(self, work: Work) -> None:
        """Refuse work that is another device's.

        Raises:
            WrongDevice: says what was found and what is served.
        """
        route = work.route
        if route not in self.routes:
            served = sorted(map(_route_name, self.routes))
            raise WrongDevice(f"{self.name} serves {', '.join(served)}; found {_route_name(route)}")

    def finish(self, fence: Fence, stream: object | None) -> None:
        """There is no work of the host program on this device."""
        raise TypeError(f"{self!r} takes no External work: {fence!r}, {stream!r}")

    def ready(self) -> Workers:
        """The started workers of this process.

        Raises:
            ForkDetected: they were started before a fork and do not exist in this process.
            SubmitError: the device is not started, or closed.
        """
        workers = self._workers
        if workers is None:
            raise SubmitError(f"{self!r} is not started")
        if workers.pid != os.getpid():
            raise ForkDetected(
                f"{self!r} was started in process {workers.pid} and its threads are not in this "
                f"one, {os.getpid()}: spawn the process instead of forking it, or start there"
            )
        return workers


def _route_name(route: Route) -> str:
    return "(" + ", ".join(r.__name__ if isinstance(r, type) else str(r) for r in route) + ")"
