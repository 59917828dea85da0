"""Paged caches that another program owns: what their tensors mean, checked against real strides.

The caller states the order of a tensor's axes in memory with one letter each: B block, C component
(0 key, 1 value), T token in the page, H head, D element. The statement is then held against the
tensor's rank, sizes, dtype, strides and allocation; a conflict is refused, nothing is inferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, final

from tiers._layout import KEY, VALUE, PageLayout, PageOrder
from transfer._errors import LayoutMismatch, SpanError
from transfer._extent import BlockLayout, Extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class CacheKind(StrEnum):
    """Order of a cache tensor's axes in memory, slowest first."""

    NHD = "BTHD"
    HND = "BHTD"
    KV_FIRST_NHD = "CBTHD"
    KV_FIRST_HND = "CBHTD"
    BLOCK_FIRST_NHD = "BCTHD"
    BLOCK_FIRST_HND = "BCHTD"
    INTERLEAVED_NHD = "BTHCD"
    INTERLEAVED_HND = "BHTCD"
    HEAD_FIRST = "BHCTD"
    LATENT = "BTD"

    @property
    def combined(self) -> bool:
        """Whether one tensor holds keys and values."""
        return "C" in self.value

    @property
    def order(self) -> PageOrder:
        """The page order that the axes amount to."""
        axes = self.value
        tokens_first = "H" not in axes or axes.index("T") < axes.index("H")
        return PageOrder.NHD if tokens_first else PageOrder.HND


@final
@dataclass(frozen=True, slots=True)
class CacheView:
    """A checked cache: ``Pool.over(view.tensors, view)`` makes a pool of it.

    Attributes:
        tensors: the memory of each component by (name, layer), shape (blocks, *page axes); views
            of the caller's tensors.
        block_layout: the same as extents, each in a plane of its own, with the real strides.
    """

    tensors: dict[tuple[str, int | None], torch.Tensor]
    block_layout: BlockLayout


def view_cache(
    layout: PageLayout,
    tensors: Sequence[Sequence[torch.Tensor]],
    *,
    kind: CacheKind,
    padded: bool = False,
) -> CacheView:
    """Check the tensors of a paged cache against what the caller says about them.

    Args:
        layout: the page; its order has to be the kind's.
        tensors: for each layer the tensors of that layer: one when `kind` combines keys and
            values or the page has no values, else keys then values.
        kind: order of the axes in memory.
        padded: gaps between rows, tokens, heads or blocks are allowed (inline scales, alignment);
            without it a tensor has to be dense.

    Raises:
        LayoutMismatch: rank, sizes, dtype or strides contradict the statement, or overlap.
        SpanError: the tensor reaches past its allocation.
    """
    if kind.order != layout.order:
        raise LayoutMismatch(f"page order: found {layout.order}, expected {kind.order} of {kind}")
    if len(tensors) != layout.layers:
        raise LayoutMismatch(f"layers: found {len(tensors)}, expected {layout.layers}")
    if kind.combined and (layout.value, layout.value_width) != (layout.key, layout.head_dim):
        raise LayoutMismatch(
            f"{kind}: found values {layout.value}[{layout.value_width}], "
            f"expected {layout.key}[{layout.head_dim}] like the keys"
        )
    parts: dict[tuple[str, int | None], torch.Tensor] = {}
    for layer, members in enumerate(tensors):
        parts |= _layer_parts(layout, layer, members, kind, padded=padded)
    blocks = {part.shape[0] for part in parts.values()}
    if len(blocks) != 1:
        raise LayoutMismatch(f"blocks: found {sorted(blocks)}, expected the same in every tensor")
    extents = tuple(
        Extent(
            name,
            tuple(part.shape[1:]),
            _dtype_name(part),
            layer=layer,
            plane=plane,
            strides=tuple(part.stride()[1:]),
        )
        for plane, ((name, layer), part) in enumerate(parts.items())
    )
    return CacheView(parts, BlockLayout(extents, tuple(e.span for e in extents)))


def _layer_parts(
    layout: PageLayout,
    layer: int,
    members: Sequence[torch.Tensor],
    kind: CacheKind,
    *,
    padded: bool,
) -> dict[tuple[str, int | None], torch.Tensor]:
    """Check one layer's tensors and take its components out of them, block axis first."""
    names = [KEY] if layout.value is None else [KEY, VALUE]
    count = 1 if kind.combined else len(names)
    if len(members) != count:
        raise LayoutMismatch(f"layer {layer}: found {len(members)} tensors, expected {count}")
    for name, tensor in zip(names, members, strict=False):
        _check(layout, kind, name, tensor, where=f"layer {layer} {name} as {kind.value}")
        _check_strides(f"layer {layer} {name} as {kind.value}", tensor, padded=padded)
        _check_allocation(f"layer {layer} {name} as {kind.value}", tensor)
    if kind.combined:
        axis = kind.value.index("C")
        members = [members[0].select(axis, index) for index in (0, 1)]
    if kind is CacheKind.LATENT:
        members = [tensor.unsqueeze(2) for tensor in members]
    return {(name, layer): tensor for name, tensor in zip(names, members, strict=True)}


def _check(
    layout: PageLayout, kind: CacheKind, name: str, tensor: torch.Tensor, *, where: str
) -> None:
    """Dtype, rank and sizes are the layout's."""
    expected = layout.value if name == VALUE else layout.key
    if _dtype_name(tensor) != expected:
        raise LayoutMismatch(f"{where}: found {_dtype_name(tensor)}, expected {expected}")
    sizes = {
        "T": layout.page_size,
        "H": layout.kv_heads,
        "D": layout.value_width if name == VALUE else layout.head_dim,
        "C": 2,
    }
    axes = kind.value
    if tensor.dim() == len(axes):
        sizes["B"] = tensor.shape[axes.index("B")]
    wanted = tuple(sizes.get(axis, -1) for axis in axes)
    if tuple(tensor.shape) != wanted or ("H" not in axes and layout.kv_heads != 1):
        raise LayoutMismatch(f"{where}: found shape {tuple(tensor.shape)}, expected {wanted}")


def _check_strides(where: str, tensor: torch.Tensor, *, padded: bool) -> None:
    """Strides descend in the stated order; gaps only where they are allowed."""
    reach = 1
    for axis in range(tensor.dim() - 1, -1, -1):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 1:
            continue
        innermost = axis == tensor.dim() - 1
        if stride < reach or (stride != reach and (innermost or not padded)):
            raise LayoutMismatch(
                f"{where}: found strides {tuple(tensor.stride())}, expected {reach}"
                f"{' or more' if padded and not innermost else ''} at axis {axis}"
            )
        reach = stride * size


def _check_allocation(where: str, tensor: torch.Tensor) -> None:
    """First and last element lie inside the tensor's storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in steps)
    end = (last + 1) * tensor.element_size()
    if tensor.numel() and end > tensor.untyped_storage().nbytes():
        raise SpanError(
            f"{where}: found a last byte at {end}, expected at most "
            f"{tensor.untyped_storage().nbytes()}"
        )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
