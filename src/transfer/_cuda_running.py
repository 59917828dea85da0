"""What a CUDA device has while it is started: lanes, threads, helper streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from transfer._boundary import attempt
from transfer._cuda_lane import Lane
from transfer._cuda_watch import CudaFence, Mark, Signals, Visits
from transfer._storage import keep_for_ever

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transfer._cuda_api import CudaError, Driver
    from transfer._cuda_job import Job, Pace
    from transfer._cuda_kernels import Kernels
    from transfer._cuda_streams import Visitor
    from transfer._work import Launch

SCRATCH: Final = 256 << 10
SCRATCHES: Final = 24
"""Bytes and number of the buffers of each direction that carry page tables to the GPU."""
HELPERS: Final = 8
JOIN_SECONDS: Final = 1.0


@final
class Running:
    """Everything a started device has.

    Attributes:
        stopped: nothing new is accepted; what was posted still ends.
    """

    def __init__(
        self, name: str, signals: Signals, kernels: Kernels, staging: int, pace: Pace
    ) -> None:
        self._pace = pace
        self.driver: Driver = signals.driver
        self.signals = signals
        self.kernels = kernels
        self.mapped = bool(self.driver.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))
        self.out = self._lane(f"kvhold-{name}-out", staging, ends_with_moves=True)
        self.into = self._lane(f"kvhold-{name}-in", staging, ends_with_moves=False)
        self.inside = self._lane(f"kvhold-{name}-inside", 0, ends_with_moves=False)
        self.visits = Visits(signals, f"kvhold-{name}-streams")
        self._helpers: list[Any] = []
        self._turn = 0
        self.stopped = False

    def _lane(self, name: str, area: int, *, ends_with_moves: bool) -> Lane:
        return Lane(
            self.signals,
            name,
            area=area,
            areas=3,
            scratch=SCRATCH,
            scratches=SCRATCHES,
            ends_with_moves=ends_with_moves,
            pace=self._pace,
        )

    def lane(self, *, outward: bool) -> Lane:
        """The lane of a direction."""
        return self.out if outward else self.into

    def start(self) -> None:
        """Start the threads."""
        for watch in (self.out.watch, self.into.watch, self.inside.watch, self.visits):
            watch.start()

    def stop(self) -> bool:
        """Stop the threads; whether everything was quiet and has been given back."""
        watches = (self.out.watch, self.into.watch, self.inside.watch, self.visits)
        if not self.stopped:
            self.stopped = True
            for watch in watches:
                watch.stop()
        if self.signals.poison is not None or not self.signals.quiet:
            keep_for_ever(self)
            return False
        if not all(watch.join(JOIN_SECONDS) for watch in watches):
            keep_for_ever(self)
            return False
        with self.driver.scope():
            for lane in (self.out, self.into, self.inside):
                lane.close()
            for helper in self._helpers:
                self.driver.drop_stream(helper)
            self.signals.drop_events()
        self.driver.shut()
        return True

    def call(self, work: Launch, job: Job) -> Iterator[int]:
        """Run a callable in a stream of ours."""
        entered = self.inside.enter(job, self.inside.kernels)
        job.touched = True
        job.raised = attempt(work.fn, self.kernels.lend(self.inside.kernels))
        yield entered + 8

    def follow(self, event: int) -> Any:
        """A stream of ours behind someone's event, as of its last record."""
        if len(self._helpers) < HELPERS:
            self._helpers.append(self.driver.stream())
        self._turn = (self._turn + 1) % len(self._helpers)
        stream = self._helpers[self._turn]
        self.driver.wait(stream, self.driver.event_of(event))
        return stream

    def visit(
        self, found: Visitor, stream: Any, fence: CudaFence, error: BaseException | None
    ) -> None:
        """Record a fence on a stream and watch for it."""
        event = self.signals.record(stream)
        fence.event = event
        self.signals.open(fence)
        key = found.key if not found.is_event else ("helper", self._turn)
        self.visits.put(key, Mark(event, lambda: self.signals.signal(fence, error)))

    def judge(self, error: CudaError) -> None:
        """Poison the device if an error means that its context is gone."""
        if error.sticky:
            self.signals.condemn(error)
