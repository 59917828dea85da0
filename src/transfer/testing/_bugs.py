"""Seeded bugs: each takes one guarantee out of the real classes, for as long as a `with` lasts.

They test the tests: a campaign that does not notice one of them proves nothing. They are patches,
kept here and not in the code they patch, so that no production path can reach them.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from transfer import _drain, _ledger, _operation
from transfer._book import Book
from transfer._engine import Engine
from transfer._errors import CompletionLost, OperationFailed, StaleBlock, SubmitError
from transfer._ledger import Ledger
from transfer._memory import Pool
from transfer._order import Lineage
from transfer._routing import Routing
from transfer._state import TRANSITIONS, Event, State
from transfer.testing._faulty import FaultyDevice, first_part
from transfer.testing._sim import SimDevice
from transfer.testing._stream import Moves, Record, SimFence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from transfer._fence import Fence
    from transfer._handle import Handle
    from transfer._lane import Lane
    from transfer._operation import Operation
    from transfer._work import Work

_AGE = 5  # operations begun since: what a lease time is to an engine that goes by the clock


@contextmanager
def _patched(owner: object, **replacements: Any) -> Iterator[None]:
    originals = {name: getattr(owner, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def release_holds(op: Operation) -> None:
    """End the holds of an operation, whatever it still does."""
    for hold in op.holds:
        hold.handle.pool.end(hold)


def _release_on_cancel() -> AbstractContextManager[None]:
    original = Ledger.cancel

    def cancel(self: Ledger, op: Operation) -> None:
        original(self, op)
        release_holds(op)

    return _patched(Ledger, cancel=cancel)


def _release_on_lose() -> AbstractContextManager[None]:
    original = Ledger._lose

    def lose(self: Ledger, op: Operation, error: BaseException) -> None:
        original(self, op, error)
        release_holds(op)

    return _patched(Ledger, _lose=lose)


def _release_by_age() -> AbstractContextManager[None]:
    original = Ledger.prepare
    young: list[Operation] = []

    def prepare(self: Ledger, *args: Any, **kwargs: Any) -> Operation:
        op = original(self, *args, **kwargs)
        young.append(op)
        while len(young) > _AGE:
            release_holds(young.pop(0))
        return op

    return _patched(Ledger, prepare=prepare)


def _partial_refused() -> AbstractContextManager[None]:
    def partly(self: FaultyDevice, work: Work, waits: Sequence[Fence], number: int) -> Fence:
        part = first_part(work, 1)
        assert part is not None
        self.inner.enqueue(part, waits)
        raise SubmitError(f"{self.name}: call {number} was posted in part, and is called refused")

    return _patched(FaultyDevice, _partly=partly)


def _signal_with_first_part() -> AbstractContextManager[None]:
    original = Moves.advance

    def advance(self: Moves, device: SimDevice) -> bool:
        parts = len(self.parts)
        over = original(self, device)
        if over or len(self.parts) == parts:
            return over
        rest = Moves([])
        rest.parts = self.parts
        device.stream("rest", once=True).push(rest)
        return True

    return _patched(Moves, advance=advance)


def _fence_before_record() -> AbstractContextManager[None]:
    def post(self: SimDevice, stream: Any, before: Any, body: Any, fence: SimFence) -> None:
        del self
        stream.push(*before, Record(fence), body)

    return _patched(SimDevice, _post=post)


def _token_used_twice() -> AbstractContextManager[None]:
    used: dict[SimDevice, list[SimFence]] = {}
    original = SimDevice.signal

    def signal(self: SimDevice, fence: SimFence, *, report: bool) -> None:
        original(self, fence, report=report)
        if report:
            used.setdefault(self, []).append(fence)

    def fence(self: SimDevice) -> SimFence:
        if not used.get(self):
            return SimFence(self)
        again = used[self].pop(0)
        again.signaled = again.recorded = False
        again.error = None
        return again

    return _patched(SimDevice, signal=signal, _fence=fence)


def _waiter_before_hold_end() -> AbstractContextManager[None]:
    original = Ledger._finish

    def finish(self: Ledger, op: Operation) -> None:
        self._wake(op)
        asyncio.get_running_loop().call_soon(original, self, op)

    return _patched(Ledger, _finish=finish)


@contextmanager
def _drain_skips_abandoned() -> Iterator[None]:
    original = _drain.give_up

    def wanted(lanes: list[Lane]) -> list[Operation]:
        ops = [op for lane in lanes for op in lane.live]
        return [op for op in ops if op.state is not State.ABANDONED and not op.decided]

    def give_up(ledger: Ledger, lanes: list[Lane]) -> list[Operation]:
        return original(ledger, lanes) if wanted(lanes) else []

    with (
        _patched(Engine, _busy=lambda engine: bool(wanted(engine._lanes))),
        _patched(_drain, give_up=give_up),
    ):
        yield


def _close_unmaps() -> AbstractContextManager[None]:
    return _patched(Pool, close=lambda pool: pool.storage.close())


def _stale_accepted() -> AbstractContextManager[None]:
    original = Book.check

    def check(self: Book, handle: Handle, *, writing: bool = False) -> bool:
        try:
            return original(self, handle, writing=writing)
        except StaleBlock:
            return False

    return _patched(Book, check=check)


def _conflict_ignored() -> AbstractContextManager[None]:
    return _patched(_ledger, unordered=lambda _handle, _preds, *, writing: (None, writing)[0])


def _after_ignored() -> AbstractContextManager[None]:
    return _patched(Routing, predecessors=lambda *_: ())


def _successor_first() -> AbstractContextManager[None]:
    original = Ledger._move

    def move(self: Ledger, op: Operation) -> BaseException | None:
        before, op.before = op.before, {}
        try:
            return original(self, op)
        finally:
            op.before = before

    return _patched(Ledger, _move=move)


def _cancelled_drops_predecessors() -> AbstractContextManager[None]:
    def lineage(after: Sequence[Operation]) -> Lineage:
        return Lineage({op: None for op in after if not op.settled}, [*after])

    return _patched(_ledger, bequeath=lambda _op: None, lineage=lineage)


@contextmanager
def _quarantined_successor_completes() -> Iterator[None]:
    move, lost = Ledger._move, Ledger._lost

    def ignoring(self: Ledger, op: Operation) -> BaseException | None:
        before = op.before
        op.before = {p: None for p in before if p.state is not State.QUARANTINED}
        try:
            return move(self, op)
        finally:
            op.before = {} if op.settled and op.posted else before

    def tell(self: Ledger, op: Operation) -> None:
        lost(self, op)
        self._ready.extend(op.after)

    with (
        _patched(_ledger, descendants=lambda _op: []),
        _patched(Ledger, _move=ignoring, _lost=tell),
    ):
        yield


def _failed_predecessor_ignored() -> AbstractContextManager[None]:
    return _patched(_ledger, spread=lambda _op: [], inherit=lambda _op, _after: None)


def _quiesce_completes() -> AbstractContextManager[None]:
    table = dict(TRANSITIONS)
    table[State.QUARANTINED] = MappingProxyType(
        {**table[State.QUARANTINED], Event.QUIESCE: State.COMPLETED}
    )
    return _patched(_operation, TRANSITIONS=table)


def _error_counts_as_done() -> AbstractContextManager[None]:
    original = Ledger._settle

    def settle(self: Ledger, op: Operation, event: Event, error: Any) -> None:
        by_device = isinstance(error, OperationFailed) and not isinstance(error, CompletionLost)
        done = event is Event.FAIL and by_device and op.parked is not None
        original(self, op, Event.COMPLETE if done else event, None if done else error)

    return _patched(Ledger, _settle=settle)


SEEDED_BUGS: Final[Mapping[str, Callable[[], AbstractContextManager[None]]]] = MappingProxyType(
    {
        "release on cancel": _release_on_cancel,
        "release on LOSE": _release_on_lose,
        "release by age": _release_by_age,
        "release on a partial SubmitError": _partial_refused,
        "split copy signals with its first part": _signal_with_first_part,
        "fence before record": _fence_before_record,
        "token used twice": _token_used_twice,
        "waiter before hold end": _waiter_before_hold_end,
        "drain skips ABANDONED": _drain_skips_abandoned,
        "close unmaps": _close_unmaps,
        "stale generation accepted": _stale_accepted,
        "hold conflict ignored": _conflict_ignored,
        "after= ignored": _after_ignored,
        "successor posted before its predecessor": _successor_first,
        "cancelled PREPARED drops its predecessors": _cancelled_drops_predecessors,
        "quarantined predecessor's successor completes": _quarantined_successor_completes,
        "reader of a failed write completes": _failed_predecessor_ignored,
        "quiesce counts as complete": _quiesce_completes,
        "device error counts as done": _error_counts_as_done,
    }
)
"""Patches by what they break; each value makes a context manager."""
