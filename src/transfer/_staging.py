"""What a copy between pages and slots looks like to a GPU: tiles for kernels, pieces for DMA.

A kernel moves *tiles*, each a part of one byte run of one block. A DMA engine moves *pieces*, byte
ranges that are contiguous on both sides. Between the two stands a *staging* area on the GPU which
holds, block after block, the bytes in the order in which they lie in a host slot: few large pieces
for the DMA engine, however small the runs are on the pages' side. All offsets are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from transfer._errors import BadWork
from transfer._pieces import Moves, Pieces, SlotImage, consecutive, merge

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from transfer._extent import Int64Array, Runs
    from transfer._handle import Handle
    from transfer._memory import Pool

    LaunchKernel: TypeAlias = Callable[..., None]

COLUMNS: Final = 5
LARGE: Final = 32768
SMALL: Final = 4096
"""Bytes of a tile: runs of at least half a large one are cut into large ones, others into small."""


class Uploaded(NamedTuple):
    """Where the device has what `Pipeline.upload` gave.

    Attributes:
        address: device address.
        first: first block.
        blocks: number of blocks.
    """

    address: int
    first: int
    blocks: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """What a kernel is told of one block.

    Attributes:
        rows: int64 (tiles, 5): source address of block 0, source stride, destination address of
            block 0, destination stride, elements.
        word: bytes of an element: 8 where everything is a multiple of 16, else 4 or 1.
        large: whether tiles are large ones.
    """

    rows: Int64Array
    word: int
    large: bool

    @property
    def words(self) -> Int64Array:
        """The rows, one after the other."""
        return self.rows.reshape(-1)

    @classmethod
    def of(
        cls,
        src: tuple[Int64Array, Int64Array],
        dst: tuple[Int64Array, Int64Array],
        nbytes: Int64Array,
    ) -> Tiles:
        """Cut runs into tiles.

        Args:
            src: addresses for block 0 and strides.
            dst: addresses for block 0 and strides.
            nbytes: bytes of each run.
        """
        mixed = np.bitwise_or.reduce(np.concatenate((*src, *dst, nbytes, [0])))
        word = 8 if mixed % 16 == 0 else 4 if mixed % 4 == 0 else 1
        large = word == 8 and len(nbytes) > 0 and int(nbytes.mean()) >= LARGE // 2
        tile = LARGE if large else SMALL
        parts = -(-nbytes // tile)
        run = np.repeat(np.arange(len(nbytes)), parts)
        offset = (np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)) * tile
        length = np.minimum(nbytes[run] - offset, tile) // word
        columns = (src[0][run] + offset, src[1][run], dst[0][run] + offset, dst[1][run], length)
        return cls(np.stack(columns, axis=1).astype(np.int64), word, large)


def _ids(handle: Handle) -> Int64Array:
    return np.asarray(handle.ids, dtype=np.int64)


class Pipeline:
    """Work between pages and slots that a CUDA device cuts into chunks and overlaps.

    Also what the callable of a `Launch` may be, to have its kernels write to, or read from, staging
    areas that the device moves by DMA meanwhile.

    Attributes:
        outward: from pages to slots.
        blocks: how many.
        step: bytes of staging for a block.
        nbytes: bytes that cross the link.
        fixed_words: int64 words of `upload` that do not grow with the blocks.
        block_words: int64 words of `upload` for each block.
        page_fragment: mean bytes of a run on the pages' side.
        direct: whether the kernels can also do without staging.
    """

    outward: bool
    blocks: int
    step: int
    nbytes: int
    fixed_words: int
    block_words: int
    page_fragment: float
    direct: bool = True

    def __call__(self, *_: object) -> None:
        """Refuse: a device that does not know pipelines cannot run this."""
        raise BadWork(f"{self!r} runs on a CudaDevice only")

    def programs(self) -> tuple[Any, ...]:
        """The kernels that `launch` uses, so that they can be loaded beforehand."""
        raise NotImplementedError

    @property
    def host_fragment(self) -> float:
        """Mean bytes of a piece."""
        raise NotImplementedError

    def words(self, count: int) -> int:
        """Words that `fill` writes for some blocks."""
        return self.fixed_words + self.block_words * count

    def fill(self, out: Int64Array, first: int, count: int, *, staged: bool) -> None:
        """Write what the kernels read for blocks `first` to ``first + count``."""
        raise NotImplementedError

    def upload(self, first: int, count: int, *, staged: bool) -> Int64Array:
        """The same as an array of its own."""
        out = np.zeros(self.words(count), dtype=np.int64)
        self.fill(out, first, count, staged=staged)
        return out

    def launch(
        self, run: LaunchKernel, tables: Uploaded, staging: int, first: int, count: int
    ) -> None:
        """Start the kernels for some blocks.

        Args:
            run: called as ``run(program, items, *arguments)``.
            tables: where the device has what `upload` gave.
            staging: device address of the staging area; 0 to work on the slots themselves.
            first: first block.
            count: number of blocks.
        """
        raise NotImplementedError

    def pieces(self, staging: int, first: int, count: int) -> Pieces:
        """What the DMA engine moves for some blocks, one side being the staging area."""
        raise NotImplementedError

    def moves(self, staging: int, first: int, count: int, *, pitched: bool) -> Moves:
        """The same in fewer numbers where there are fewer; `pitched` allows strided copies."""
        del pitched
        return Moves(many=self.pieces(staging, first, count))


@final
class CopyTables:
    """What all copies from one pool to another have in common.

    Args:
        src: pool of the sources.
        dst: pool of the destinations.
        runs: byte runs of a block.
    """

    def __init__(self, src: Pool, dst: Pool, runs: Runs) -> None:
        self.runs = runs
        self.outward = dst.kind == "host"
        self._src_at, self._src_step = sides(src, runs.src_plane, runs.src_offset)
        self._dst_at, self._dst_step = sides(dst, runs.dst_plane, runs.dst_offset)
        self.tiles = Tiles.of(
            (self._src_at, self._src_step), (self._dst_at, self._dst_step), runs.nbytes
        )
        self.has_host = "host" in (src.kind, dst.kind)
        self.step = 0
        rows = len(self.tiles.rows)
        if self.has_host:
            self._stage(dst if self.outward else src)
            rows = max(rows, len(self.staged.rows))
            self.step = self.image.step
        self.fixed_words = rows * COLUMNS
        self.per_block = len(runs.nbytes)
        self.page_fragment = runs.total / max(self.per_block, 1)

    def _stage(self, host: Pool) -> None:
        """Place the runs in a staging area as they lie in the slot, less what lies before."""
        runs = self.runs
        offset = runs.dst_offset if self.outward else runs.src_offset
        self.image = image = SlotImage(host, offset, runs.nbytes)
        steps = np.full_like(image.place, image.step)
        if self.outward:
            src, dst = (self._src_at, self._src_step), (image.place, steps)
        else:
            src, dst = (image.place, steps), (self._dst_at, self._dst_step)
        self.staged = Tiles.of(src, dst, runs.nbytes)

    def fragments(self, src: Int64Array, dst: Int64Array) -> Pieces:
        """Every run of some blocks, by their ids, joined where both sides go on.

        The runs of one block are joined already, so only its last and the next one's first can be.
        """
        from_ = self._src_at + src[:, None] * self._src_step
        to = self._dst_at + dst[:, None] * self._dst_step
        nbytes = np.broadcast_to(self.runs.nbytes, from_.shape)
        pieces = Pieces(to.ravel(), from_.ravel(), nbytes.ravel())
        last = self.runs.nbytes[-1:]
        goes_on = (to[:-1, -1:] + last == to[1:, :1]) & (from_[:-1, -1:] + last == from_[1:, :1])
        if not goes_on.any():
            return pieces
        host = pieces.dst if self.outward else pieces.src
        return merge(pieces, self.image.registration(host) if self.has_host else None)


def sides(pool: Pool, plane: Int64Array, offset: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Addresses in block 0 and strides of runs."""
    planes = pool.storage.planes
    at = np.array([p.address for p in planes], dtype=np.int64)
    stride = np.array([p.stride for p in planes], dtype=np.int64)
    return at[plane] + offset, stride[plane]


