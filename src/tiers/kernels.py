"""Keys exact, values as FP8 codes, on the way between pages on a GPU and page-locked slots.

A `PageCast` gives a `Launch` whose kernels a CUDA device runs in chunks, through staging areas that
its DMA engine moves meanwhile. Keys are moved byte for byte; values are read once and cross the
link as codes. The bytes are those of the codec on the CPU (`tiers.fp8`).

Importing this needs Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from tiers._cast_shape import ROW, Shape
from tiers._layout import KEY, VALUE, VALUE_SCALE, PageLayout, ScaleScope
from transfer._errors import LayoutMismatch, WrongPool
from transfer._extent import copy_runs
from transfer._pieces import Moves, SlotImage, consecutive, joined
from transfer._staging import COLUMNS, Pipeline, Tiles, Uploaded, sides
from transfer._work import HandleLike, Launch, handle_of
from transfer.kernels import MOVERS

if TYPE_CHECKING:
    import numpy.typing as npt

    from transfer._extent import Int64Array
    from transfer._handle import Handle
    from transfer._memory import Pool
    from transfer._pieces import Pieces
    from transfer._staging import LaunchKernel

_SCOPES: Final = {
    ScaleScope.TENSOR: 0,
    ScaleScope.HEAD: 1,
    ScaleScope.PAGE_HEAD: 1,
    ScaleScope.TOKEN_HEAD: 2,
}
"""A block is one page here, so a scale for each head is one for each page and head."""


@final
class PageCast:
    """The way between one pool of pages and the slots for its keys and its values.

    Make one for each three pools and keep it: it computes every table once.

    Args:
        pages: pages with ``key`` and full-width ``value`` tensors of every layer.
        keys: slots with ``key`` tensors.
        values: slots with ``value`` codes and, where scales are stored, ``value_scale``; may be
            the same pool.
        layout: the page as it is in the slots: e4m3fn values, and which values share a scale.
        scales: scales given, float32 of shape (layers,) or (layers, kv_heads); computed when None.

    Raises:
        LayoutMismatch: layouts that do not match, sizes that the kernels do not take.
    """

    def __init__(
        self,
        pages: Pool,
        keys: Pool,
        values: Pool,
        *,
        layout: PageLayout,
        scales: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.pools = (pages, keys, values)
        shape = Shape.of(layout, pages, values)
        given = _given(scales, layout)
        if given is None and not shape.stored:
            raise LayoutMismatch(f"{layout} stores no scales: expected some to be given")
        self._tables = tuple(
            CastTables(self.pools, layout, shape, given, outward=outward)
            for outward in (True, False)
        )

    def pack(self, pages: HandleLike, keys: HandleLike, values: HandleLike) -> Launch:
        """Copy keys from pages to slots and cast values to codes in slots, as one operation.

        Args:
            pages: pages to read.
            keys: as many slots.
            values: as many slots; the very same handle as `keys` where one slot has both.
        """
        page, key, value = handle_of(pages), handle_of(keys), handle_of(values)
        pipe = self._pipeline((page, key, value), outward=True)
        writes = (key,) if key is value else (key, value)
        return Launch(pipe, reads=(page,), writes=writes, on=page.pool.kind, nbytes=pipe.nbytes)

    def unpack(self, keys: HandleLike, values: HandleLike, pages: HandleLike) -> Launch:
        """Copy keys from slots to pages and turn codes into values in pages, as one operation.

        Args:
            keys: slots to read.
            values: as many slots; the very same handle as `keys` where one slot has both.
            pages: as many pages.
        """
        page, key, value = handle_of(pages), handle_of(keys), handle_of(values)
        pipe = self._pipeline((page, key, value), outward=False)
        reads = (key,) if key is value else (key, value)
        return Launch(pipe, reads=reads, writes=(page,), on=page.pool.kind, nbytes=pipe.nbytes)

    def _pipeline(self, handles: tuple[Handle, Handle, Handle], *, outward: bool) -> CastPipeline:
        pools = tuple(handle.pool for handle in handles)
        if any(found is not pool for found, pool in zip(pools, self.pools, strict=True)):
            raise WrongPool(f"found blocks of {pools}, expected those of {self.pools}")
        counts = [len(handle) for handle in handles]
        if len(set(counts)) != 1:
            raise LayoutMismatch(f"found {counts} pages, keys and values, expected as many of each")
        ids = [np.asarray(handle.ids, dtype=np.int64) for handle in handles]
        return CastPipeline(self._tables[0 if outward else 1], np.stack(ids))


@final
class CastTables:
    """What every cast in one direction has in common."""

    def __init__(
        self,
        pools: tuple[Pool, Pool, Pool],
        layout: PageLayout,
        shape: Shape,
        given: npt.NDArray[np.float32] | None,
        *,
        outward: bool,
    ) -> None:
        pages, keys, values = pools
        self.outward = outward
        self.layers = layout.layers
        self.shape = shape
        self.given = given
        # A given scale belongs to a head: that of its layer, if there is but one.
        scope = 1 if given is not None else _SCOPES[layout.scope or ScaleScope.TENSOR]
        self.program = shape.program(outward=outward, scope=scope, computed=given is None)
        heads = int(self.program.constants["head_tile"])
        self.parts = 1 if scope == 0 else -(-layout.kv_heads // heads)
        source, target = (pages, keys) if outward else (keys, pages)
        runs = copy_runs(source.layout, target.layout, (KEY,))
        self.key_image = SlotImage(
            keys, runs.dst_offset if outward else runs.src_offset, runs.nbytes
        )
        places, nbytes = _places(values, layout, stored=shape.stored)
        self.value_image = SlotImage(values, places, nbytes)
        self.step = self.key_image.step + self.value_image.step
        self.nbytes = runs.total + int(nbytes.sum())
        self.page_fragment = float(runs.nbytes.mean())

        src = sides(source, runs.src_plane, runs.src_offset)
        dst = sides(target, runs.dst_plane, runs.dst_offset)
        area = (self.key_image.place, np.full_like(runs.nbytes, self.key_image.step))
        staged = (src, area) if outward else (area, dst)
        self.keys = (Tiles.of(src, dst, runs.nbytes), Tiles.of(*staged, runs.nbytes))
        where = values.storage.planes[0]
        self.values = (
            self._value_rows(pages, where.address + places, where.stride),
            self._value_rows(pages, self.value_image.place, self.value_image.step),
        )
        self.key_words = max(len(tiles.rows) for tiles in self.keys) * COLUMNS
        self.given_at = self.key_words + self.layers * ROW
        self.fixed_words = self.given_at + (0 if given is None else -(-given.size // 2))

    def _value_rows(self, pages: Pool, slot: Int64Array, slot_step: int) -> Int64Array:
        """(layers, 6): page and its stride, codes and their stride, scales and their stride."""
        extents = [pages.layout.extent(VALUE, layer) for layer in range(self.layers)]
        plane = np.array([extent.plane for extent in extents])
        offset = np.array([extent.offset for extent in extents], dtype=np.int64)
        at, step = sides(pages, plane, offset)
        codes = slot[: self.layers]
        scales = slot[self.layers :] if self.shape.stored else codes
        columns = (at, step, codes, np.int64(slot_step), scales, np.int64(slot_step))
        return np.stack(np.broadcast_arrays(*columns), axis=1)


@final
class CastPipeline(Pipeline):
    """Some pages of a `PageCast`, on their way.

    Args:
        tables: what is the same for all.
        ids: int64 (3, blocks): pages, slots of keys, slots of values.
    """

    def __init__(self, tables: CastTables, ids: Int64Array) -> None:
        self._tables = tables
        self._ids = ids
        self.outward = tables.outward
        self.blocks = ids.shape[1]
        self.step = tables.step
        self.nbytes = tables.nbytes * self.blocks
        self.fixed_words = tables.fixed_words
        self.block_words = 3
        self.page_fragment = tables.page_fragment
        self._starts = (consecutive(ids[1]), consecutive(ids[2]))

    @property
    def host_fragment(self) -> float:
        """See `Pipeline.host_fragment`: of the first few blocks."""
        sample = self.pieces(0, 0, min(self.blocks, 8)).nbytes
        return float(sample.mean()) if len(sample) else 0.0

    def programs(self) -> tuple[Any, ...]:
        """See `Pipeline.programs`."""
        movers = sorted({(tiles.word, tiles.large) for tiles in self._tables.keys})
        return (*(MOVERS[key] for key in movers), self._tables.program)

    def fill(self, out: Int64Array, first: int, count: int, *, staged: bool) -> None:
        """Rows of keys, rows of values, scales that are given; ids of pages, keys and values."""
        tables = self._tables
        keys = tables.keys[staged].words
        out[: len(keys)] = keys
        out[tables.key_words : tables.given_at] = tables.values[staged].ravel()
        if tables.given is not None:
            given = out[tables.given_at : self.fixed_words].view(np.float32)
            given[: tables.given.size] = tables.given.ravel()
        for number, ids in enumerate(self._ids):
            at = self.fixed_words + number * count
            out[at : at + count] = ids[first : first + count]

    def launch(
        self, run: LaunchKernel, tables: Uploaded, staging: int, first: int, count: int
    ) -> None:
        """See `Pipeline.launch`: one kernel for the keys, one for the values."""
        fixed = self._tables
        pages = tables.address + (self.fixed_words + first - tables.first) * 8
        keys, values = pages + tables.blocks * 8, pages + 2 * tables.blocks * 8
        if staging:
            keys = values = 0
        tiles = fixed.keys[staging != 0]
        rows = len(tiles.rows)
        ends = (pages, keys, 0, staging) if self.outward else (keys, pages, staging, 0)
        mover = MOVERS[tiles.word, tiles.large]
        run(mover, rows * count, tables.address, rows, count, *ends)
        given = per_layer = per_head = 0
        if fixed.given is not None:
            given = tables.address + fixed.given_at * 8
            per_layer = fixed.given.shape[1]
            per_head = 0 if per_layer == 1 else 1
        run(
            fixed.program,
            count * fixed.layers * fixed.parts,
            tables.address + fixed.key_words * 8,
            fixed.layers,
            count,
            pages,
            values,
            # In an area the values of all blocks lie behind the keys of all of them.
            staging + count * fixed.key_image.step if staging else 0,
            given,
            per_layer,
            per_head,
            *fixed.shape.page,
            *fixed.shape.slot,
            *fixed.shape.scale,
        )

    def pieces(self, staging: int, first: int, count: int) -> Pieces:
        """See `Pipeline.pieces`."""
        fixed = self._tables
        part = self._ids[:, first : first + count]
        step = fixed.key_image.step
        keys = fixed.key_image.pieces(part[1], staging, step, outward=self.outward)
        behind = staging + count * step
        step = fixed.value_image.step
        return joined(keys, fixed.value_image.pieces(part[2], behind, step, outward=self.outward))

    def moves(self, staging: int, first: int, count: int, *, pitched: bool) -> Moves:
        """See `Pipeline.moves`: the keys of all blocks, then the values of all blocks."""
        fixed = self._tables
        found = []
        for ids, start, image, at in zip(
            self._ids[1:],
            self._starts,
            (fixed.key_image, fixed.value_image),
            (staging, staging + count * fixed.key_image.step),
            strict=True,
        ):
            here = None if start is None else start + first
            part = ids[first : first + count]
            found.append(image.moves(part, here, at, outward=self.outward, pitched=pitched))
        keys, values = found
        many = values.many if keys.many is None else keys.many
        if keys.many is not None and values.many is not None:
            many = joined(keys.many, values.many)
        return Moves(keys.few + values.few, keys.rows + values.rows, many)


def _places(slots: Pool, layout: PageLayout, *, stored: bool) -> tuple[Int64Array, Int64Array]:
    """Offset and bytes of the codes of every layer, then of the scales of every layer."""
    names = (VALUE, VALUE_SCALE) if stored else (VALUE,)
    parts = [slots.layout.extent(name, layer) for name in names for layer in range(layout.layers)]
    offset = np.array([part.offset for part in parts], dtype=np.int64)
    return offset, np.array([part.nbytes for part in parts], dtype=np.int64)


def _given(
    scales: npt.NDArray[np.float32] | None, layout: PageLayout
) -> npt.NDArray[np.float32] | None:
    """Scales as (layers, 1 or heads), checked."""
    if scales is None:
        return None
    shapes: tuple[tuple[int, ...], ...] = ((layout.layers,), (layout.layers, 1))
    if layout.scope in {None, ScaleScope.HEAD, ScaleScope.PAGE_HEAD}:
        shapes = (*shapes, (layout.layers, layout.kv_heads))
    if layout.scope is ScaleScope.TOKEN_HEAD:
        shapes = ()
    if scales.shape not in shapes or not bool((np.isfinite(scales) & (scales > 0)).all()):
        raise LayoutMismatch(
            f"scales: found shape {scales.shape}, expected finite positive ones of a shape of "
            f"{shapes} for {layout.scope} scales"
        )
    return scales.reshape(layout.layers, -1).astype(np.float32)
