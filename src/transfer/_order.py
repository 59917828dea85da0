"""What order between operations means. Pure functions over the recorded edges.

``op.before`` never holds a settled operation: whoever settles takes itself out, and one that never
ran leaves its own predecessors in its place. Edges point to smaller serials only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer._state import SETTLED, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transfer._handle import Handle
    from transfer._operation import Operation, Taint
    from transfer._work import Work


def unsettled(after: Iterable[Operation]) -> dict[Operation, None]:
    """The operations that ``after=`` really waits for.

    A settled one waits for nothing, but one that settled without ever running has bequeathed its
    own predecessors.
    """
    found: dict[Operation, None] = {}
    for op in after:
        if op.state not in SETTLED:
            found[op] = None
        elif not op.posted:
            found.update(op.before)
    return found


def ordered_after(preds: dict[Operation, None], earlier: Operation) -> bool:
    """Whether work behind `preds` is ordered after `earlier`, over any number of edges."""
    if earlier in preds:
        return True
    seen = set()
    stack = list(preds)
    while stack:
        op = stack.pop()
        if earlier in op.before:
            return True
        if op.serial > earlier.serial and op not in seen:
            seen.add(op)
            stack.extend(op.before)
    return False


def descendants(op: Operation) -> list[Operation]:
    """Unsettled operations ordered behind `op`, oldest first."""
    seen: dict[Operation, None] = {}
    stack = list(op.after)
    while stack:
        later = stack.pop()
        if later.state not in SETTLED and later not in seen:
            seen[later] = None
            stack.extend(later.after)
    return sorted(seen, key=lambda later: later.serial)


def bequeath(op: Operation) -> None:
    """Give the predecessors of an operation that never ran to its successors."""
    for later in op.after:
        for earlier in op.before:
            later.before[earlier] = None
            earlier.after[later] = None


def _pairs(handle: Handle) -> Iterator[tuple[int, int]]:
    generations = handle.pool.book.generation
    return ((int(i), generations[int(i)]) for i in handle.ids)


def written(work: Work) -> Taint:
    """The blocks that `work` writes, as of their generations."""
    found: Taint = {}
    for handle in work.writes:
        found.setdefault(handle.pool, {}).update(_pairs(handle))
    return found


def reads_any(work: Work, taint: Taint) -> bool:
    """Whether `work` reads a block whose bytes are undefined."""
    for handle in work.reads:
        bad = taint.get(handle.pool)
        if bad and any(bad.get(i) == generation for i, generation in _pairs(handle)):
            return True
    return False


def overwritten(work: Work, taint: Taint) -> Taint:
    """What is still undefined behind `work`, which defines every block that it writes whole."""
    if getattr(work, "names", None) is not None:
        return taint
    left: Taint = {}
    fresh = written(work)
    for pool, bad in taint.items():
        defined = fresh.get(pool, {})
        kept = {
            i: generation
            for i, generation in bad.items()
            if i not in defined and pool.book.generation[i] == generation
        }
        if kept:
            left[pool] = kept
    return left


def merge(into: Taint | None, more: Taint) -> Taint:
    """The union of two sets of undefined blocks."""
    result: Taint = {pool: dict(bad) for pool, bad in (into or {}).items()}
    for pool, bad in more.items():
        result.setdefault(pool, {}).update(bad)
    return result


def spread(op: Operation, taint: Taint) -> list[Operation]:
    """Carry undefined bytes along the order; return the operations that read them.

    An operation that reads them fails itself, and spreads what it leaves undefined when it does.
    One that does not read them passes on what it does not overwrite.
    """
    readers: dict[Operation, None] = {}
    work = [(later, taint) for later in op.after]
    while work:
        later, bad = work.pop()
        if later.state in SETTLED or later in readers or later.state is State.QUARANTINED:
            continue
        if reads_any(later.work, bad):
            readers[later] = None
            later.taint = merge(later.taint, bad)
            continue
        left = overwritten(later.work, bad)
        if left:
            later.taint = merge(later.taint, left)
            work.extend((further, left) for further in later.after)
    return list(readers)
