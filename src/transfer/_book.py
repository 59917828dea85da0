"""Who has which blocks, by id: leases, holds, generations. Pure bookkeeping.

A block is free again when it is unleased *and* unheld. Each block is counted once: quarantined,
else held, else leased, else free. The counts are derived from the per-block records, never kept
beside them, so they cannot drift.

Every method that changes two records changes first the one that keeps a block from being reused:
an interrupt in between leaks a block, and never gives one out early.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from transfer._errors import StaleBlock
from transfer._handle import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from transfer._extent import Int64Array
    from transfer._handle import Blocks, Handle

LARGE: Final = 8
"""Holds of more blocks than this are kept in a list and searched, not indexed block by block."""


class PoolCounts(NamedTuple):
    """How many blocks are in which hands; each block is counted once."""

    free: int
    leased: int
    held: int
    quarantined: int


@final
class Hold:
    """An operation's claim on blocks of one pool, reading or writing."""

    __slots__ = ("handle", "live", "lost", "owner", "writing")

    def __init__(self, handle: Handle, owner: object, writing: bool) -> None:  # noqa: FBT001 - hot
        self.handle = handle
        self.owner = owner
        self.writing = writing
        self.live = False
        self.lost = False

    def __repr__(self) -> str:
        return f"<hold {'writing' if self.writing else 'reading'} {self.handle!r}>"


