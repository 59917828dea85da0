"""PagedKVCache: 16-bit key pages and FP8 value pages of all layers, as one pool of blocks.

A page is one block: its K and V of every layer, and its scales where each token has its own. The
pool hands out leases, the store copies blocks by their handles: what it reads and writes are these
very pages, with their real strides, and no byte is converted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import torch

from attention._errors import CacheError, MissingPart, Unsupported
from attention._scales import ScaleOrigin, ValueScales, quantise, scale_of
from attention._slots import Slots
from attention._view import KEY_DTYPES, VALUE_DTYPES, LayerView
from tiers._layout import KEY, VALUE, VALUE_SCALE, PageLayout, PageOrder, ScaleScope
from transfer._memory import Pool
from transfer._storage import TensorStorage, own_layout, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention._pages import PageTable
    from tiers._layout import StaticScales
    from transfer._extent import BlockLayout
    from transfer._handle import Blocks, Lease


APPENDED: Final = (*KEY_DTYPES, torch.float32)
"""Types of the values that are quantised."""


@final
class PagedKVCache:
    """Pages of keys and FP8 values.

    Args:
        layers: attention layers.
        pages: pages of the pool; one page spans all layers.
        page_size: tokens of a page.
        kv_heads: key and value heads.
        head_dim: elements of a head, a multiple of 16.
        key: bfloat16 or float16; keys are stored exactly.
        value: float8_e4m3fn or float8_e5m2.
        order: order of the axes of the page tensors.
        scales: how values are scaled; 1.0 everywhere when None.
        device: where the pages are.

    Attributes:
        layers, order, scales, page_size, kv_heads, head_dim: as given.
        pool: the pages as blocks, to lease, to copy and to put into a store. Its tensors are named
            ``key`` and ``value`` (and ``value_scale``, where every token has scales of its own), one
            of each per layer, with the axes of a `tiers.PageLayout`.

    Raises:
        CacheError: a dtype or size that no kernel reads.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        key: torch.dtype = torch.bfloat16,
        value: torch.dtype = torch.float8_e4m3fn,
        order: PageOrder = PageOrder.NHD,
        scales: ValueScales | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if key not in KEY_DTYPES or value not in VALUE_DTYPES:
            raise CacheError(f"keys {key} and values {value}: expected 16-bit keys, FP8 values")
        if head_dim % 16 or min(layers, pages, page_size, kv_heads, head_dim) < 1:
            raise CacheError(
                f"{layers} layers, {pages} pages of {page_size}, {kv_heads} heads of {head_dim}: "
                f"all are at least 1, head_dim is a multiple of 16"
            )
        inner = (page_size, kv_heads) if order is PageOrder.NHD else (kv_heads, page_size)
        shape = (layers, pages, *inner, head_dim)
        keys = torch.zeros(shape, dtype=key, device=device)
        codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(value)
        self._bind(keys.unbind(), codes.unbind(), order, scales or ValueScales.unit(layers))
        tensors = self._tensors()
        plan = own_layout(tensors)
        self.pool = Pool(plan, pages, TensorStorage(tensors, plan), name="kv cache")

    @classmethod
    def over(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        order: PageOrder,
        scales: ValueScales | None = None,
    ) -> PagedKVCache:
        """A cache over pages that a host program owns; its allocator hands them out.

        Args:
            keys: page tensors of each layer, any strides whose rows are in one piece.
            values: likewise, FP8 codes.
            order: order of their axes; there is no default, since a shape does not tell.
            scales: how values are scaled; 1.0 everywhere when None.

        Raises:
            CacheError: tensors that do not fit together.
            LayoutMismatch, SpanError, WrongDevice: memory that is not what its strides say.
        """
        if not keys or len(keys) != len(values):
            raise CacheError(f"{len(keys)} layers of keys, {len(values)} of values")
        cache = cls.__new__(cls)
        cache._bind(tuple(keys), tuple(values), order, scales or ValueScales.unit(len(keys)))
        tensors = cache._tensors()
        cache.pool = Pool.over(tensors, own_layout(tensors), name="foreign kv cache")
        return cache

    @classmethod
    def of(
        cls,
        layout: PageLayout,
        *,
        pages: int,
        scales: ValueScales | None = None,
        device: torch.device | str = "cpu",
    ) -> PagedKVCache:
        """A cache of pages that a layout describes.

        Raises:
            Unsupported: a latent page (MLA), which has no values of its own, or values of another
                width than the keys: attention over them is another formula, not guessed here.
            CacheError: keys or values of a type that no kernel reads.
        """
        if layout.value is None:
            raise Unsupported(
                "a latent (MLA) page has no values of its own: K16/V8 attention does not read it"
            )
        if layout.value_width != layout.head_dim:
            raise Unsupported(
                f"values of width {layout.value_width}, keys of {layout.head_dim}: expected equal"
            )
        by_token = layout.scope is ScaleScope.TOKEN_HEAD
        return cls(
            layers=layout.layers,
            pages=pages,
            page_size=layout.page_size,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            key=torch_dtype(layout.key),
            value=torch_dtype(layout.value),
            order=layout.order,
            scales=scales or (ValueScales.per_token() if by_token else None),
            device=device,
        )

    def _bind(
        self,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        order: PageOrder,
        scales: ValueScales,
    ) -> None:
        """Check the page tensors and remember them."""
        self.layers = len(keys)
        self.order = order
        self.scales = scales
        steps = self._make_scales(keys[0])
        self._views = tuple(
            LayerView(key, value, order, step, scales.scope)
            for key, value, step in zip(keys, values, steps, strict=True)
        )
        first = self._views[0]
        kinds = [(tuple(v.key.shape), v.key.dtype, v.value.dtype) for v in self._views]
        if len(set(kinds)) > 1:
            raise CacheError(f"pages differ between layers: {kinds}")
        self.page_size = first.page_size
        self.kv_heads = first.kv_heads
        self.head_dim = first.head_dim
        self._saturated = torch.zeros(self.layers, dtype=torch.int64, device=first.key.device)

    def _make_scales(self, key: Tensor) -> tuple[Tensor, ...]:
        """Scales of each layer as the kernels read them, float32."""
        if self.scales.scope is ScaleScope.TOKEN_HEAD:
            shape = (self.layers, *key.shape[:3])
            return torch.ones(shape, dtype=torch.float32, device=key.device).unbind()
        assert self.scales.values is not None  # noqa: S101 - every other scope has them
        rows = self.scales.values
        if rows.shape[0] != self.layers:
            raise CacheError(f"value scales of {rows.shape[0]} layers, the cache has {self.layers}")
        return rows.to(key.device).unbind()

    def _tensors(self) -> dict[tuple[str, int | None], Tensor]:
        """Every layer's page tensors, in their own order, block axis first."""
        out: dict[tuple[str, int | None], Tensor] = {}
        for layer, view in enumerate(self._views):
            out[KEY, layer] = view.key
            out[VALUE, layer] = view.value
            if self.scales.scope is ScaleScope.TOKEN_HEAD:
                out[VALUE_SCALE, layer] = view.scale
        return out

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._views[0].key.device

    @property
    def key_dtype(self) -> torch.dtype:
        """Dtype of the keys."""
        return self._views[0].key.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """Dtype of the value codes."""
        return self._views[0].value.dtype

    @property
    def block_layout(self) -> BlockLayout:
        """One page as the transfer engine sees it."""
        return self.pool.layout

    @property
    def page_layout(self) -> PageLayout:
        """One page as the store and its formats see it.

        Fixed scales are not part of a page: they are part of its provenance.
        """
        return PageLayout(
            layers=self.layers,
            page_size=self.page_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            order=self.order,
            key=str(self.key_dtype).removeprefix("torch."),
            value=str(self.value_dtype).removeprefix("torch."),
            scope=ScaleScope.TOKEN_HEAD if self.scales.scope is ScaleScope.TOKEN_HEAD else None,
        )

    @property
    def static_scales(self) -> StaticScales | None:
        """Fixed scales as a store takes them, None where pages carry their own.

        They are for ``KVStore(static_scales=…)``, their digest is for `Provenance`.
        """
        return self.scales.stored

    def layer(self, layer: int) -> LayerView:
        """What a kernel reads for one layer.

        Raises:
            CacheError: there is no such layer.
        """
        if not 0 <= layer < self.layers:
            raise CacheError(f"layer {layer} of {self.layers}")
        return self._views[layer]

    def lease(self, pages: int) -> Lease[Blocks]:
        """Take pages with defined contents: every slot zero, so that no former request shows.

        The zeroing is queued on the current stream; order a fetch into the pages after it.

        Raises:
            PoolExhausted: too few pages are free; says who has them.
        """
        lease = self.pool.lease(pages)
        self.clear(lease.handle)
        return lease

    def clear(self, blocks: Blocks) -> None:
        """Zero all slots of some pages of this cache, leased ones, on the current stream."""
        if blocks.pool is not self.pool:
            raise CacheError(f"{blocks!r} is not of this cache's {self.pool.name}")
        self.pool.book.check(blocks)
        ids = torch.from_numpy(blocks.ids).to(self.device)
        for view in self._views:
            view.key.view(torch.int16).index_fill_(0, ids, 0)
            view.value.view(torch.uint8).index_fill_(0, ids, 0)
            if view.scope is ScaleScope.TOKEN_HEAD:
                view.scale.index_fill_(0, ids, 1.0)

    def pages(self, blocks: Blocks, *, private: bool = False) -> Blocks:
        """Pages as the store takes them: their handles, no copy, no conversion.

        Args:
            blocks: full pages, in the order of their tokens.
            private: the store keeps them with their producer's scales, or for this request alone.

        Raises:
            CacheError: blocks of another pool, or pages whose scales come from the request's
                first page, without `private`.
        """
        if blocks.pool is not self.pool:
            raise CacheError(f"{blocks!r} is not of this cache's {self.pool.name}")
        if not (self.scales.shareable or private):
            raise CacheError(
                "these pages are scaled by their request's first page: they are private to it, or "
                "stored with the producer's scales; say private=True"
            )
        return blocks

    def slots(self, table: PageTable, counts: Sequence[int]) -> Slots:
        """Where each request's last counts[i] tokens go; the same for all layers of a step.

        Raises:
            PageTableError: a table of another cache or of pages whose lease has ended, more new
                tokens than a request has, or a page that is written by one request and read by
                another.
        """
        table.check(self.pool, self.page_size, leased=True)
        return Slots.of(table, counts, self.device)

    def append(self, layer: int, key: Tensor, value: Tensor, slots: Slots) -> None:
        """Write new tokens' keys exactly and their values as codes, on the current stream.

        The caller leases the pages, or a plan holds them, until the stream gets there; a copy out
        of them is ordered by ``after=`` this stream.

        Args:
            layer: layer number.
            key: [tokens, kv_heads, head_dim] of the cache's key dtype.
            value: [tokens, kv_heads, head_dim], 16-bit or float32.
            slots: where, from `slots`.

        Raises:
            CacheError: another shape, dtype or device.
            MissingPart: the pages are on a GPU and Triton is not installed.
        """
        shape = (len(slots), self.kv_heads, self.head_dim)
        if tuple(key.shape) != shape or tuple(value.shape) != shape:
            raise CacheError(f"key {tuple(key.shape)}, value {tuple(value.shape)}: not {shape}")
        if key.dtype != self.key_dtype:
            raise CacheError(f"key is {key.dtype}, the cache holds {self.key_dtype}")
        if value.dtype not in APPENDED:
            raise CacheError(f"value is {value.dtype}, expected one of {APPENDED}")
        if not key.device == value.device == self.device:
            raise CacheError(f"key on {key.device}, value on {value.device}, not {self.device}")
        view = self.layer(layer)
        if not len(slots):
            return
        if self.scales.origin is ScaleOrigin.FIRST_PAGE:
            self._scale_first_pages(view, value, slots)
        if self.device.type == "cpu":
            self._append_torch(layer, view, key, value, slots)
        else:
            self._append_triton(layer, view, key, value, slots)

    def _append_torch(
        self, layer: int, view: LayerView, key: Tensor, value: Tensor, slots: Slots
    ) -> None:
        page, place = slots.where // self.page_size, slots.where % self.page_size
        if self.scales.origin is ScaleOrigin.PER_TOKEN:
            view.by_token(view.scale)[page, place] = scale_of(value, (2,), self.value_dtype)
        scale = (
            view.by_token(view.scale)[page, place][..., None]
            if view.scope is ScaleScope.TOKEN_HEAD
            else view.scale[None, :, None]
        )
        codes, lost = quantise(value, scale, self.value_dtype)
        view.by_token(view.key).view(torch.int16)[page, place] = key.view(torch.int16)
        view.by_token(view.value).view(torch.uint8)[page, place] = codes.view(torch.uint8)
        self._saturated[layer] += lost

    def _append_triton(
        self, layer: int, view: LayerView, key: Tensor, value: Tensor, slots: Slots
    ) -> None:
        try:
            from attention.kernels import append_pages  # noqa: PLC0415 - Triton is optional
        except ImportError as error:
            raise MissingPart(
                f"appending to pages on {self.device} needs Triton: {error}"
            ) from error
        dynamic = self.scales.origin is ScaleOrigin.PER_TOKEN
        append_pages(view, key, value, slots.where, self._saturated[layer], dynamic=dynamic)

    def _scale_first_pages(self, view: LayerView, value: Tensor, slots: Slots) -> None:
        """Write each new token's scale: that of its request's first page, measured when it comes."""
        scales = view.by_token(view.scale)
        row = 0
        for start, count, first in zip(slots.starts, slots.counts, slots.first, strict=True):
            if not count:
                continue
            where = slots.where[row : row + count]
            page, place = where // self.page_size, where % self.page_size
            if start == 0:
                fresh = value[row : row + min(count, self.page_size)]
                scale = scale_of(fresh, (0, 2), self.value_dtype)
            else:
                scale = scales[first // self.page_size, first % self.page_size].clone()
            scales[page, place] = scale
            row += count

    def saturated(self) -> list[int]:
        """Values of each layer that were clamped or not finite so far; waits for the device."""
        return [int(n) for n in self._saturated.tolist()]
