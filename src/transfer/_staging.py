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


class Pieces(NamedTuple):
    """Byte ranges for the DMA engine; int64 arrays of equal length."""

    dst: Int64Array
    src: Int64Array
    nbytes: Int64Array


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


def merge(pieces: Pieces, cut: Int64Array | None = None) -> Pieces:
    """Join pieces that continue each other on both sides.

    Args:
        pieces: in order.
        cut: a number for each; pieces with different ones are not joined.
    """
    dst, src, nbytes = pieces
    if len(nbytes) < 2:
        return pieces
    joined = (dst[:-1] + nbytes[:-1] == dst[1:]) & (src[:-1] + nbytes[:-1] == src[1:])
    if cut is not None:
        joined &= cut[:-1] == cut[1:]
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Pieces(dst[first], src[first], np.add.reduceat(nbytes, first))


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
        host_fragment: mean bytes of a piece.
        page_fragment: mean bytes of a run on the pages' side.
        direct: whether the kernels can also do without staging.
    """

    outward: bool
    blocks: int
    step: int
    nbytes: int
    fixed_words: int
    block_words: int
    host_fragment: float
    page_fragment: float
    direct: bool = True

    def __call__(self, *_: object) -> None:
        """Refuse: a device that does not know pipelines cannot run this."""
        raise BadWork(f"{self!r} runs on a CudaDevice only")

    def programs(self) -> tuple[Any, ...]:
        """The kernels that `launch` uses, so that they can be loaded beforehand."""
        raise NotImplementedError

    def upload(self, first: int, count: int, *, staged: bool) -> Int64Array:
        """What the kernels read for blocks `first` to ``first + count``."""
        raise NotImplementedError

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


@final
class SlotImage:
    """How some byte runs of a slot lie in a staging area: as in the slot, less what lies before.

    Args:
        host: pool of the slots.
        offset: where each run starts in its slot.
        nbytes: length of each run.

    Attributes:
        place: where each run starts in the staging area of its block.
        step: bytes of a block in the staging area.
    """

    def __init__(self, host: Pool, offset: Int64Array, nbytes: Int64Array) -> None:
        low = int(offset.min()) // 16 * 16 if len(offset) else 0
        end = int((offset + nbytes).max(initial=low))
        self.step = max(16, -(-(end - low) // 16) * 16)
        self.place: Int64Array = offset - low
        order = np.argsort(offset, kind="stable")
        segments = merge(Pieces(offset[order], offset[order], nbytes[order]))
        self._at = segments.dst
        self._place = segments.dst - low
        self._nbytes = segments.nbytes
        plane = host.storage.planes[0]
        self._host_at, self._host_step = plane.address, plane.stride
        self._cut = int(getattr(host.storage, "registration_bytes", 0))
        self.segments = len(segments.nbytes)
        self._bytes = int(nbytes.sum())
        # Whether slots that follow one another are one run of bytes, in staging too.
        self._solid = self.segments == 1 and self._bytes == self._host_step == self.step

    def fragment(self, ids: Int64Array) -> float:
        """Mean bytes of a piece of these slots, registrations left aside."""
        count = len(ids)
        pieces = self.segments * count
        if self._solid and count > 1:
            pieces -= int(np.count_nonzero(ids[1:] - ids[:-1] == 1))
        return self._bytes * count / max(pieces, 1)

    def pieces(self, ids: Int64Array, staging: int, step: int, *, outward: bool) -> Pieces:
        """Slots of some ids against a staging area with a block every `step` bytes."""
        count = len(ids)
        if self._solid and step == self.step and count and int(ids[-1]) - int(ids[0]) == count - 1:
            start = int(ids[0]) * self._host_step
            whole = count * step
            same = not self._cut or start // self._cut == (start + whole - 1) // self._cut
            if same and (count < 3 or bool((ids[1:] > ids[:-1]).all())):
                ends = np.array([[self._host_at + start], [staging], [whole]], dtype=np.int64)
                return Pieces(ends[0], ends[1], ends[2]) if outward else Pieces(ends[1], *ends[::2])
        host = (self._host_at + ids[:, None] * self._host_step + self._at).ravel()
        local = np.arange(len(ids), dtype=np.int64)[:, None] * step
        area = (staging + local + self._place).ravel()
        nbytes = np.broadcast_to(self._nbytes, (len(ids), len(self._nbytes))).ravel()
        pieces = Pieces(host, area, nbytes) if outward else Pieces(area, host, nbytes)
        return merge(pieces, self.registration(host))

    def registration(self, host: Int64Array) -> Int64Array | None:
        """Which registration each host address is in: one DMA may not cross into the next."""
        return (host - self._host_at) // self._cut if self._cut else None


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
        self.rows = len(self.tiles.rows)
        if self.has_host:
            self._stage(dst if self.outward else src)
            self.rows = max(self.rows, len(self.staged.rows))

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
        """Every run of some blocks, by their ids, joined where both sides go on."""
        shape = (len(src), len(self.runs.nbytes))
        from_ = self._src_at + src[:, None] * self._src_step
        to = self._dst_at + dst[:, None] * self._dst_step
        nbytes = np.broadcast_to(self.runs.nbytes, shape)
        host = (to if self.outward else from_).ravel()
        cut = self.image.registration(host) if self.has_host else None
        return merge(Pieces(to.ravel(), from_.ravel(), nbytes.ravel()), cut)


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
        self.outward = tables.outward
        self.blocks = len(src)
        self.nbytes = tables.runs.total * self.blocks
        self.block_words = 2
        # Narrow words over the link are slower than anything else.
        self.direct = tables.tiles.word == 8
        self.runs = len(tables.runs.nbytes)
        self.page_fragment = tables.runs.total / max(self.runs, 1)
        self.host_fragment = self.page_fragment
        self.step = 0
        self.fixed_words = tables.rows * COLUMNS
        if tables.has_host:
            self.step = tables.image.step
            self.host_fragment = tables.image.fragment(
                self.dst_ids if self.outward else self.src_ids
            )

    @property
    def src_ids(self) -> Int64Array:
        """Block ids of the sources."""
        return _ids(self._src)

    @property
    def dst_ids(self) -> Int64Array:
        """Block ids of the destinations."""
        return _ids(self._dst)

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

    def upload(self, first: int, count: int, *, staged: bool) -> Int64Array:
        """Rows of tiles, padded to `fixed_words`, then source ids, then destination ids."""
        out = np.empty(self.fixed_words + 2 * count, dtype=np.int64)
        rows = self._tiles(staged=staged).rows.ravel()
        out[: len(rows)] = rows
        ids = out[self.fixed_words :]
        ids[:count] = self.src_ids[first : first + count]
        ids[count:] = self.dst_ids[first : first + count]
        return out

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
        ids = self.dst_ids if self.outward else self.src_ids
        part = ids[first : first + count]
        return self._tables.image.pieces(part, staging, self.step, outward=self.outward)

    def fragments(self, first: int, count: int) -> Pieces:
        """Pieces from pages to slots without staging."""
        part = slice(first, first + count)
        return self._tables.fragments(self.src_ids[part], self.dst_ids[part])