@final
class Book:
    """The records of `blocks` blocks; single ids in plain Python, many ids in numpy, one memory.

    Args:
        blocks: how many there are.
        foreign: all are leased to a host program for ever.
    """

    def __init__(self, blocks: int, *, foreign: bool) -> None:
        self.blocks = blocks
        self.generation = array("q", bytes(8 * blocks))
        self.leased = bytearray((b"\x01" if foreign else b"\x00") * blocks)
        self.held = array("i", bytes(4 * blocks))
        self.writing = array("i", bytes(4 * blocks))
        self.lost = array("i", bytes(4 * blocks))
        self.generations = np.frombuffer(self.generation, dtype=np.int64)
        self._leased = np.frombuffer(self.leased, dtype=np.uint8)
        self._held = np.frombuffer(self.held, dtype=np.int32)
        self._writing = np.frombuffer(self.writing, dtype=np.int32)
        self._lost = np.frombuffer(self.lost, dtype=np.int32)
        self.free: list[int] = [] if foreign else list(range(blocks - 1, -1, -1))
        self.unheld: dict[int, list[Callable[[], None]]] = {}
        # By block id, a list: a look-up in it touches one place in memory, in a dict several.
        self._small: list[Hold | list[Hold] | None] = [None] * blocks
        self._large: dict[Hold, None] = {}

    # Leases

    def lease_one(self) -> int:
        """Take a free block; the caller knows that there is one."""
        block_id = self.free.pop()
        self.leased[block_id] = 1
        return block_id

    def lease_many(self, count: int) -> Int64Array:
        """Take `count` free blocks; the caller knows that they are there."""
        start = len(self.free) - count
        ids = np.array(self.free[start:][::-1], dtype=np.int64)
        del self.free[start:]
        self._leased[ids] = 1
        return ids

    def give_back(self, handle: Handle) -> None:
        """End a lease: handles go stale, unheld blocks become free."""
        if isinstance(handle, Block):
            block_id = handle.id
            self.generation[block_id] += 1
            self.leased[block_id] = 0
            if not self.held[block_id]:
                self.free.append(block_id)
            return
        ids = handle.ids
        self.generations[ids] += 1
        self._leased[ids] = 0
        self.free.extend(ids[self._held[ids] == 0].tolist())

    # Holds

    def check(self, handle: Handle, *, writing: bool = False) -> bool:
        """Refuse a stale handle; whether `conflicts` might have anything to say of a fresh one.

        Raises:
            StaleBlock: its lease ended.
        """
        if isinstance(handle, Block):
            block_id = handle.id
            now = self.generation[block_id]
            if now != handle.generation:
                raise StaleBlock(f"{handle!r} is stale: the block is at generation {now}")
            return (self.held if writing else self.writing)[block_id] > 0
        fresh = self.generations[handle.ids] == handle.generations
        if not fresh.all():
            raise StaleBlock(f"blocks {handle.ids[~fresh][:8].tolist()} of {handle!r} are stale")
        return bool((self._held if writing else self._writing)[handle.ids].any())

    def conflicts(
        self, handle: Handle, *, writing: bool, known: Container[object] = ()
    ) -> Iterator[Hold]:
        """Holds that a newcomer on `handle` has to be ordered after, newest first.

        On each block that is the newest writer and, for a newcomer that writes, every reader since.
        What came before that writer was ordered before it when its own hold was taken, so a chain
        of thousands costs no more than its last link. A newcomer that reads needs not look past a
        hold of an owner in `known`, which it is ordered after: that one had to be ordered too.
        """
        counts = self._held if writing else self._writing
        busy = [int(i) for i in handle.ids if counts[i]]
        seen = set()
        for block_id in busy:
            found = self._small[block_id] or ()
            for hold in (found,) if isinstance(found, Hold) else reversed(found):
                if (writing or hold.writing) and hold not in seen:
                    seen.add(hold)
                    yield hold
                if hold.writing or (not writing and hold.owner in known):
                    break
        if self._large and busy:
            yield from self._large_conflicts(busy, known, writing=writing)

    def _large_conflicts(
        self, busy: list[int], known: Container[object], *, writing: bool
    ) -> Iterator[Hold]:
        left = np.array(busy, dtype=np.int64)
        for hold in reversed(self._large):
            covered = np.isin(left, hold.handle.ids)
            if covered.any() and (writing or hold.writing):
                yield hold
            if hold.writing or (not writing and hold.owner in known):
                left = left[~covered]
                if not len(left):
                    return

    def overlapping(self, ids: list[int]) -> Iterator[Hold]:
        """Live holds on any of `ids`, each once."""
        seen = set()
        for block_id in ids:
            found = self._small[block_id] or ()
            for hold in (found,) if isinstance(found, Hold) else found:
                if hold not in seen:
                    seen.add(hold)
                    yield hold
        for hold in list(self._large) if ids else ():
            if np.isin(hold.handle.ids, ids).any():
                yield hold

    def take(self, hold: Hold) -> None:
        """Begin a hold. The caller has checked the handle and the conflicts."""
        handle = hold.handle
        if isinstance(handle, Block):
            block_id = handle.id
            self.held[block_id] += 1
            if hold.writing:
                self.writing[block_id] += 1
            if self._small[block_id] is None:
                self._small[block_id] = hold
            else:
                self._note(hold, block_id)
            hold.live = True
            return
        self._held[handle.ids] += 1
        if hold.writing:
            self._writing[handle.ids] += 1
        if len(handle) > LARGE:
            self._large[hold] = None
        else:
            for block_id in handle.ids.tolist():
                self._note(hold, block_id)
        # Said when all is done: a hold that an interrupt cut short never ends, it leaks.
        hold.live = True

    def _note(self, hold: Hold, block_id: int) -> None:
        # A bare hold where there is one, a list from two on: most blocks have one holder, and a
        # list for each would double what the garbage collector has to walk.
        found = self._small[block_id]
        if found is None:
            self._small[block_id] = hold
        elif isinstance(found, list):
            found.append(hold)
        else:
            self._small[block_id] = [found, hold]

    def end(self, hold: Hold) -> None:
        """End a hold; blocks that are now unheld and unleased become free. Idempotent."""
        if not hold.live:
            return
        # Said before it is done: an interrupt between the two leaks blocks, never frees twice.
        hold.live = False
        handle = hold.handle
        if not isinstance(handle, Block):
            self._end_many(hold, handle)
            return
        block_id = handle.id
        if self._small[block_id] is hold:
            self._small[block_id] = None
        else:
            self._forget(hold, block_id)
        if hold.lost:
            self.lost[block_id] -= 1
        if hold.writing:
            self.writing[block_id] -= 1
        left = self.held[block_id] - 1
        self.held[block_id] = left
        if not left:
            if not self.leased[block_id]:
                self.free.append(block_id)
            if block_id in self.unheld:
                self._wake((block_id,))

    def _forget(self, hold: Hold, block_id: int) -> None:
        found = self._small[block_id]
        if isinstance(found, list) and len(found) > 1:
            found.remove(hold)
        else:
            self._small[block_id] = None

    def _end_many(self, hold: Hold, handle: Blocks) -> None:
        ids = handle.ids
        if len(ids) > LARGE:
            del self._large[hold]
        else:
            for block_id in ids.tolist():
                self._forget(hold, block_id)
        if hold.lost:
            self._lost[ids] -= 1
        if hold.writing:
            self._writing[ids] -= 1
        self._held[ids] -= 1
        quiet = ids[self._held[ids] == 0]
        self.free.extend(quiet[self._leased[quiet] == 0].tolist())
        if self.unheld:
            self._wake(quiet.tolist())

    def quarantine(self, hold: Hold) -> None:
        """Mark a hold's blocks: whether something still touches them cannot be learnt. Idempotent."""
        if hold.lost or not hold.live:
            return
        hold.lost = True
        self._lost[list(hold.handle.ids)] += 1
        if self.unheld:
            self._wake(hold.handle.ids)

    def _wake(self, ids: Iterable[int]) -> None:
        for block_id in ids:
            for callback in list(self.unheld.get(int(block_id), ())):
                callback()

    # Looking

    @property
    def idle(self) -> bool:
        """Whether no operation holds a block."""
        return not self._held.any()

    def holders(self, ids: Iterable[int] | None = None) -> list[object]:
        """The owners of the holds on `ids`, or on any block; each once."""
        every = range(self.blocks) if ids is None else ids
        busy = [int(i) for i in every if self.held[int(i)]]
        return list(dict.fromkeys(hold.owner for hold in self.overlapping(busy)))

    def counts(self) -> PoolCounts:
        """Blocks by who has them; always adds up to `blocks`."""
        lost = self._lost > 0
        held = (self._held > 0) & ~lost
        leased = self._leased.astype(bool) & ~held & ~lost
        q, h, n = int(lost.sum()), int(held.sum()), int(leased.sum())
        return PoolCounts(self.blocks - q - h - n, n, h, q)
