"""HostTier: components in blocks of host memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, Protocol, final

import numpy as np

from tiers._errors import CapacityExceeded
from tiers._residency import Change
from tiers._tier import Account, Item, Slot, TierCounts
from transfer._errors import LayoutMismatch
from transfer._handle import Block, Blocks, Lease
from transfer._memory import HostPool, Pool
from transfer._work import Copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiers._layout import PageLayout
    from transfer._extent import BlockLayout
    from transfer._work import Work

_MADV_HUGEPAGE: Final = 14


class MakePool(Protocol):
    """Makes host memory: `transfer.HostPool`, or `transfer.cuda.PinnedPool` for pages on a GPU."""

    def __call__(self, layout: BlockLayout, blocks: int, *, name: str) -> Pool:
        """A pool that nobody uses, with exactly this layout and as many blocks."""
        ...


def made(make_pool: MakePool, layout: BlockLayout, blocks: int, *, name: str) -> Pool:
    """A pool that was made as asked.

    Raises:
        LayoutMismatch: it is not what was asked for; it stays the caller's.
    """
    pool = make_pool(layout, blocks, name=name)
    if pool.kind != "host" or pool.foreign:
        raise LayoutMismatch(f"{name}: found {pool!r}, expected host memory of our own")
    if pool.blocks != blocks or pool.counts().free != blocks:
        raise LayoutMismatch(
            f"{name}: found {pool.blocks} blocks, {pool.counts().free} free; expected {blocks}"
        )
    if pool.layout != layout:
        raise LayoutMismatch(f"{name}: found {pool.layout}, expected {layout}")
    return pool


@final
class HostSlot(Slot):
    """A block of the tier's pool, leased for one item."""

    __slots__ = ("lease",)

    def __init__(self, item: Item, charged: int, lease: Lease[Block]) -> None:
        super().__init__(item, charged)
        self.lease = lease

    @property
    def block(self) -> Block:
        """The block; stale once its bytes are given back."""
        return self.lease.handle


