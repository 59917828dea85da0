"""The sans-IO engine: who holds what, what may be posted, what an event means. No clock, no await.

Everything happens on one thread. An interrupt (Ctrl-C) may strike between any two lines: each step
first records what keeps a buffer owned, and steps are repeatable, so an interrupt can leave a
block owned for too long, and never gives one out early.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final
from weakref import WeakSet

from transfer._book import Hold
from transfer._boundary import Tracer, post
from transfer._errors import (
    CompletionLost,
    DevicePoisoned,
    HoldConflict,
    OperationFailed,
    TransferError,
)
from transfer._fence import Completion, Fence
from transfer._lane import Lane, Marker
from transfer._operation import UNLINKED, Driver, Operation, Transition
from transfer._order import (
    Lineage,
    bequeath,
    descendants,
    inherit,
    lineage,
    link,
    lost_reason,
    spread,
    unordered,
    written,
)
from transfer._state import SETTLED, Event, State
from transfer._storage import keep_for_ever, let_go
from transfer._work import Copy, Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transfer._handle import Handle
    from transfer._memory import Pool
    from transfer._work import Work


@final
class Ledger:
    """All operations of one engine.

    Args:
        driver: what the operations ask for waiting and cancelling.
        trace: called with every transition; its exceptions are counted and never matter.
        quarantine_bytes_max: past this many quarantined bytes a device accepts no new work.
        settled: called with the lane whenever an operation of it has left the live ones.

    Attributes:
        stray_completions: completions that matched no operation, or one that had ended.
        pools: every pool that was used.
        silent: the loop is gone, so nobody is woken any more.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        trace: Callable[[Transition], None] | None = None,
        quarantine_bytes_max: int | None = None,
        settled: Callable[[Lane], None] | None = None,
    ) -> None:
        self.tracer = None if trace is None else Tracer(trace)
        self.stray_completions = 0
        self.pools: WeakSet[Pool] = WeakSet()
        self.silent = False
        self._driver = driver
        self._quarantine_bytes_max = quarantine_bytes_max
        self._settled = settled
        self._serial = 0
        self._fences: dict[Fence, Operation] = {}
        self._ready: deque[Operation] = deque()

    # Beginning

    def prepare(
        self, work: Work, lane: Lane, after: Sequence[Operation] = (), *, name: str = ""
    ) -> Operation:
        """Take the holds of `work`, or nothing.

        Raises:
            StaleBlock: a block's lease ended.
            HoldConflict: another operation touches a block, one of the two writes, and the order
                between them is not recorded.
            WrongPool: a pool of another engine or thread.
        """
        preds, met = lineage(after) if after else Lineage({}, [])
        reads, writes = work.reads, work.writes
        for handle in reads:
            self._check(work, handle, preds, writing=False)
        for handle in writes:
            self._check(work, handle, preds, writing=True)
        self._serial += 1
        op = Operation(self._serial, name or type(work).__name__, work, lane, self._driver)
        holds = [Hold(handle, op, False) for handle in reads]  # noqa: FBT003 - hot
        holds += [Hold(handle, op, True) for handle in writes]  # noqa: FBT003 - hot
        op.holds = tuple(holds)
        if after:
            op.before = preds
            inherit(op, met)
        op.nbytes = nbytes = work.nbytes
        lane.live[op] = None
        lane.admitted += 1
        lane.nbytes += nbytes
        lane.submitted += 1
        for hold in holds:
            hold.handle.pool.book.take(hold)
        # The last step: from here on a predecessor's end may post it.
        for earlier in preds:
            link(earlier, op)
        return op

    def _check(
        self, work: Work, handle: Handle, preds: dict[Operation, None], *, writing: bool
    ) -> None:
        """Refuse what must not be held, before anything is taken."""
        if not self.contended(handle, writing=writing):
            return
        hold = unordered(handle, preds, writing=writing)
        if hold is not None:
            raise HoldConflict(
                f"{work!r} would {'write' if writing else 'read'} {handle!r}, which "
                f"{hold.owner!r} {'writes' if hold.writing else 'reads'}; expected after= to "
                f"name that operation"
            )

    def contended(self, handle: Handle, *, writing: bool) -> bool:
        """Whether somebody holds a block in a way that asks for order.

        Raises:
            StaleBlock: a block's lease ended.
            WrongPool: a pool of another engine or thread.
        """
        pool = handle.pool
        if pool.user is not self._driver:
            pool.adopt(self._driver)
            self.pools.add(pool)
        return pool.book.check(handle, writing=writing)

    def mark(self, lane: Lane, fence: Fence, covered: Iterable[Operation]) -> Operation:
        """A place in a stream, behind `covered`, as something to wait for."""
        self._serial += 1
        op = Operation(self._serial, "marker", Marker(), lane, self._driver)
        op.before = lineage(covered).waits
        inherit(op, op.before)
        op.apply(Event.SUBMIT, self.tracer)
        op.posted = True
        op.fence = fence
        self._fences[fence] = op
        lane.live[op] = None
        for earlier in op.before:
            link(earlier, op)
        return op

    def start(self, op: Operation) -> None:
        """Post a prepared operation now if its predecessors allow, else when they do.

        Raises:
            SubmitError: the device refused; nothing was posted and the holds have ended.
            DevicePoisoned: the device accepts no work; the same.
            BaseException: an interrupt struck while posting; the operation is quarantined.
        """
        struck = self._move(op)
        self.advance()
        if struck is not None:
            raise struck

    # Posting

    def _move(self, op: Operation) -> BaseException | None:
        """Post or settle if nothing stands in the way; what struck while posting, if anything."""
        if op.state is not State.PREPARED:
            if op.parked is not None and op.state not in SETTLED:
                self._arrive(op, op.parked)
            return None
        if op.spoiled is not None:
            self._settle(op, Event.FAIL, op.spoiled)
            return None
        device = op.lane.device
        for earlier in op.before:
            if earlier.fence is None or not device.can_wait(earlier.fence):
                return None
        if op.lane.poisoned is not None:
            poisoned = DevicePoisoned(str(op.lane.poisoned))
            self._settle(op, Event.FAIL, poisoned)
            return poisoned
        return self._post(op)

    def _post(self, op: Operation) -> BaseException | None:
        waits = [p.fence for p in op.before if p.fence is not None]
        # Before the call: an interrupt in the device can then never leave posted work looking
        # unposted.
        op.apply(Event.SUBMIT, self.tracer)
        op.posted = True
        work = op.work
        if op.nbytes == 0 and isinstance(work, Copy):
            self._arrive(op, Completion(Fence()))
            return None
        outcome = post(op, waits, self._fences)
        if outcome.refused is not None:
            op.posted = False
            self._settle(op, Event.FAIL, outcome.refused)
            return outcome.refused
        if outcome.lost is not None:
            self._lose(op, outcome.lost)
            return outcome.lost
        if isinstance(work, Launch) and work.stream is not None:
            key = op.lane.device.stream_key(work.stream)
            if key is not None:
                op.lane.cover(key, op)
        self._ready.extend(op.after)
        self._wake(op)
        return None

    def advance(self) -> None:
        """Post and settle everything whose predecessors now allow it.

        A queue, not a recursion: chains may be long. What is being moved stays at its head until
        that is done, so that an interrupt makes it be moved again.

        Raises:
            BaseException: an interrupt struck while posting; everything else goes on at the next
                call. A device's refusal is kept for whoever waits for the operation.
        """
        while self._ready:
            op = self._ready[0]
            struck = self._move(op)
            if self._ready and self._ready[0] is op:  # else a trace hook came in between
                self._ready.popleft()
            if struck is not None and not isinstance(struck, Exception):
                raise struck

    # Ending

    def complete(self, completion: Completion) -> None:
        """Take a completion from a device."""
        op = self._fences.get(completion.fence)
        if op is None:
            self.stray_completions += 1
        elif op.state in SETTLED:
            self._finish(op)  # an interrupt struck while it was settled
        elif op.parked is not None and op.parked is not completion:
            self.stray_completions += 1
        elif completion.lost:
            error = completion.error or CompletionLost("the device gave no reason")
            if completion.poisoned:
                self.poison(op.lane, error)
            else:
                self.lose(op, error)
        elif op.state is State.QUARANTINED:
            quiet = OperationFailed(f"{op.name}: its end was lost, and proven only later")
            quiet.__cause__ = None if op.error is None else op.error.__cause__
            self._settle(op, Event.QUIESCE, quiet)
        else:
            self._arrive(op, completion)
        self.advance()

    def _arrive(self, op: Operation, completion: Completion) -> None:
        """Its own work is quiet. It settles behind its predecessors, never before them."""
        op.parked = completion
        if op.before and any(p.state is not State.QUARANTINED for p in op.before):
            return
        error = completion.error
        if error is not None:
            failure = OperationFailed(f"{op.name}: {error}")
            failure.__cause__ = error
            self._settle(op, Event.FAIL, failure)
        elif op.spoiled is not None:
            self._settle(op, Event.FAIL, op.spoiled)
        else:
            self._settle(op, Event.COMPLETE, None)

    def cancel(self, op: Operation) -> None:
        """Say that the result is unwanted."""
        if op.state not in SETTLED:
            op.apply(Event.CANCEL, self.tracer)
            if op.state is State.CANCELLED:
                self._finish(op)
        elif op in op.lane.live:
            self._finish(op)  # an interrupt struck while it was settled
        self.advance()

    def lose(self, op: Operation, error: BaseException) -> None:
        """Give up on learning the end of a posted operation.

        One whose own work is known to be quiet waits for predecessors only, and fails with them.
        """
        if op.state in (State.IN_FLIGHT, State.ABANDONED) and op.parked is None:
            self._lose(op, error)
        elif op.state is State.QUARANTINED and op in op.lane.live:
            self._lost(op)  # an interrupt struck while it was lost
        self.advance()

    def poison(self, lane: Lane, error: BaseException) -> None:
        """A device lost its context: nothing in flight on it can be learnt of any more."""
        lane.poisoned = DevicePoisoned(f"{lane.device.name}: {error}")
        lane.poisoned.__cause__ = error
        for op in list(lane.live):
            if op.state is State.PREPARED:
                self._settle(op, Event.FAIL, DevicePoisoned(str(lane.poisoned)))
            else:
                self.lose(op, error)

    def _lose(self, op: Operation, error: BaseException) -> None:
        for hold in op.holds:
            hold.handle.pool.book.quarantine(hold)
        keep_for_ever(op.storages)  # also when engine and pool are forgotten
        lost = CompletionLost(f"{type(error).__name__}: {error}")
        lost.__cause__ = error
        op.error = lost
        op.doomed = True
        op.apply(Event.LOSE, self.tracer)
        self._lost(op)

    def _lost(self, op: Operation) -> None:
        """Everything that follows from being lost; may be repeated."""
        reason = lost_reason(op)
        behind = descendants(op)
        for later in behind:
            later.spoiled = later.spoiled or reason
        self._ready.extend(behind)
        # Doomed before or not: one that has signaled may have waited for this one only.
        self._ready.extend(op.after)
        # From the end: whatever is behind a doomed one is doomed, at any moment.
        for later in reversed(behind):
            later.doomed = True
        lane = op.lane
        if not isinstance(op.work, Marker):
            lane.lost[op] = sum(hold.handle.nbytes for hold in op.holds)
        bound = self._quarantine_bytes_max
        if bound is not None and lane.poisoned is None:
            nbytes = sum(lane.lost.values())
            if nbytes > bound:
                lane.poisoned = DevicePoisoned(
                    f"{lane.device.name}: {nbytes} bytes are quarantined, at most {bound} allowed"
                )
        self._wake(op)
        lane.leave(op)
        lane.losses += op in lane.lost
        self._left(lane)

    def _settle(self, op: Operation, event: Event, error: TransferError | None) -> None:
        op.error = error
        op.apply(event, self.tracer)
        self._finish(op)

    def _finish(self, op: Operation) -> None:
        """Everything that follows from being settled; may be repeated."""
        for hold in op.holds:
            hold.handle.pool.end(hold)
        if op.state is not State.COMPLETED:
            self._pass_on(op)
        if op.after:
            for later in op.after:
                if op.posted or later.state not in SETTLED:
                    later.before.pop(op, None)
                    self._ready.append(later)
            op.after = UNLINKED
        self._wake(op)
        lane = op.lane
        if lane.leave(op):
            lane.end(op)
            self._left(lane)
        elif lane.lost.pop(op, None) is not None:
            let_go(op.storages)
            lane.end(op)
        # The last step: until then a repeated completion finishes what an interrupt cut short.
        if op.fence is not None:
            self._fences.pop(op.fence, None)

    def _pass_on(self, op: Operation) -> None:
        """An operation that did not complete: its successors inherit what that means."""
        if not op.posted:
            bequeath(op)
        op.taint |= written(op.work)
        reason = OperationFailed(f"its predecessor {op!r} did not complete")
        reason.__cause__ = op.error
        for reader in spread(op):
            reader.spoiled = reader.spoiled or reason
            self._ready.append(reader)

    def _left(self, lane: Lane) -> None:
        if self._settled is not None:
            self._settled(lane)

    def _wake(self, op: Operation) -> None:
        if op.watchers and not self.silent:
            for callback in op.watchers:
                callback()
