"""What must hold of an engine's books after every step, whatever happened."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from transfer._state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transfer._lane import Lane
    from transfer._memory import Pool
    from transfer._operation import Operation

_TOUCHED = frozenset({State.IN_FLIGHT, State.ABANDONED, State.QUARANTINED})


def broken_invariants(
    lanes: Iterable[Lane], pools: Iterable[Pool], *, rested: bool = True
) -> list[str]:
    """What does not hold; nothing, if all is well.

    Args:
        lanes: of a ledger.
        pools: whose blocks to count.
        rested: whether the ledger has had its turn; right after an interrupt it has not, and what
            can go on does so at its next call.

    * A posted operation is never PREPARED; every hold of an unsettled operation is live, and none
      of a settled one.
    * Nothing is left behind: what is prepared waits for something that has not ended, and what is
      quiet itself for something that can still end.
    * A block is held exactly as often as live holds name it, and free exactly once if it is
      neither leased nor held.
    * The four counts of each pool add up.
    """
    ops = [op for lane in lanes for op in (*lane.live, *lane.lost)]
    left = _left_behind(ops) if rested else ()
    return [
        *_of_operations(ops),
        *left,
        *(found for pool in pools for found in _of_pool(pool, ops)),
    ]


def _of_operations(ops: list[Operation]) -> Iterator[str]:
    for op in ops:
        if op.posted and op.state is State.PREPARED:
            yield f"{op!r} is posted and PREPARED"
        if not op.settled and not all(hold.live for hold in op.holds):
            yield f"{op!r} is not settled and a hold of it has ended"
        if op.settled:
            yield f"{op!r} is settled and still counted as live"
        if op.state in _TOUCHED and not op.posted:
            yield f"{op!r} is with the device and not posted"


def _left_behind(ops: list[Operation]) -> Iterator[str]:
    for op in ops:
        waits = [p for p in op.before if not p.settled]
        if op.state is State.PREPARED and not waits:
            yield f"{op!r} is prepared and waits for nothing"
        if op.state is State.PREPARED and any(p.state is State.QUARANTINED for p in waits):
            yield f"{op!r} is prepared behind a lost operation"
        if (
            op.state in (State.IN_FLIGHT, State.ABANDONED)
            and op.parked is not None
            and all(p.state is State.QUARANTINED for p in waits)
        ):
            yield f"{op!r} is quiet, waits for nothing that can end, and has not ended"


def _of_pool(pool: Pool, ops: list[Operation]) -> Iterator[str]:
    book = pool.book
    held = Counter(
        int(i)
        for op in ops
        for hold in op.holds
        if hold.handle.pool is pool
        for i in hold.handle.ids
    )
    free = Counter(book.free)
    for block_id in range(pool.blocks):
        if book.held[block_id] != held[block_id]:
            yield (
                f"block {block_id} of {pool.name} is held {book.held[block_id]} times, "
                f"live holds are {held[block_id]}"
            )
        expected = not book.leased[block_id] and not held[block_id]
        if free[block_id] != expected:
            yield f"block {block_id} of {pool.name} is {free[block_id]} times in the free list"
    counts = pool.counts()
    if sum(counts) != pool.blocks or min(counts) < 0 or counts.free != len(book.free):
        yield f"{counts} of {pool.name} do not add up to {pool.blocks} blocks"
