"""What a way to compute attention is: it says what it refuses, plans on the host, and runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

import torch

from attention import _reference
from attention._errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention._pages import PageTable
    from attention._view import LayerView
    from tiers._layout import PageOrder, ScaleScope


REACH_MAX: Final = 2**31
"""Elements that the GPU kernels count in a page; between pages they count in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A combination that a plan asks for.

    Attributes:
        query_heads: query heads, a multiple of `kv_heads`.
        kv_heads: KV heads.
        head_dim: elements of a head.
        page_size: tokens of a page.
        key: dtype of queries, keys and output.
        value: format of the value codes.
        order: order of the page's axes.
        scope: what one scale covers.
        device: where the pages are.
        prefill: several new tokens of a request, instead of one.
        causal: whether a token sees no token after it.
        equal_strides: K and V pages have the same strides in elements.
        dense: V pages have no gaps.
        rows: query rows of the plan; 0 where that is not known.
        wide: a slot or a head of a page lies further from its start than 32 bits count elements.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    key: torch.dtype
    value: torch.dtype
    order: PageOrder
    scope: ScaleScope
    device: torch.device
    prefill: bool
    causal: bool
    equal_strides: bool
    dense: bool
    rows: int = 0
    wide: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @classmethod
    def of(
        cls,
        view: LayerView,
        query_heads: int,
        *,
        prefill: bool,
        causal: bool,
        rows: int = 0,
        others: Sequence[LayerView] = (),
    ) -> Wanted:
        """The combination that these pages and that many query heads make.

        Args:
            view: pages of a layer.
            query_heads: query heads.
            prefill: several new tokens of a request, instead of one.
            causal: whether a token sees no token after it.
            rows: query rows of the plan; 0 where that is not known.
            others: pages of the other layers, which may lie differently in memory.

        Raises:
            Unsupported: the KV heads do not divide the query heads.
        """
        if query_heads < 1 or query_heads % view.kv_heads:
            raise Unsupported(
                f"{query_heads} query heads over {view.kv_heads} KV heads: a multiple is expected"
            )
        views = (view, *others)
        return cls(
            query_heads=query_heads,
            kv_heads=view.kv_heads,
            head_dim=view.head_dim,
            page_size=view.page_size,
            key=view.key.dtype,
            value=view.value.dtype,
            order=view.order,
            scope=view.scope,
            device=view.key.device,
            prefill=prefill,
            causal=causal,
            equal_strides=all(v.key.stride() == v.value.stride() for v in views),
            dense=all(v.value.is_contiguous() for v in views),
            rows=rows,
            wide=any(_reach(part) >= REACH_MAX for v in views for part in (v.key, v.value)),
        )


def _reach(pages: Tensor) -> int:
    """Elements from the start of a page to the last row that a kernel finds by slot and head."""
    return max((pages.shape[axis] - 1) * pages.stride(axis) for axis in (1, 2))


class Batch(NamedTuple):
    """The requests of a plan.

    Attributes:
        table: their pages.
        rows: batch + 1 rising numbers, the query rows of each request.
    """

    table: PageTable
    rows: tuple[int, ...]

    @property
    def fresh_max(self) -> int:
        """Most query rows of a request."""
        return max((b - a for a, b in zip(self.rows, self.rows[1:], strict=False)), default=0)


class Room(NamedTuple):
    """Bounds for plans that are rewritten in place, as the replay of a captured graph needs.

    Attributes:
        pages: pages of all requests together, at most. Requests and rows stay as many as planned.
    """

    pages: int


