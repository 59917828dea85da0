"""What a kernel reads for one layer: key pages, value pages and the scales of the values.

Layouts are stated, never inferred from a shape: with two heads, or as many heads as a page has
slots, the two layouts have the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from attention._errors import CacheError
from tiers._layout import PageOrder, ScaleScope

if TYPE_CHECKING:
    from torch import Tensor

KEY_DTYPES: Final = (torch.bfloat16, torch.float16)
VALUE_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
ROW_ALIGNMENT: Final = 16
"""Bytes: a row of one token and head starts at a multiple of this, as 128-bit loads want it."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerView:
    """The pages of one layer as they lie in memory.

    Attributes:
        key: bfloat16 or float16, axes as `order` says.
        value: float8_e4m3fn or float8_e5m2 codes, of the same shape.
        order: NHD is [pages, page_size, kv_heads, head_dim], HND has heads before slots.
        scale: float32, on the same device, [1], [kv_heads], or shaped as the pages without head_dim.
        scope: what one scale covers; real value = code * scale.

    Raises:
        CacheError: anything that does not fit together.
    """

    key: Tensor
    value: Tensor
    order: PageOrder
    scale: Tensor
    scope: ScaleScope

    def __post_init__(self) -> None:
        _check_rows("key", self.key, KEY_DTYPES)
        _check_rows("value", self.value, VALUE_DTYPES)
        if self.key.shape != self.value.shape:
            raise CacheError(
                f"key pages are {tuple(self.key.shape)}, value pages {tuple(self.value.shape)}"
            )
        if not self.key.device == self.value.device == self.scale.device:
            raise CacheError(
                f"key on {self.key.device}, value on {self.value.device}, scale on "
                f"{self.scale.device}: all three belong on one device"
            )
        _check_scale(self)

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.key.shape[0]

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.key.shape[1 if self.order is PageOrder.NHD else 2]

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.key.shape[2 if self.order is PageOrder.NHD else 1]

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.key.shape[3]

    def by_token(self, pages: Tensor) -> Tensor:
        """`pages` with its axes in the order [pages, page_size, kv_heads, ...], without a copy."""
        return pages if self.order is PageOrder.NHD else pages.transpose(1, 2)


def _check_rows(name: str, pages: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse page tensors whose rows a kernel cannot load."""
    if pages.dim() != 4:
        raise CacheError(f"{name} pages have {pages.dim()} axes, expected 4")
    if pages.dtype not in dtypes:
        raise CacheError(f"{name} pages are {pages.dtype}, expected one of {dtypes}")
    if pages.shape[3] > 1 and pages.stride(3) != 1:
        raise CacheError(f"{name} pages have stride {pages.stride(3)} inside a head, expected 1")
    if not pages.numel():
        return
    size = pages.element_size()
    steps = [pages.stride(axis) for axis in range(3) if pages.shape[axis] > 1]
    if any(step * size % ROW_ALIGNMENT for step in steps) or pages.data_ptr() % ROW_ALIGNMENT:
        raise CacheError(f"{name} rows do not start at multiples of {ROW_ALIGNMENT} bytes")
    reach = pages.shape[3]
    for axis in sorted(range(3), key=pages.stride):
        if pages.shape[axis] > 1 and pages.stride(axis) < reach:
            raise CacheError(f"{name} pages overlap: strides {pages.stride()}")
        reach = max(reach, (pages.shape[axis] - 1) * pages.stride(axis) + reach)


def _check_scale(view: LayerView) -> None:
    """Refuse scales of another shape or dtype than `scope` says."""
    if view.scope is ScaleScope.PAGE_HEAD:
        raise CacheError("scales per page and head: expand them to one per token and head")
    expected: dict[ScaleScope, tuple[int, ...]] = {
        ScaleScope.TENSOR: (1,),
        ScaleScope.HEAD: (view.kv_heads,),
        ScaleScope.TOKEN_HEAD: tuple(view.key.shape[:3]),
    }
    if tuple(view.scale.shape) != expected[view.scope] or view.scale.dtype != torch.float32:
        raise CacheError(
            f"{view.scope.value} scales are {view.scale.dtype} {tuple(view.scale.shape)}, "
            f"expected float32 {expected[view.scope]}"
        )