@final
class HostTier:
    """Components in the blocks of a pool, one item in each.

    Args:
        pool: host memory; its layout has the components of the items and nothing that differs.
        name: for messages and statistics.
        huge: ask the kernel for huge pages. Advice only: `huge` says whether it was taken.

    Raises:
        LayoutMismatch: the pool's memory is not host memory.
    """

    def __init__(self, pool: Pool, *, name: str = "host", huge: bool = False) -> None:
        if pool.kind != "host" or pool.foreign:
            raise LayoutMismatch(f"{name}: found {pool!r}, expected host memory of our own")
        self.name = name
        self.pool = pool
        self.stride = pool.storage.planes[0].stride
        self.capacity: int | None = pool.blocks * self.stride
        self.huge = huge and _advise(pool)
        self._account = Account(name, self.capacity)
        self._extents: dict[str, list[tuple[object, ...]]] = {}
        for extent in pool.layout.extents:
            found = self._extents.setdefault(extent.name, [])
            found.append((extent.layer, extent.shape, extent.dtype))

    @classmethod
    def of(
        cls,
        layout: PageLayout,
        names: Iterable[str],
        *,
        blocks: int,
        name: str = "host",
        huge: bool = False,
        make_pool: MakePool = HostPool,
    ) -> HostTier:
        """A tier with a pool of its own, for some components of a page.

        Args:
            layout: the page as stored.
            names: its components that the tier is for.
            blocks: pages.
            name: for messages and statistics.
            huge: as for the tier.
            make_pool: makes the pool, such as one of page-locked memory; the tier closes it.

        Raises:
            LayoutMismatch: the pool is not what was asked for; it stays the caller's.
        """
        return cls(made(make_pool, layout.slot(names), blocks, name=name), name=name, huge=huge)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.pool!r}>"

    def close(self) -> None:
        """Give the memory back.

        Raises:
            PoolBusy: operations hold blocks; the memory stays mapped.
        """
        self.pool.close()

    def check_layout(self, layout: PageLayout, names: Iterable[str]) -> None:
        """Refuse a pool that does not hold these components exactly.

        Raises:
            LayoutMismatch: says which.
        """
        for name in names:
            expected = [(e.layer, e.shape, e.dtype) for e in layout.slot((name,)).extents]
            if self._extents.get(name) != expected:
                raise LayoutMismatch(
                    f"{self.name}: found {name} {self._extents.get(name, 'missing')}, "
                    f"expected {expected}"
                )

    def fits(self, nbytes: int) -> int:
        """See `Tier.fits`."""
        return len(self.pool.book.free) if nbytes <= self.stride else 0

    def reserve(self, item: Item) -> HostSlot:
        """See `Tier.reserve`."""
        if not self.fits(item.nbytes):
            raise CapacityExceeded(
                f"{self.name}: {item.nbytes} bytes wanted in a block of {self.stride}; "
                f"{self.pool.counts()}"
            )
        slot = HostSlot(item, self.stride, self.pool.lease())
        self._account.begin(slot)
        return slot

    def write(self, slot: Slot, source: Block) -> Work:
        """See `Tier.write`."""
        return self.write_all((_ours(slot),), source)

    def write_all(self, slots: Sequence[HostSlot], source: Block | Blocks) -> Copy:
        """The copy of several items at once, one block of `source` for each."""
        return Copy(source, gather(slots), names=_names(slots))

    def publish(self, slot: Slot) -> None:
        """See `Tier.publish`."""
        self._account.apply(slot, Change.PUBLISH)

    def read(self, slot: Slot, into: Block) -> Work:
        """See `Tier.read`."""
        return self.read_all((_ours(slot),), into)

    def read_all(self, slots: Sequence[HostSlot], into: Block | Blocks) -> Copy:
        """The copy of several items at once, into one block for each."""
        return Copy(gather(slots), into, names=_names(slots))

    def withdraw(self, slot: Slot) -> Sequence[Work]:
        """See `Tier.withdraw`. Nothing is to be done but to give the block back."""
        self._account.withdraw(slot)
        return ()

    def evict(self, slot: Slot) -> Sequence[Work]:
        """See `Tier.evict`."""
        self._account.apply(slot, Change.EVICT)
        return ()

    def freed(self, slot: Slot) -> None:
        """See `Tier.freed`. The pool reuses the block once no operation holds it."""
        self._account.apply(slot, Change.FREED)
        _ours(slot).lease.release()

    def counts(self) -> TierCounts:
        """See `Tier.counts`."""
        return self._account.counts()


def gather(slots: Sequence[HostSlot]) -> Block | Blocks:
    """The blocks of several places as one handle."""
    return join([slot.block for slot in slots])


def join(blocks: Sequence[Block]) -> Block | Blocks:
    """Distinct blocks of one pool as one handle.

    Unlike `Blocks.gather` it takes the caller's word: to compare ids gives up the interpreter lock
    for a moment, and getting it back from busy workers takes longer than all the rest.
    """
    if len(blocks) == 1:
        return blocks[0]
    ids = np.array([block.id for block in blocks], dtype=np.int64)
    generations = np.array([block.generation for block in blocks], dtype=np.int64)
    return Blocks(blocks[0].pool, ids, generations)


def _names(slots: Sequence[HostSlot]) -> tuple[str, ...]:
    return tuple(part.name for part in slots[0].item.parts)


def _ours(slot: Slot) -> HostSlot:
    assert isinstance(slot, HostSlot)  # noqa: S101 - a place of another tier is a bug of ours
    return slot


def _advise(pool: Pool) -> bool:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    plane = pool.storage.planes[0]
    taken: bool = madvise(plane.address, plane.stride * pool.blocks, _MADV_HUGEPAGE) == 0
    return taken