@final
class CopyPipeline(Pipeline):
    """A `Copy` as a pipeline; also, with `staged` never set, a copy inside one GPU.

    Args:
        tables: what is the same for every copy between the two pools.
        src: sources.
        dst: destinations.
        programs: kernels by (word, large).
    """

    def __init__(
        self, tables: CopyTables, src: Handle, dst: Handle, programs: dict[tuple[int, bool], Any]
    ) -> None:
        self._tables = tables
        self._programs = programs
        self._src, self._dst = src, dst
        self.src_ids, self.dst_ids = _ids(src), _ids(dst)
        self.outward = tables.outward
        self.blocks = len(src)
        self.nbytes = tables.runs.total * self.blocks
        self.block_words = 2
        # Narrow words over the link are slower than anything else.
        self.direct = tables.tiles.word == 8
        self.runs = tables.per_block
        self.page_fragment = tables.page_fragment
        self.step = tables.step
        self.fixed_words = tables.fixed_words
        self._start: int | None = None
        self._host_ids = self.dst_ids if self.outward else self.src_ids
        if tables.has_host:
            self._start = consecutive(self._host_ids)

    @property
    def host_fragment(self) -> float:
        """See `Pipeline.host_fragment`."""
        if not self._tables.has_host:
            return self.page_fragment
        if self._start is not None and self._tables.image.solid:
            return float(self.nbytes)
        return self._tables.image.fragment(self._host_ids)

    def single_pieces(self) -> list[tuple[int, int, int]]:
        """Destination, source and bytes of every run, in plain numbers: for few of them."""
        from_, to = self._src.pool.storage.planes, self._dst.pool.storage.planes
        return [
            (
                to[there].address + dst * to[there].stride + end,
                from_[here].address + src * from_[here].stride + start,
                nbytes,
            )
            for src, dst in zip(map(int, self._src.ids), map(int, self._dst.ids), strict=True)
            for here, start, there, end, nbytes in self._tables.runs.rows
        ]

    def _tiles(self, *, staged: bool) -> Tiles:
        return self._tables.staged if staged else self._tables.tiles

    def programs(self) -> tuple[Any, ...]:
        """See `Pipeline.programs`."""
        chosen = [self._tables.tiles]
        if self._tables.has_host:
            chosen.append(self._tables.staged)
        return tuple({(t.word, t.large): self._programs[t.word, t.large] for t in chosen}.values())

    def fill(self, out: Int64Array, first: int, count: int, *, staged: bool) -> None:
        """Rows of tiles, padded to `fixed_words`, then source ids, then destination ids."""
        rows = self._tiles(staged=staged).words
        out[: len(rows)] = rows
        at = self.fixed_words
        out[at : at + count] = self.src_ids[first : first + count]
        out[at + count : at + 2 * count] = self.dst_ids[first : first + count]

    def launch(
        self, run: LaunchKernel, tables: Uploaded, staging: int, first: int, count: int
    ) -> None:
        """See `Pipeline.launch`."""
        tiles = self._tiles(staged=staging != 0)
        src_ids = tables.address + (self.fixed_words + first - tables.first) * 8
        dst_ids = src_ids + tables.blocks * 8
        src_at = dst_at = 0
        if staging and self.outward:
            dst_ids, dst_at = 0, staging
        elif staging:
            src_ids, src_at = 0, staging
        program = self._programs[tiles.word, tiles.large]
        rows = len(tiles.rows)
        run(program, rows * count, tables.address, rows, count, src_ids, dst_ids, src_at, dst_at)

    def pieces(self, staging: int, first: int, count: int) -> Pieces:
        """See `Pipeline.pieces`."""
        part = self._host_ids[first : first + count]
        return self._tables.image.pieces(part, staging, self.step, outward=self.outward)

    def moves(self, staging: int, first: int, count: int, *, pitched: bool) -> Moves:
        """See `Pipeline.moves`."""
        part = self._host_ids[first : first + count]
        start = None if self._start is None else self._start + first
        image = self._tables.image
        return image.moves(part, start, staging, outward=self.outward, pitched=pitched)

    def fragments(self, first: int, count: int) -> Pieces:
        """Pieces from pages to slots without staging."""
        part = slice(first, first + count)
        return self._tables.fragments(self.src_ids[part], self.dst_ids[part])
