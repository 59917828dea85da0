"""Pools: blocks of one layout in one storage, and who may use them.

The records of who has which block are a `Book`; a pool adds the memory, the lease objects, waiting,
and the thread that the pool belongs to.
"""

from __future__ import annotations

import os
import threading
from operator import index
from typing import TYPE_CHECKING, Final, final, overload

import numpy as np

from transfer._book import Book, PoolCounts
from transfer._errors import (
    CompletionLost,
    ForkDetected,
    LeaseError,
    PoolBusy,
    PoolExhausted,
    WrongPool,
    WrongThread,
)
from transfer._extent import copy_runs
from transfer._handle import Block, Blocks, Lease
from transfer._storage import MappedStorage, Storage, TensorStorage, keep_for_ever
from transfer._wait import Line, wait_woken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self, SupportsIndex

    import numpy.typing as npt
    import torch

    from transfer._book import Hold
    from transfer._extent import BlockLayout, HasBlockLayout, Int64Array, Runs
    from transfer._handle import Handle


NOWHERE: Final[frozenset[int]] = frozenset()

RUNS_KEPT: Final = 64
"""Layouts that a pool remembers its byte runs to; more are computed again."""


class Pool:
    """Blocks of one layout in one storage.

    A pool belongs to the thread of the engine that first uses it.

    Args:
        layout: how the tensors lie inside a block.
        blocks: how many blocks.
        storage: the memory.
        name: for messages.
        foreign: the blocks belong to a host program: all are leased to it for ever, and a
            cancelled operation holds its caller back until they are quiet.
    """

    def __init__(
        self,
        layout: HasBlockLayout,
        blocks: int,
        storage: Storage,
        *,
        name: str = "pool",
        foreign: bool = False,
    ) -> None:
        self.layout: BlockLayout = layout.block_layout
        self.blocks = blocks
        self.storage = storage
        self.kind = storage.kind
        self.name = name
        self.foreign = foreign
        self.book = Book(blocks, foreign=foreign)
        self.double_releases = 0
        self.user: object | None = None
        self._thread: int | None = None
        self.scattered = self.layout.scattered if foreign else NOWHERE
        self._closed = False
        self._pid = os.getpid()
        self._line = Line()
        self._runs: dict[tuple[int, tuple[str, ...] | None], tuple[BlockLayout, Runs]] = {}

    def __repr__(self) -> str:
        return f"<{self.name}: {self.blocks} blocks of {self.layout.nbytes} bytes, {self.counts()}>"

    @classmethod
    def over(
        cls,
        tensors: Mapping[tuple[str, int | None], torch.Tensor],
        layout: HasBlockLayout,
        *,
        name: str = "foreign",
    ) -> Pool:
        """Wrap memory that a host program owns.

        Args:
            tensors: the memory of each extent by (name, layer), shape ``(blocks, *extent.shape)``;
                any strides that do not overlap.
            layout: what the program says of it: each extent in its own plane, in order, with the
                strides in elements that the memory really has.
            name: for messages.

        Raises:
            LayoutMismatch: the memory differs from the layout.
            SpanError: a block reaches past its allocation.
            WrongDevice: tensors on different devices.
        """
        storage = TensorStorage(tensors, layout.block_layout)
        return Pool(layout, storage.blocks, storage, name=name, foreign=True)

    # Leases

    @overload
    def lease(self) -> Lease[Block]: ...
    @overload
    def lease(self, count: int) -> Lease[Blocks]: ...
    def lease(self, count: int | None = None) -> Lease[Block] | Lease[Blocks]:
        """Take one block, or `count` of them in one lease.

        Raises:
            PoolExhausted: too few are free; says who has them.
            LeaseError: the pool is closed.
            WrongThread: called from another thread than the engine's.
            ForkDetected: the pool was made in another process.
        """
        self.check_thread()
        self._check_usable()
        book = self.book
        wanted = 1 if count is None else count
        if not 0 <= wanted <= len(book.free):
            raise PoolExhausted(self.name, wanted=wanted, **self.counts()._asdict())
        if count is None:
            block_id = book.lease_one()
            return Lease(Block(self, block_id, book.generation[block_id]))
        ids = book.lease_many(count)
        return Lease(Blocks(self, ids, book.generations[ids]))

    async def wait_lease(self, count: int) -> Lease[Blocks]:
        """Take `count` blocks, waiting until as many are free; first come, first served.

        Raises:
            PoolExhausted: the pool is smaller than `count`.
            LeaseError: the pool is closed.
            WrongThread: called from another thread than the engine's.
            ForkDetected: the pool was made in another process.
        """
        self.check_thread()
        if count > self.blocks:
            raise PoolExhausted(self.name, wanted=count, **self.counts()._asdict())
        await self._line.wait(lambda: self._closed or count <= len(self.book.free))
        return self.lease(count)

    def block(self, block_id: SupportsIndex) -> Block:
        """A handle of a foreign block; its owner is the host program.

        Raises:
            LeaseError: the pool is not foreign.
            WrongPool: no such block.
        """
        plain = index(block_id)  # addresses are more than what a host program's 32-bit id holds
        self._check_foreign((plain,))
        return Block(self, plain, self.book.generation[plain])

    def blocks_of(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> Blocks:
        """A handle of several foreign blocks, by id.

        Raises:
            LeaseError: the pool is not foreign, or an id is there twice.
            WrongPool: no such block.
        """
        self._check_foreign(ids)
        # A copy: host programs use their arrays of ids again while operations hold these blocks.
        wanted = np.array(ids, dtype=np.int64)
        if len(np.unique(wanted)) != len(wanted):
            raise LeaseError(f"a block is named twice in {wanted.tolist()[:8]}")
        return Blocks(self, wanted, self.book.generations[wanted])

    def _check_foreign(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        if not self.foreign:
            raise LeaseError(f"blocks of {self.name} are had by lease(), not by id")
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.blocks:
            raise WrongPool(f"ids {min(ids)} to {max(ids)}; {self.name} has {self.blocks} blocks")

    def give_back(self, handle: Handle) -> None:
        """End a lease; called by `Lease.release`."""
        self.book.give_back(handle)
        self._line.wake()

    def end(self, hold: Hold) -> None:
        """End an operation's hold; whoever waits for blocks gets to look."""
        self.book.end(hold)
        if self._line.places:
            self._line.wake()

    # Looking

    def check_quiet(self, block: Block, *, write: bool) -> None:
        """Refuse a look at bytes that an operation may change, or would be changed under.

        Raises:
            LeaseError: an operation holds the block, or the pool is closed.
            StaleBlock: the lease ended.
        """
        if self._closed:
            raise LeaseError(f"{self.name} is closed")
        book = self.book
        book.check(block)
        if book.held[block.id] if write else book.writing[block.id]:
            names = ", ".join(map(repr, self.holders(block)))
            raise LeaseError(f"{block!r} is held by {names}")

    async def wait_unheld(self, handle: Handle) -> None:
        """Wait until no operation holds any block of `handle`.

        Raises:
            CompletionLost: a block is quarantined; may be awaited again.
        """
        book = self.book
        ids = [int(block_id) for block_id in handle.ids]
        # All of them at one moment: one that was quiet may be held again meanwhile.
        while held := [block_id for block_id in ids if book.held[block_id]]:
            for block_id in held:
                if book.lost[block_id]:
                    raise CompletionLost(
                        f"block {block_id} of {self.name} is quarantined; held by "
                        f"{book.holders((block_id,))}"
                    )
            waiters = book.unheld.setdefault(held[0], [])
            try:
                await wait_woken(waiters)
            finally:
                if not waiters:
                    book.unheld.pop(held[0], None)

    def holders(self, handle: Handle | None = None) -> list[object]:
        """The operations that hold blocks of `handle`, or of the whole pool; each once."""
        return self.book.holders(None if handle is None else map(int, handle.ids))

    def counts(self) -> PoolCounts:
        """Blocks by who has them; always adds up to `blocks`."""
        return self.book.counts()

    def address(self, plane: int, block_id: int) -> int:
        """Absolute address of a block in a plane."""
        where = self.storage.planes[plane]
        return where.address + block_id * where.stride

    def addresses(self, plane: int, ids: Int64Array) -> Int64Array:
        """Absolute addresses of many blocks in a plane, int64."""
        where = self.storage.planes[plane]
        return where.address + ids * np.int64(where.stride)

    def runs_to(self, other: Pool, names: tuple[str, ...] | None) -> Runs:
        """Byte runs that carry a block of this pool into one of `other`; see `copy_runs`.

        Kept by the identity of the layout: hashing one with hundreds of extents on every copy
        would cost more than a small copy does.
        """
        key = (id(other.layout), names)
        known = self._runs.get(key)
        if known is None:
            if len(self._runs) == RUNS_KEPT:
                self._runs.clear()
            known = self._runs[key] = (other.layout, copy_runs(self.layout, other.layout, names))
        return known[1]

    # Whose it is

    def adopt(self, user: object) -> None:
        """Bind the pool to an engine and to the calling thread.

        Raises:
            WrongPool: it has operations of another engine.
            WrongThread: an engine of another thread uses it and is not closed.
            LeaseError: it is closed; nothing may touch its memory any more.
            ForkDetected: the pool was made in another process.
        """
        self.check_thread()
        self._check_usable()
        if self.user is not user and not self.book.idle:
            # An engine that was closed with lost operations, and is started again, goes on.
            strange = [op for op in self.holders() if getattr(op, "driver", None) is not user]
            if strange:
                whose = getattr(strange[0], "driver", self.user)
                raise WrongPool(f"{self.name} has operations of {whose!r}; {user!r} cannot use it")
        self.user = user
        self._thread = threading.get_ident()

    def disown(self, user: object, *, forget: bool = False) -> None:
        """An engine is closed: any thread may release leases and close the pool.

        Args:
            user: the engine; nothing happens if another one uses the pool by now.
            forget: the loop is gone, so whoever waited is gone too, and must not be woken.
        """
        if self.user is not user:
            return
        self.user = None
        self._thread = None
        if forget:
            self.book.unheld.clear()
            self._line = Line()

    def _check_usable(self) -> None:
        if self._closed:
            raise LeaseError(f"{self.name} is closed")
        if not self.foreign and self._pid != os.getpid():
            raise ForkDetected(
                f"{self.name} was made in process {self._pid}, this is {os.getpid()}: both share "
                f"its memory and neither knows what the other has leased; expected a pool made here"
            )

    def check_thread(self) -> None:
        """Refuse a foreign thread.

        Raises:
            WrongThread: the pool belongs to another thread's engine.
        """
        if self._thread is not None and self._thread != threading.get_ident():
            raise WrongThread(
                f"{self.name} belongs to the thread of {self.user!r} "
                f"({self._thread}), not to thread {threading.get_ident()}"
            )

    def close(self) -> None:
        """Give the memory back.

        Raises:
            PoolBusy: operations hold blocks, named in the message; the memory stays mapped for the
                life of the process.
            WrongThread: called from another thread than the engine's, which may be about to post.
        """
        if self._closed:
            return
        self.check_thread()
        self._closed = True
        self.user = None  # no engine's any more: the next one that tries is refused
        self._line.wake_all()
        if not self.book.idle:
            keep_for_ever(self.storage)
            raise PoolBusy(
                f"{self.name} closed with {self.counts()}; held by "
                f"{', '.join(map(repr, self.holders()[:8]))}; its memory is kept"
            )
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@final
class HostPool(Pool):
    """Blocks in page-aligned host memory of our own that stays right across a fork.

    Args:
        layout: how the tensors lie inside a block; one plane.
        blocks: how many.
        align: block stride in bytes; a page from one page up, so that direct I/O is possible.
        name: for messages.
    """

    def __init__(
        self,
        layout: HasBlockLayout,
        blocks: int,
        *,
        align: int | None = None,
        name: str = "host pool",
    ) -> None:
        plan = layout.block_layout
        if len(plan.plane_bytes) != 1:
            raise WrongPool(f"a host slot is one plane, the layout has {len(plan.plane_bytes)}")
        storage = MappedStorage(plan.nbytes, blocks, align=align)
        super().__init__(plan, blocks, storage, name=name)
