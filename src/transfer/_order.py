"""What order between operations means. Pure functions over the recorded edges.

``op.before`` never holds a settled operation: whoever settles takes itself out, and one that never
ran leaves its own predecessors in its place. Edges point to smaller serials only.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple, cast

from transfer._errors import OperationFailed
from transfer._handle import Block
from transfer._operation import NOTHING, UNLINKED
from transfer._state import SETTLED
from transfer._work import FileRead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transfer._book import Hold
    from transfer._handle import Handle
    from transfer._operation import Operation, Taint
    from transfer._work import Work


class Lineage(NamedTuple):
    """What ``after=`` comes down to.

    Attributes:
        waits: the unsettled operations that have to settle first.
        met: all that were named or stood for, ended ones included.
    """

    waits: dict[Operation, None]
    met: list[Operation]


def lineage(after: Iterable[Operation]) -> Lineage:
    """The operations that ``after=`` really waits for.

    A settled one waits for nothing, but one that settled without ever running stands for its own
    predecessors, and a doomed one for those that are still lost.
    """
    met = list(dict.fromkeys(after))
    known = set(met)
    waits: dict[Operation, None] = {}
    for op in met:
        if op.state not in SETTLED:
            waits[op] = None
        elif op.doomed or not op.posted:
            fresh = [earlier for earlier in op.before if earlier not in known]
            known.update(fresh)
            met.extend(fresh)
    return Lineage(waits, met)


def link(earlier: Operation, later: Operation) -> None:
    """Record on the earlier side that `later` waits for it."""
    if earlier.after is UNLINKED:
        earlier.after = {}
    earlier.after[later] = None


def unordered(handle: Handle, preds: dict[Operation, None], *, writing: bool) -> Hold | None:
    """The first hold that a newcomer behind `preds` would overlap without order, if any."""
    missing = {
        cast("Operation", hold.owner): hold
        for hold in handle.pool.book.conflicts(handle, writing=writing, known=preds)
        if hold.owner not in preds
    }
    oldest = min((owner.serial for owner in missing), default=0)
    seen = set(preds)
    stack = list(preds)
    while stack and missing:
        for earlier in stack.pop().before:
            if earlier not in seen and earlier.serial >= oldest:
                seen.add(earlier)
                stack.append(earlier)
                missing.pop(earlier, None)
    return next(iter(missing.values()), None)


def descendants(op: Operation) -> list[Operation]:
    """Unsettled operations ordered behind `op`, oldest first, but for those that are doomed.

    Whatever is behind a doomed one is doomed too.
    """
    seen: dict[Operation, None] = {}
    stack = list(op.after)
    while stack:
        later = stack.pop()
        if later.state not in SETTLED and later not in seen and not later.doomed:
            seen[later] = None
            stack.extend(later.after)
    return sorted(seen, key=lambda later: later.serial)


def bequeath(op: Operation) -> None:
    """Give the predecessors of an operation that never ran to its successors.

    Those that have ended keep the operation itself, which stands for them: see `lineage`.
    """
    for later in op.after:
        for earlier in () if later.state in SETTLED else op.before:
            later.before[earlier] = None
            link(earlier, later)


def _named(handles: Iterable[Handle]) -> Taint:
    return frozenset(
        (handle.pool, block_id, generation)
        for handle in handles
        for block_id, generation in (
            ((handle.id, handle.generation),)
            if isinstance(handle, Block)
            else zip(handle.ids.tolist(), handle.generations.tolist(), strict=True)
        )
    )


def written(work: Work) -> Taint:
    """The blocks that `work` writes, as of the leases that it names."""
    return _named(work.writes)


def reads_any(work: Work, taint: Taint) -> bool:
    """Whether `work` reads a block whose bytes are undefined."""
    return not taint.isdisjoint(_named(work.reads))


def overwritten(work: Work, taint: Taint) -> Taint:
    """What is still undefined behind `work`, which defines every block that it writes whole.

    Not so a copy of some tensors only, or a read of a file into a part of a block.
    """
    if getattr(work, "names", None) is not None:
        return taint
    if isinstance(work, FileRead) and any(s.nbytes != s.block.nbytes for s in work.spans):
        return taint
    return taint - written(work)


def inherit(op: Operation, met: Iterable[Operation]) -> None:
    """Take over what its `lineage` means for a new operation.

    Bytes whose lease has ended are left out: whoever has the block now has other bytes.
    """
    for earlier in met:
        if not earlier.taint:
            continue
        bad = frozenset(t for t in earlier.taint if t[0].book.generation[t[1]] == t[2])
        if reads_any(op.work, bad):
            op.spoiled = OperationFailed(f"{earlier!r} left bytes undefined that it reads")
        op.taint |= overwritten(op.work, bad)
    for earlier in op.before:
        if earlier.doomed:
            op.doomed = True
            op.spoiled = op.spoiled or earlier.spoiled or lost_reason(earlier)


def lost_reason(op: Operation) -> OperationFailed:
    """Why whatever is ordered behind a lost operation fails."""
    reason = OperationFailed(f"the end of its predecessor {op!r} cannot be learnt")
    reason.__cause__ = op.error
    return reason


def spread(op: Operation) -> list[Operation]:
    """Carry the undefined bytes of `op` along the order; return the operations that read them.

    An operation that reads them fails itself, and spreads what it leaves undefined when it does.
    One that does not read them passes on what it does not overwrite. Edges point to smaller
    serials only: taken by serial, each operation is looked at once, with all that reaches it.
    """
    readers = []
    reached = {op: op.taint}
    heap = [(op.serial, op)]
    while heap:
        _, now = heapq.heappop(heap)
        bad = reached[now]
        if now is not op:
            if now.decided:
                continue
            reads = reads_any(now.work, bad)
            bad = bad if reads else overwritten(now.work, bad)
            if reads:
                readers.append(now)
            if reads or bad <= now.taint:  # what it has, it has passed on
                now.taint |= bad
                continue
            now.taint |= bad
        for later in now.after if bad else ():
            if later not in reached:
                heapq.heappush(heap, (later.serial, later))
            reached[later] = reached.get(later, NOTHING) | bad
    return readers
