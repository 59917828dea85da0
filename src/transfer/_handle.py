"""What a caller holds in the hand: blocks, byte ranges of them, and the lease on them.

A handle names blocks of one pool together with the generation at which they were leased. Once the
lease is released the generation moves on, and every handle made from it is stale: it is refused
wherever it is used, whoever has the block by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, final, overload

import numpy as np

from transfer._errors import LeaseError, SpanError, StaleBlock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import torch

    from transfer._extent import Int64Array
    from transfer._memory import Pool


@final
class Block:
    """One block of a pool, as of one lease."""

    __slots__ = ("generation", "id", "pool")

    def __init__(self, pool: Pool, block_id: int, generation: int) -> None:
        self.pool = pool
        self.id = block_id
        self.generation = generation

    def __repr__(self) -> str:
        return f"<block {self.id} of {self.pool.name}, generation {self.generation}>"

    def __len__(self) -> int:
        return 1

    @property
    def ids(self) -> tuple[int]:
        """The id, as a sequence like that of `Blocks`."""
        return (self.id,)

    @property
    def nbytes(self) -> int:
        """Bytes over all planes, padding included."""
        return self.pool.layout.nbytes

    def span(self, offset: int = 0, nbytes: int | None = None, *, plane: int = 0) -> Span:
        """A byte range of this block in one plane; to the end when `nbytes` is None."""
        sizes = self.pool.layout.plane_bytes
        if nbytes is None:
            nbytes = sizes[plane] - offset if 0 <= plane < len(sizes) else 0
        return Span(self, plane, offset, nbytes)

    def tensor(self, name: str, layer: int | None = None, *, write: bool = False) -> torch.Tensor:
        """A view of one tensor of this block, without a copy.

        Args:
            name: the extent's name.
            layer: the extent's layer.
            write: whether the caller means to change it.

        Raises:
            LeaseError: an operation still writes the block or, with `write`, still reads it.
            StaleBlock: the lease ended.
        """
        extent = self.pool.layout.extent(name, layer)
        self.pool.check_quiet(self, write=write)
        return self.pool.storage.tensor(self.pool.address(extent.plane, self.id), extent)

    def view(self, *, plane: int = 0, write: bool = False) -> memoryview:
        """The block's bytes in one plane of host memory; read-only unless `write`.

        Raises:
            LeaseError: an operation still writes the block or, with `write`, still reads it.
            StaleBlock: the lease ended.
            WrongDevice: the memory is not host memory.
            SpanError: the plane's bytes are not the block's alone; see `Span`.
        """
        self.pool.check_quiet(self, write=write)
        span = self.span(plane=plane)
        view = self.pool.storage.view(span.address, span.nbytes)
        return view if write else view.toreadonly()

    async def wait_unheld(self) -> None:
        """Wait until no operation holds the block: the one proof that nothing touches it.

        Raises:
            CompletionLost: it is quarantined; may be awaited again, proof can still come.
        """
        await self.pool.wait_unheld(self)


@final
class Blocks:
    """Several distinct blocks of one pool, as of their leases.

    Attributes:
        pool: whose they are.
        ids: int64 array of block ids.
        generations: int64 array of the same length.
    """

    __slots__ = ("generations", "ids", "pool")

    def __init__(self, pool: Pool, ids: Int64Array, generations: Int64Array) -> None:
        self.pool = pool
        self.ids = ids
        self.generations = generations

    def __repr__(self) -> str:
        return f"<{len(self.ids)} blocks of {self.pool.name}>"

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Blocks: ...
    def __getitem__(self, index: int | slice) -> Block | Blocks:
        if isinstance(index, slice):
            return Blocks(self.pool, self.ids[index], self.generations[index])
        return Block(self.pool, int(self.ids[index]), int(self.generations[index]))

    def __iter__(self) -> Iterator[Block]:
        for block_id, generation in zip(self.ids.tolist(), self.generations.tolist(), strict=True):
            yield Block(self.pool, block_id, generation)

    @property
    def nbytes(self) -> int:
        """Bytes over all blocks and planes, padding included."""
        return len(self.ids) * self.pool.layout.nbytes

    @classmethod
    def gather(cls, blocks: Iterator[Block] | list[Block] | tuple[Block, ...]) -> Blocks:
        """Join single blocks of one pool into one handle.

        Raises:
            LeaseError: none, blocks of different pools, or one block twice.
        """
        members = list(blocks)
        pools = {id(b.pool) for b in members}
        if len(pools) != 1:
            raise LeaseError(f"blocks of exactly one pool are expected, found {len(pools)} pools")
        ids = np.array([b.id for b in members], dtype=np.int64)
        if len(np.unique(ids)) != len(ids):
            raise LeaseError("one block is named twice")
        generations = np.array([b.generation for b in members], dtype=np.int64)
        return cls(members[0].pool, ids, generations)

    async def wait_unheld(self) -> None:
        """Wait until no operation holds any of the blocks.

        Raises:
            CompletionLost: one is quarantined; may be awaited again.
        """
        await self.pool.wait_unheld(self)


Handle: TypeAlias = Block | Blocks
H = TypeVar("H", Block, Blocks)


@final
class Span:
    """A byte range of a block in one plane.

    Raises:
        SpanError: the range does not lie inside the block, or the block's tensor in that plane has
            gaps, which in foreign memory are other blocks' bytes.
    """

    __slots__ = ("block", "nbytes", "offset", "plane")

    def __init__(self, block: Block, plane: int, offset: int, nbytes: int) -> None:
        sizes = block.pool.layout.plane_bytes
        if not 0 <= plane < len(sizes):
            raise SpanError(f"plane {plane} of a block with {len(sizes)}")
        if offset < 0 or nbytes < 0 or offset + nbytes > sizes[plane]:
            raise SpanError(
                f"bytes {offset} to {offset + nbytes} of a block of {sizes[plane]} bytes "
                f"in plane {plane}"
            )
        if plane in block.pool.scattered:
            raise SpanError(
                f"plane {plane} of {block!r} has gaps that belong to others; expected a tensor "
                f"without gaps, or a Copy, which leaves them alone"
            )
        self.block = block
        self.plane = plane
        self.offset = offset
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"<bytes {self.offset} to {self.offset + self.nbytes} of {self.block!r}>"

    @property
    def address(self) -> int:
        """Absolute address of the first byte."""
        return self.block.pool.address(self.plane, self.block.id) + self.offset


@final
class Lease(Generic[H]):
    """The owner's right to blocks, without expiry; a context manager that gives the handle.

    `release` is legal at any time: a block that an operation holds goes back to its pool when the
    hold ends.
    """

    __slots__ = ("_handle", "_released")

    def __init__(self, handle: H) -> None:
        self._handle: H = handle
        self._released = False

    def __repr__(self) -> str:
        return f"<{'released ' if self._released else ''}lease of {self._handle!r}>"

    @property
    def handle(self) -> H:
        """What is leased.

        Raises:
            StaleBlock: the lease was released.
        """
        if self._released:
            raise StaleBlock(f"{self!r} is used after release")
        return self._handle

    @property
    def released(self) -> bool:
        """Whether the owner gave the blocks back."""
        return self._released

    def release(self) -> None:
        """Give the blocks back; they are reused when nothing holds them.

        Raises:
            LeaseError: it was released before, by this lease or by another of the same blocks;
                counted by the pool, and nothing changes.
        """
        pool = self._handle.pool
        if self._released:
            pool.double_releases += 1
            raise LeaseError(f"{self!r} is released a second time")
        pool.check_thread()
        if pool.foreign:
            raise LeaseError(f"{self!r}: the blocks are a host program's, there is no lease to end")
        try:
            pool.book.check(self._handle)
        except StaleBlock:
            pool.double_releases += 1
            raise
        # Said before it is done: an interrupt between the two leaks blocks, never frees twice.
        self._released = True
        pool.give_back(self._handle)

    def __enter__(self) -> H:
        return self.handle

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._released:
            self.release()
