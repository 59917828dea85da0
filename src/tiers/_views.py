"""Paged caches that another program owns: what their tensors mean, checked against real strides.

The caller states the order of a tensor's axes in memory with one letter each: B block, C component
(0 key, 1 value), T token in the page, H head, D element. The statement is then held against the
tensor's rank, sizes, dtype, strides and allocation; a conflict is refused, nothing is inferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, final

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
    """A checked cache: hand `planes` and the view itself to ``Pool.over``.

    Attributes:
        planes: one tensor for each plane, its first axis the block.
        block_layout: where each layer's components lie in a block of those planes.
        blocks: number of blocks.
    """

    planes: tuple[torch.Tensor, ...]
    block_layout: BlockLayout
    blocks: int


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
    builder = _Builder(layout, kind, padded=padded)
    for layer, members in enumerate(tensors):
        builder.add(layer, members)
    return CacheView(
        tuple(builder.planes),
        BlockLayout(tuple(builder.extents), tuple(builder.plane_bytes)),
        builder.blocks,
    )


class _Builder:
    """Planes and extents gathered layer by layer."""

    def __init__(self, layout: PageLayout, kind: CacheKind, *, padded: bool) -> None:
        self.layout = layout
        self.kind = kind
        self.padded = padded
        self.planes: list[torch.Tensor] = []
        self.extents: list[Extent] = []
        self.plane_bytes: list[int] = []
        self.blocks = -1

    def add(self, layer: int, members: Sequence[torch.Tensor]) -> None:
        """Check one layer's tensors and place their components."""
        names = [KEY] if self.layout.value is None else [KEY, VALUE]
        count = 1 if self.kind.combined else len(names)
        if len(members) != count:
            raise LayoutMismatch(
                f"layer {layer}: found {len(members)} tensors, expected {count} for {self.kind}"
            )
        if self.kind.combined:
            self._combined(layer, members[0])
            return
        for name, tensor in zip(names, members, strict=True):
            self._check(layer, name, tensor)
            self._place(tensor, [(name, layer, 0, self._inner(tensor, "B"))])

    def _combined(self, layer: int, tensor: torch.Tensor) -> None:
        if self.layout.value != self.layout.key or (
            self.layout.value_width != self.layout.head_dim
        ):
            raise LayoutMismatch(
                f"{self.kind}: found values {self.layout.value}[{self.layout.value_width}], "
                f"expected {self.layout.key}[{self.layout.head_dim}] like the keys"
            )
        self._check(layer, "key and value", tensor)
        if self.kind.value.startswith("C"):
            for index, name in enumerate((KEY, VALUE)):
                half = tensor[index]
                self._place(half, [(name, layer, 0, self._inner(half, "CB"))])
            return
        step = tensor.stride(self.kind.value.index("C")) * tensor.element_size()
        inner = self._inner(tensor, "BC")
        self._place(tensor, [(KEY, layer, 0, inner), (VALUE, layer, step, inner)])

    def _inner(self, tensor: torch.Tensor, outer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of one component of one block; a head axis is put in when absent."""
        letters = self.kind.value.replace("C", "") if outer == "CB" else self.kind.value
        pairs = [
            (size, stride)
            for letter, size, stride in zip(letters, tensor.shape, tensor.stride(), strict=True)
            if letter not in outer
        ]
        if "H" not in self.kind.value:
            pairs.insert(1, (1, 1))
        return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)

    def _place(
        self, plane: torch.Tensor, parts: list[tuple[str, int, int, tuple[Any, Any]]]
    ) -> None:
        index = len(self.planes)
        dtype = _dtype_name(plane)
        placed = [
            Extent(name, shape, dtype, offset=offset, layer=layer, plane=index, strides=strides)
            for name, layer, offset, (shape, strides) in parts
        ]
        self.planes.append(plane)
        self.extents += placed
        self.plane_bytes.append(max(e.offset + e.span for e in placed))

    def _check(self, layer: int, name: str, tensor: torch.Tensor) -> None:
        where = f"layer {layer} {name} as {self.kind.value}"
        expected = self.layout.value if name == VALUE else self.layout.key
        if _dtype_name(tensor) != expected:
            raise LayoutMismatch(f"{where}: found {_dtype_name(tensor)}, expected {expected}")
        sizes = {
            "T": self.layout.page_size,
            "H": self.layout.kv_heads,
            "D": self.layout.value_width if name == VALUE else self.layout.head_dim,
            "C": 2,
        }
        letters = self.kind.value
        if "B" in letters and tensor.dim() == len(letters):
            sizes["B"] = tensor.shape[letters.index("B")]
        wanted = tuple(sizes.get(letter, -1) for letter in letters)
        if tuple(tensor.shape) != wanted:
            raise LayoutMismatch(f"{where}: found shape {tuple(tensor.shape)}, expected {wanted}")
        if self.blocks not in {-1, sizes["B"]}:
            raise LayoutMismatch(f"{where}: found {sizes['B']} blocks, expected {self.blocks}")
        self.blocks = sizes["B"]
        _check_strides(where, tensor, padded=self.padded)
        _check_allocation(where, tensor)


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
