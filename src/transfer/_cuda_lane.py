"""A lane: two streams of our own for one direction, and the work that is posted on them.

A `Job` posts itself step by step. The lane takes steps as long as few enough commands are queued,
since a full stream makes the driver block; the rest follows when marks are reached, from the thread
that watches them. A posting that fails part-way gets an event behind what it had posted, so its
fence signals, with the error, once that part is quiet; the streams that carried it are retired.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, final

from transfer._cuda_api import CudaError
from transfer._cuda_job import Job, Pace, Scratch, Slot
from transfer._cuda_watch import Mark, Watch
from transfer._errors import CompletionLost, SubmitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer._cuda_api import Driver
    from transfer._cuda_watch import CudaFence, Signals
    from transfer._staging import Pipeline

QUEUED: Final = 512
"""Commands queued on a lane, a good way below the 1000 or so at which the driver blocks."""
MARK_EVERY: Final = 128
"""Commands after which a long job gets a mark, so that the lane can be refilled."""
FEW: Final = 4
"""Up to this many pieces are copied one by one, more by one batched call."""


@final
class Lane:
    """Two streams and what is queued on them.

    Args:
        signals: where fences are signaled.
        name: for the thread.
        area: bytes of a staging area; 0 for a lane without.
        areas: how many.
        scratch: bytes of a scratch buffer.
        scratches: how many.
        ends_with_moves: on which of the two streams each job ends.
        pace: how copies are posted.

    Attributes:
        kernels: stream of kernels.
        moves: stream of DMA copies.
        other: a second one, if there is.
        pace: how copies are posted.
        area: bytes of a staging area.
        ends_with_moves: on which of the two each job ends.
        scratch_words: int64 words of a scratch buffer.
    """

    def __init__(
        self,
        signals: Signals,
        name: str,
        *,
        area: int,
        areas: int,
        scratch: int,
        scratches: int,
        ends_with_moves: bool,
        pace: Pace = Pace(),  # noqa: B008 - frozen
    ) -> None:
        self.pace = pace
        self.driver: Driver = signals.driver
        self.area = area
        self.ends_with_moves = ends_with_moves
        self._signals = signals
        self._lock = Lock()
        self._jobs: deque[Job] = deque()
        self._queued = 0
        self._unmarked = 0
        self._ahead = 0
        self._ahead_unmarked = 0
        self._forked = False
        self._borrowed: list[Scratch] = []
        self._movers = self.pace.movers if area else 1
        self._retired: list[Any] = []
        self._owed: list[CudaFence] = []
        self.kernels, self.moves, self.other = self._streams()
        self._memory = self.driver.allocate(max(area * areas, 16) + scratch * scratches)
        self._host = self.driver.allocate_host(scratch * scratches)
        make = partial(self.driver.event, blocking=False)
        self.slots = [
            Slot(self._memory + i * area, make(), make()) for i in range(areas if area else 0)
        ]
        base = self._memory + max(area * areas, 16)
        self.scratch_words = scratch // 8
        self._scratch = [
            Scratch.at(self._host + i * scratch, base + i * scratch, scratch // 8)
            for i in range(scratches)
        ]
        self._turn = 0
        self.watch = Watch(signals, name)

    def _streams(self) -> tuple[Any, Any, Any]:
        """Fresh ones: of kernels, of moves, and the other one of moves."""
        kernels = self.driver.stream(urgent=self.pace.urgent)
        moves = self.driver.stream()
        return kernels, moves, self.driver.stream() if self._movers == 2 else None

    # Posting

    def submit(self, job: Job) -> None:
        """Post a job, or as much of it as there is room for.

        Raises:
            SubmitError: nothing of it was posted.
            CompletionLost: a part was posted and no event could be recorded behind it.
        """
        with self._lock:
            self._signals.open(job.fence)
            self._jobs.append(job)
            try:
                self._pump()
            finally:
                job.inline = False
        if job.refused is not None:
            raise job.refused
        if job.lost is not None:
            raise job.lost

    def post_few(
        self, fence: CudaFence, waits: Sequence[CudaFence], pieces: Sequence[tuple[int, int, int]]
    ) -> bool:
        """Post a few driver copies at once; False, with nothing done, where other jobs stand first.

        Args:
            fence: signals when they are quiet.
            waits: fences they wait for on the GPU.
            pieces: destination, source and bytes of each.

        Raises:
            SubmitError, CompletionLost: as for `submit`.
        """
        with self._lock:
            if self._jobs or self._unmarked or self._owed or self._queued >= QUEUED:
                return False
            job = Job(fence, waits)
            self._signals.open(fence)
            try:
                commands = self.enter(job, self.moves) + len(pieces) + 1
                for piece in pieces:
                    self.driver.copy(*piece, self.moves)
                    job.touched = True
                event = self._signals.record(self.moves)
                self._queued += commands
                self.watch.put(Mark(event, partial(self._few_reached, fence, commands)))
                # Behind it: `_few_reached` wants the lock before it looks at the fence.
                fence.event = event
                job.whole = True
            except CudaError as error:
                job.whole = True
                self._fail(job, error)
            finally:
                job.inline = False
                if not job.whole:
                    # An interrupt: the next look at the queue finds the job and ends it.
                    job.touched = True
                    self._jobs.append(job)
        if job.refused is not None:
            raise job.refused
        if job.lost is not None:
            raise job.lost
        return True

    def _few_reached(self, fence: CudaFence, commands: int) -> None:
        with self._lock:
            self._queued -= commands
            more = bool(self._jobs)
        # The last thing where nothing waits: the loop's thread, woken here, needs the interpreter.
        self._signals.signal(fence)
        if more:
            with self._lock:
                self._pump()

    def _room(self) -> bool:
        if self._queued >= QUEUED or not self._scratch:
            return False
        return self.pace.ahead is None or self._ahead < self.pace.ahead

    def _pump(self) -> None:
        while self._jobs and self._signals.poison is None:
            if not self._room():
                self._refill()
                return
            job = self._jobs[0]
            try:
                commands = next(job.steps, None)
                if commands is None:
                    self._jobs.popleft()
                    self._finish(job)
                    continue
            except (CudaError, SubmitError) as error:
                if self._jobs and self._jobs[0] is job:
                    self._jobs.popleft()
                self._fail(job, error)
                continue
            self._queued += commands
            self._unmarked += commands
            if self._unmarked >= MARK_EVERY or (
                self.pace.ahead is not None and 2 * self._ahead_unmarked >= self.pace.ahead
            ):
                self._refill()

    def _refill(self) -> None:
        """Mark where a long job is, so that the rest of it follows once the GPU has got there."""
        if self._unmarked:
            try:
                self._mark(None)
            except CudaError as error:
                self._signals.condemn(error)

    def _finish(self, job: Job) -> None:
        """Record the event behind a job, and let its fence have it."""
        if not job.whole:
            raise CudaError(0, "posting", "interrupted")
        self._mark(job.fence, job.raised)

    def _mark(self, fence: CudaFence | None, error: Exception | None = None) -> Any:
        """An event behind everything that is queued, for the thread to wait for."""
        everything = error is not None or bool(self._owed)
        if self._forked and (everything or self.ends_with_moves):
            self._join(self.moves, self.other)
            self._forked = False
        last = self.moves if self.ends_with_moves else self.kernels
        if everything:
            self._join(last, self.kernels if self.ends_with_moves else self.moves)
        event = self._signals.record(last)
        if fence is not None:
            fence.event = event
        commands, self._unmarked = self._unmarked + 1, 0
        nbytes, self._ahead_unmarked = self._ahead_unmarked, 0
        borrowed, self._borrowed = self._borrowed, []
        owed, self._owed = self._owed, []
        read = [(slot, slot.turns) for slot in self.slots if slot.used]
        self._queued += 1

        def reached() -> None:
            with self._lock:
                self._queued -= commands
                self._ahead -= nbytes
                self._scratch.extend(borrowed)
                for slot, turns in read:
                    # Its reader was before the mark, and nobody has had it since.
                    slot.used = slot.used and slot.turns != turns
                more = bool(self._jobs)
            if fence is None:
                self._signals.give_event(event)
            else:
                self._signals.signal(fence, error, keep=error is None)
            for late in owed:
                self._signals.signal(late)
            if more:
                with self._lock:
                    self._pump()

        self.watch.put(Mark(event, reached))
        return event

    def _fail(self, job: Job, error: CudaError | SubmitError) -> None:
        """Posting ended early; find out what that means for the blocks."""
        if isinstance(error, CudaError) and error.sticky:
            self._signals.condemn(error)
        elif job.touched and isinstance(error, CudaError):
            self._settle(job, error)
            return
        if job.touched:
            self._lose(job, f"posted in part: {error}")
            return
        job.refused = error if isinstance(error, SubmitError) else SubmitError(str(error))
        if job.refused is not error:
            job.refused.__cause__ = error
        if job.inline:
            self._signals.forget(job.fence)
        else:
            self._signals.signal(job.fence, job.refused)

    def _lose(self, job: Job, reason: str) -> None:
        """Say that the end of a job cannot be learnt for now."""
        job.lost = CompletionLost(reason, fence=job.fence)
        if not job.inline:
            self._signals.lose(job.fence, job.lost)

    def _settle(self, job: Job, error: CudaError) -> None:
        """Let the fence signal, with the error, once the posted part is quiet."""
        try:
            quiet = self._mark(job.fence, error)
        except CudaError as second:
            if second.sticky:
                self._signals.condemn(second)
            self._owed.append(job.fence)
            self._lose(job, f"posted in part: {error}; then {second}")
            return
        try:
            self._renew(quiet)
        except CudaError as third:
            self._signals.condemn(third)

    def _renew(self, quiet: Any) -> None:
        """Go on with fresh streams, behind the part that was posted on the old ones."""
        fresh = self._streams()
        for stream in fresh[: 1 + self._movers]:
            self.driver.wait(stream, quiet)
        self._retired += [self.kernels, self.moves, self.other][: 1 + self._movers]
        self.kernels, self.moves, self.other = fresh

    # What steps are made of

    def enter(self, job: Job, stream: Any) -> int:
        """Make a stream wait for what a job waits for; how many commands that took."""
        waited = 0
        for fence in job.waits:
            if not fence.done:
                self.driver.wait(stream, fence.event)
                waited += 1
        return waited

    def borrow(self, pipe: Pipeline, first: int, count: int, *, staged: bool) -> int:
        """Copy tables to a scratch buffer that is the job's until its mark; the device address."""
        scratch = self._scratch.pop()
        self._borrowed.append(scratch)
        nbytes = scratch.fill(pipe, first, count, staged=staged)
        self.driver.copy(scratch.device, scratch.host, nbytes, self.kernels)
        return scratch.device

    def show(self, pipe: Pipeline, first: int, count: int) -> int:
        """Put tables where kernels read them in host memory until the job's mark; the address."""
        scratch = self._scratch.pop()
        self._borrowed.append(scratch)
        scratch.fill(pipe, first, count, staged=False)
        return scratch.host

    def mover(self, number: int) -> Any:
        """The stream of moves for the chunk of that number; jobs end behind all of them."""
        if self.other is None or number % 2 == 0:
            return self.moves
        # Said before anything is queued there.
        self._forked = True
        return self.other

    def count(self, nbytes: int) -> None:
        """Say that so many bytes were queued."""
        self._ahead += nbytes
        self._ahead_unmarked += nbytes

    def next_slot(self, writer: Any) -> Slot:
        """The next staging area, for a stream that will write to it."""
        slot = self.slots[self._turn]
        self._turn = (self._turn + 1) % len(self.slots)
        if slot.used:
            self.driver.wait(writer, slot.free)
        slot.turns += 1
        return slot

    def release(self, slot: Slot, reader: Any) -> None:
        """Let the next writer of a staging area wait for what its reader has queued."""
        self.driver.record(slot.free, reader)
        slot.used = True

    def join_moves(self) -> int:
        """Put the stream of kernels behind the moves; how many commands that took."""
        return self._join(self.kernels, self.moves)

    def join_kernels(self) -> int:
        """Put the stream of moves behind the kernels; how many commands that took."""
        return self._join(self.moves, self.kernels)

    def _join(self, later: Any, earlier: Any) -> int:
        event = self._signals.record(earlier)
        self.driver.wait(later, event)
        # A wait is for the record that it saw, so the event may be recorded again at once.
        self._signals.give_event(event)
        return 2

    # Ending

    @property
    def resting(self) -> bool:
        """Whether nothing is queued yet, of the job at hand either."""
        return self._queued == 0

    def close(self) -> None:
        """Give everything back; only with nothing queued and the thread ended."""
        for slot in self.slots:
            self.driver.drop_event(slot.filled)
            self.driver.drop_event(slot.free)
        for stream in (self.kernels, self.moves, self.other, *self._retired):
            if stream is not None:
                self.driver.drop_stream(stream)
        self.driver.free(self._memory)
        self.driver.free_host(self._host)
