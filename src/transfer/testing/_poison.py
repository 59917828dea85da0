"""PoisonedPool: blocks are filled with a pattern when they become free, and checked when leased.

A write that comes late, into a block that nobody should touch any more, breaks the pattern. A
reader of a block that was given back too early finds the pattern instead of its data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, final

from transfer._memory import Pool
from transfer.testing._memory import SimStorage, memory_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transfer._extent import HasBlockLayout
    from transfer._storage import Storage

POISON = b"\xde\xad\xbe\xef\xfe"
"""Repeated over a free block; five bytes, so that shifts by powers of two show."""


class Damage(NamedTuple):
    """Bytes of a free block that changed.

    Attributes:
        pool: the pool's name.
        block: the block's id.
        plane: the plane.
        offset: the first changed byte.
        found: the bytes from there on, at most 8.
    """

    pool: str
    block: int
    plane: int
    offset: int
    found: bytes


class PoisonDamaged(AssertionError):
    """Something wrote into a free block; `damage` says where."""

    def __init__(self, damage: list[Damage]) -> None:
        super().__init__(f"free blocks were written: {damage}")
        self.damage = damage


class _Free(list[int]):
    """A list of free ids that tells when one comes or goes."""

    def __init__(
        self,
        ids: Iterable[int],
        came: Callable[[list[int]], None],
        going: Callable[[list[int]], None],
    ) -> None:
        super().__init__(ids)
        self._came = came
        self._going = going

    def append(self, block_id: int, /) -> None:
        self._came([block_id])
        super().append(block_id)

    def extend(self, ids: Iterable[int], /) -> None:
        fresh = list(ids)
        self._came(fresh)
        super().extend(fresh)

    def pop(self, index: SupportsIndex = -1, /) -> int:
        self._going([self[index]])
        return super().pop(index)

    def __delitem__(self, index: SupportsIndex | slice, /) -> None:
        chosen = self[index]
        self._going(chosen if isinstance(chosen, list) else [chosen])
        super().__delitem__(index)


@final
class PoisonedPool(Pool):
    """A pool that shows writes into free blocks, and reads of them.

    Args:
        layout: how the tensors lie inside a block.
        blocks: how many.
        kind: ``"host"``, or the kind of a pretend device.
        storage: other memory to use; process memory of `kind` when None.
        name: for messages.

    Attributes:
        reuses: leases of blocks that had been leased before.
    """

    def __init__(
        self,
        layout: HasBlockLayout,
        blocks: int,
        *,
        kind: str = "host",
        storage: Storage | None = None,
        name: str = "poisoned pool",
    ) -> None:
        plan = layout.block_layout
        memory = SimStorage(plan, blocks, kind=kind) if storage is None else storage
        super().__init__(plan, blocks, memory, name=name)
        self.reuses = 0
        self._used: set[int] = set()
        self._patterns = [(POISON * (n // len(POISON) + 1))[:n] for n in plan.plane_bytes]
        self._fill(range(blocks))
        self.book.free = _Free(self.book.free, self._fill, self._leave)

    def _fill(self, ids: Iterable[int]) -> None:
        for block_id in ids:
            for plane, pattern in enumerate(self._patterns):
                memory_at(self.storage, self.address(plane, block_id), len(pattern))[:] = pattern

    def _leave(self, ids: list[int]) -> None:
        damage = self.damage(ids)
        if damage:
            raise PoisonDamaged(damage)
        self.reuses += len(self._used.intersection(ids))
        self._used.update(ids)

    def damage(self, ids: Iterable[int] | None = None) -> list[Damage]:
        """Free blocks whose pattern is broken; of `ids`, or of all that are free."""
        return [
            found
            for block_id in (self.book.free if ids is None else ids)
            for plane, pattern in enumerate(self._patterns)
            if (found := self._look(block_id, plane, pattern)) is not None
        ]

    def _look(self, block_id: int, plane: int, pattern: bytes) -> Damage | None:
        view = memory_at(self.storage, self.address(plane, block_id), len(pattern))
        if view == pattern:
            return None
        data = bytes(view)
        first = next(i for i, byte in enumerate(data) if byte != pattern[i])
        return Damage(self.name, block_id, plane, first, data[first : first + 8])