class Planned(Protocol):
    """A plan: the same for every layer, until it is rewritten."""

    def update(self, batch: Batch) -> None:
        """Rewrite in place, on the current stream: as many requests and rows as before."""
        ...

    def run(self, layer: int, query: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Compute one layer on the current stream; every element of `out` and `lse` is written."""
        ...


class Backend(Protocol):
    """A way to compute attention.

    Attributes:
        name: what the caller picks it by.
    """

    name: str

    def refusal(self, wanted: Wanted) -> str | None:
        """Why it does not compute this, or None when it does."""
        ...

    def plan(
        self,
        wanted: Wanted,
        views: Sequence[LayerView],
        batch: Batch,
        *,
        sm_scale: float,
        room: Room | None,
    ) -> Planned:
        """Prepare for a batch; nothing is launched but copies of the table."""
        ...


class DeviceTable(NamedTuple):
    """A page table where the kernels read it: int32 tensors on the device."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@final
class Buffers:
    """Device copies of a batch's table and rows, at addresses that stay.

    Args:
        batch: the first batch.
        room: bounds of later ones; exactly the first when None.
        device: where the kernels read them.
    """

    def __init__(self, batch: Batch, room: Room | None, device: torch.device) -> None:
        pages = len(batch.table.indices)
        size = pages if room is None else max(room.pages, pages)

        def ints(count: int) -> Tensor:
            return torch.zeros(max(count, 1), dtype=torch.int32, device=device)

        self._batch, self._rows, self._pages = batch.table.batch, batch.rows[-1], size
        self.table = DeviceTable(ints(self._batch + 1), ints(size), ints(self._batch))
        self.rows = ints(self._batch + 1)
        self.write(batch)

    def write(self, batch: Batch) -> None:
        """Copy a batch over, on the current stream and without waiting for it.

        Raises:
            Unsupported: another number of requests or rows, or more pages than there is room for.
        """
        table = batch.table
        if table.batch != self._batch or batch.rows[-1] != self._rows:
            raise Unsupported(
                f"rewritten with {table.batch} requests and {batch.rows[-1]} rows, planned for "
                f"{self._batch} and {self._rows}: plan anew"
            )
        if len(table.indices) > self._pages:
            raise Unsupported(
                f"rewritten with {len(table.indices)} pages, room for {self._pages}: plan anew"
            )
        host = (table.indptr, table.indices, table.last_page_len)
        for target, source in zip(self.table, host, strict=True):
            _upload(target, torch.from_numpy(source))
        _upload(self.rows, torch.tensor(batch.rows, dtype=torch.int32))


def _upload(target: Tensor, source: Tensor) -> None:
    """Copy to the front of `target`; from page-locked memory, so that the host does not wait."""
    if not source.numel():
        return
    if target.device.type != "cpu":
        source = source.pin_memory()
    target[: source.numel()].copy_(source, non_blocking=True)


@final
class ReferenceBackend:
    """Plain torch on any device: exact, slow, the fallback without a GPU."""

    name = "reference"

    def refusal(self, wanted: Wanted) -> str | None:
        """It computes everything."""
        del wanted
        return None

    def plan(
        self,
        wanted: Wanted,
        views: Sequence[LayerView],
        batch: Batch,
        *,
        sm_scale: float,
        room: Room | None,
    ) -> Planned:
        """Keep the batch.

        Raises:
            Unsupported: a captured graph cannot replay what the host computes.
        """
        if room is not None:
            raise Unsupported("reference: reads the table on the host, no graph can replay that")
        return _ReferencePlan(wanted, views, batch, sm_scale)


@final
class _ReferencePlan:
    def __init__(
        self, wanted: Wanted, views: Sequence[LayerView], batch: Batch, sm_scale: float
    ) -> None:
        self._causal = wanted.causal
        self._views = views
        self._batch = batch
        self._sm_scale = sm_scale

    def update(self, batch: Batch) -> None:
        if (batch.table.batch, batch.rows[-1]) != (self._batch.table.batch, self._batch.rows[-1]):
            raise Unsupported("reference: another number of requests or rows: plan anew")
        self._batch = batch

    def run(self, layer: int, query: Tensor, out: Tensor, lse: Tensor | None) -> None:
        found = _reference.prefill(
            query,
            self._batch.rows,
            self._views[layer],
            self._batch.table,
            scale=self._sm_scale,
            causal=self._causal,
        )
        out.copy_(found.out)
        if lse is not None:
            lse.copy_(found.lse)
