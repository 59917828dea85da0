"""CudaDevice, DevicePool and PinnedPool: GPU pages and page-locked slots, at the speed of the link.

Importing this needs neither CUDA nor torch; making a device or a pool does.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, final

from transfer._boundary import attempt
from transfer._cuda_api import CudaError, CudaMissing, Driver
from transfer._cuda_choice import Choice
from transfer._cuda_driver import CudaDriver
from transfer._cuda_job import Job, Pace
from transfer._cuda_kernels import Kernels, TritonKernels
from transfer._cuda_memory import DevicePool
from transfer._cuda_pinned import PinnedPool, Placement
from transfer._cuda_plan import H200, CopyTable, Plan, Way
from transfer._cuda_running import SCRATCH, Running
from transfer._cuda_steps import (
    Tools,
    batches,
    direct,
    singles,
    staged_in,
    staged_out,
    whole,
)
from transfer._cuda_streams import Visitor, identify, visitor
from transfer._cuda_watch import CudaFence, Signals
from transfer._errors import BadWork, CompletionLost, LayoutMismatch, SubmitError, WrongDevice
from transfer._fence import CompletionQueue
from transfer._staging import CopyPipeline, Pipeline
from transfer._work import Copy, External, Launch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from transfer._cuda_lane import Lane
    from transfer._fence import Fence
    from transfer._work import Route, Work

__all__ = [
    "H200",
    "CopyTable",
    "CudaDevice",
    "CudaError",
    "CudaMissing",
    "DevicePool",
    "Pace",
    "PinnedPool",
    "Placement",
    "Plan",
    "Way",
]


@final
class CudaDevice:
    """One GPU: copies between its pages and page-locked slots, copies inside it, and launches.

    It has copy streams of its own for each direction. ``after=`` takes streams and events of torch
    and cuda.core. The caller's current device never changes. A call while the caller captures a
    CUDA graph is refused.

    Args:
        ordinal: which of the visible GPUs.
        spin: seconds for which the threads that watch for ends look, before they let the driver
            block: ``math.inf`` for the least delay, 0 for the least CPU time.
        multiprocessors: about how many of them the copy kernels may use.
        staging: bytes of a staging area; each direction has three.
        table: measured rates by which a way is chosen for each copy.
        ways: the ways that may be chosen.
        pace: how copies are posted.
        driver: for tests: what stands for the driver.
        kernels: for tests: what stands for the kernels.

    Attributes:
        taken: how many copies took each way.
    """

    ordered = True

    def __init__(
        self,
        ordinal: int = 0,
        *,
        spin: float = 200e-6,
        multiprocessors: int = 8,
        staging: int = 32 << 20,
        table: CopyTable = H200,
        ways: Sequence[Way] = tuple(Way),
        pace: Pace = Pace(),  # noqa: B008 - frozen
        driver: Driver | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        if spin < 0 or multiprocessors < 1 or staging < 1 << 16:
            raise ValueError(f"found {spin=}, {multiprocessors=}, {staging=}: too small")
        self.ordinal = ordinal
        self.name = self.kind = f"cuda:{ordinal}"
        self.routes: frozenset[Route] = frozenset(
            {
                (Copy, self.kind, "host"),
                (Copy, "host", self.kind),
                (Copy, self.kind, self.kind),
                (Launch, self.kind),
                (External, self.kind),
            }
        )
        self.completions = CompletionQueue()
        self._choice = Choice(table, tuple(ways))
        self.taken: Counter[Way] = Counter()
        self._spin = spin
        self._units = multiprocessors
        self._staging = staging
        self._pace = pace
        self._driver = driver
        self._kernels = kernels
        self._running: Running | None = None

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name}>"

    # Starting and stopping

    def start(self) -> None:
        """Take the GPU: streams, staging areas, kernels, threads.

        Raises:
            CudaMissing: no CUDA, no such GPU, no Triton.
            CudaError: the driver refused, e.g. for lack of memory.
        """
        driver = self._driver or CudaDriver(self.ordinal, bare=self._pace.bare)
        driver.open()
        with driver.scope():
            kernels = self._kernels or TritonKernels(driver)
            signals = Signals(driver, self.completions, spin=self._spin)
            self._running = Running(self.name, signals, kernels, self._staging, self._pace)
        self._running.start()

    def close(self) -> None:
        """Give the GPU back, unless something on it is not quiet: then all of it is kept."""
        running = self._running
        if running is not None and running.stop():
            self._running = None

    def _on(self) -> Running:
        if self._running is None or self._running.stopped:
            raise SubmitError(f"{self!r} is not started")
        return self._running

    # Judging work

    def check(self, work: Work) -> None:
        """See `Device.check`."""
        if work.route not in self.routes:
            raise WrongDevice(f"{self.name} does not run {work!r}")
        running = self._running
        if running is not None and self._captures(running):
            raise BadWork(
                f"{work!r} is submitted while the current stream is being captured into a CUDA "
                f"graph: a copy cannot become part of the graph; submit it outside the capture"
            )
        if isinstance(work, Copy):
            for handle in (work.src, work.dst):
                storage = handle.pool.storage
                if handle.pool.kind == "host" and not storage.pinned:
                    raise WrongDevice(
                        f"{handle.pool.name} is not page-locked: {self.name} cannot reach it; "
                        f"use a PinnedPool"
                    )
        elif isinstance(work, Launch):
            if work.stream is not None:
                visitor(work.stream, self.ordinal)
            if isinstance(work.fn, Pipeline) and running is not None:
                self._check_pipeline(work.fn, running)

    def _captures(self, running: Running) -> bool:
        """Whether the caller captures; a lost context cannot tell, and `enqueue` refuses then."""
        if running.signals.poison is not None:
            return False
        try:
            return running.driver.caller_captures()
        except CudaError as error:
            running.judge(error)
            return False

    def _check_pipeline(self, pipe: Pipeline, running: Running) -> None:
        if not self._choice.of_pipeline(pipe, running):
            raise LayoutMismatch(
                f"{pipe!r}: a block takes {pipe.step} bytes of staging and {pipe.fixed_words} words "
                f"of tables; {self.name} has {self._staging} bytes and {SCRATCH // 8} words"
            )

    def plan(self, work: Copy | Launch) -> Plan:
        """Which way a copy takes, what the table says it costs, and what the others would."""
        if isinstance(work, Copy):
            pipe, ways = self._choice.of_copy(work, self._on())
            return self._choice.plan(pipe, ways if self._choice.few(work) is None else (Way.DMA,))
        if not isinstance(work.fn, Pipeline):
            raise BadWork(f"{work!r} is no copy: there is no way to choose")
        return self._choice.plan(work.fn, self._choice.of_pipeline(work.fn, self._on()))

    # Posting

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """See `Device.enqueue`."""
        running = self._on()
        if running.signals.poison is not None:
            raise SubmitError(f"{self.name} has lost its context: {running.signals.poison}")
        fence = CudaFence()
        behind = [w for w in waits if isinstance(w, CudaFence)]
        if isinstance(work, Copy) and self._post_few(work, behind, fence, running):
            return fence
        with running.driver.scope():
            if isinstance(work, External):
                running.signals.open(fence)
            elif isinstance(work, Launch) and work.stream is not None:
                self._launch_there(work, behind, fence)
            else:
                job = Job(fence, behind)
                lane = self._steps(work, job)
                lane.submit(job)
        return fence

    def _post_few(
        self, work: Copy, waits: Sequence[CudaFence], fence: CudaFence, running: Running
    ) -> bool:
        """Post a copy of few runs with no plan; whether it was one, and could be."""
        few = self._choice.few(work)
        if few is None:
            return False
        with running.driver.context():
            posted = running.lane(outward=few.outward).post_few(fence, waits, few.pieces(work))
        if posted:
            self.taken[Way.DMA] += 1
        return posted

    def _steps(self, work: Work, job: Job) -> Lane:
        """Give a job its steps; the lane that it belongs on."""
        running = self._on()
        if isinstance(work, Launch) and not isinstance(work.fn, Pipeline):
            job.steps = whole(job, running.call(work, job))
            return running.inside
        if isinstance(work, Launch) and isinstance(work.fn, Pipeline):
            pipe: Pipeline = work.fn
            for program in pipe.programs():
                running.kernels.load(program)
            way = self._choice.plan(pipe, self._choice.of_pipeline(pipe, running)).way
        elif isinstance(work, Copy):
            pipe, ways = self._choice.of_copy(work, running)
            if self._choice.few(work) is not None:
                ways = (Way.DMA,)
            way = ways[0] if len(ways) == 1 else self._choice.plan(pipe, ways).way
        else:
            raise SubmitError(f"{self.name} does not know {work!r}")
        self.taken[way] += 1
        inside = isinstance(work, Copy) and work.src.pool.kind == work.dst.pool.kind
        lane = running.inside if inside else running.lane(outward=pipe.outward)
        job.steps = whole(job, self._way(way, lane, job, pipe))
        return lane

    def _way(self, way: Way, lane: Lane, job: Job, pipe: Pipeline) -> Iterator[int]:
        running = self._on()
        tools = Tools(running.kernels.launch, self._units, 4 * self._units, running.mapped)
        if isinstance(pipe, CopyPipeline) and way is Way.DMA:
            return singles(lane, job, pipe)
        if isinstance(pipe, CopyPipeline) and way is Way.BATCH:
            return batches(lane, job, pipe)
        if way is Way.STAGED:
            return (staged_out if pipe.outward else staged_in)(lane, job, pipe, tools)
        return direct(lane, job, pipe, tools)

    def _launch_there(self, work: Launch, waits: Sequence[CudaFence], fence: CudaFence) -> None:
        """Run a callable in the caller's own stream."""
        running = self._on()
        found = visitor(work.stream, self.ordinal)
        stream = running.driver.stream_of(found.handle)
        try:
            if running.driver.capturing(stream):
                raise SubmitError(f"{work.stream!r} is being captured: {work!r} cannot be followed")
            for wait in waits:
                if not wait.done:
                    running.driver.wait(stream, wait.event)
        except CudaError as error:
            running.judge(error)
            raise SubmitError(f"{work!r}: {error}") from error
        raised = attempt(work.fn, work.stream)
        try:
            running.visit(found, stream, fence, raised)
        except CudaError as error:
            running.judge(error)
            raise CompletionLost(f"{work!r}: no event behind it: {error}") from error

    def can_wait(self, fence: Fence) -> bool:
        """See `Device.can_wait`: fences of this GPU whose event is recorded."""
        running = self._running
        return (
            isinstance(fence, CudaFence)
            and running is not None
            and running.signals.poison is None
            and (fence.done or (fence.event is not None and running.signals.knows(fence)))
        )

    # Streams of others

    def owns_stream(self, stream: object) -> bool:
        """See `Device.owns_stream`."""
        found = identify(stream)
        return found is not None and found.ordinal in {self.ordinal, None}

    def stream_key(self, stream: object) -> Hashable | None:
        """See `Device.stream_key`."""
        return visitor(stream, self.ordinal).key

    def record(self, stream: object) -> Fence:
        """See `Device.record`.

        Raises:
            BadWork: the stream is being captured into a graph.
            NotPosted: an event that was never recorded.
            SubmitError: the driver refused.
        """
        running = self._on()
        found = visitor(stream, self.ordinal)
        fence = CudaFence()
        try:
            with running.driver.scope():
                if found.is_event:
                    source = running.follow(found.handle)
                else:
                    source = self._uncaptured(found, stream)
                running.visit(found, source, fence, None)
        except CudaError as error:
            running.judge(error)
            raise SubmitError(f"{stream!r}: {error}") from error
        return fence

    def join(self, stream: object, fence: Fence) -> None:
        """See `Device.join`."""
        running = self._on()
        found = visitor(stream, self.ordinal)
        if not isinstance(fence, CudaFence) or found.is_event:
            raise BadWork(f"{stream!r} cannot wait for {fence!r}: expected a stream and a fence")
        try:
            with running.driver.scope():
                if not fence.done:
                    running.driver.wait(self._uncaptured(found, stream), fence.event)
        except CudaError as error:
            running.judge(error)
            raise SubmitError(f"{stream!r}: {error}") from error

    def finish(self, fence: Fence, stream: object | None) -> None:
        """See `Device.finish`; behind a stream, a device that was closed cannot look any more."""
        running = self._running
        if running is None:
            raise SubmitError(f"{self!r} is not started")
        if running.stopped and stream is not None:
            running.signals.lose(fence, SubmitError(f"{self!r} was closed"))
            return
        if stream is None or not isinstance(fence, CudaFence):
            running.signals.signal(fence)
            return
        found = visitor(stream, self.ordinal)
        try:
            with running.driver.scope():
                if found.is_event:
                    source = running.follow(found.handle)
                else:
                    source = self._uncaptured(found, stream)
                running.visit(found, source, fence, None)
        except CudaError as error:
            running.judge(error)
            running.signals.lose(fence, error)

    def _uncaptured(self, found: Visitor, stream: object) -> Any:
        driver = self._on().driver
        raw = driver.stream_of(found.handle)
        if driver.capturing(raw):
            raise BadWork(
                f"{stream!r} is being captured into a CUDA graph: order the copy outside the "
                f"capture"
            )
        return raw
