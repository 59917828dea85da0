"""Sizes and strides of values in pages and of codes in slots, and the kernel that fits them.

Importing this needs Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from tiers._fp8_kernels import pack_values, unpack_values
from tiers._layout import VALUE, VALUE_SCALE, PageLayout, PageOrder, ScaleScope
from transfer._errors import LayoutMismatch
from transfer.kernels import Program

if TYPE_CHECKING:
    from transfer._extent import Extent
    from transfer._memory import Pool

HEAD_MAX: Final = 16384
"""Values of one head in one page at most: a program keeps them in registers."""
TILE: Final = 8192
"""Values that a program works on at once, where a head has no more."""
ROW: Final = 6
"""Words of a row of the kernels' table."""
FORMAT: Final = "float8_e4m3fn"
_KINDS: Final = {"bfloat16": 0, "float16": 1, "float32": 2}


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and strides, in elements, of the values of one page and layer on both sides.

    Attributes:
        tokens, heads, width: sizes.
        page, slot, scale: strides from token to token and from head to head.
        kind: dtype of the pages' values.
        stored: whether slots have scales.
    """

    tokens: int
    heads: int
    width: int
    page: tuple[int, int]
    slot: tuple[int, int]
    scale: tuple[int, int]
    kind: int
    stored: bool

    @classmethod
    def of(cls, layout: PageLayout, pages: Pool, slots: Pool) -> Shape:
        """Read sizes and strides off the extents, which have to be the same in every layer.

        Raises:
            LayoutMismatch: they are not, or the kernels do not take them.
        """
        if layout.value != FORMAT:
            raise LayoutMismatch(f"values in slots: found {layout.value}, expected {FORMAT}")
        found = {cls._of_layer(layout, pages, slots, layer) for layer in range(layout.layers)}
        if len(found) != 1:
            raise LayoutMismatch(f"layers: found {len(found)} different strides, expected one")
        shape = found.pop()
        if _power(shape.tokens) * _power(shape.width) > HEAD_MAX:
            raise LayoutMismatch(
                f"a head's values in a page: found {shape.tokens} by {shape.width}, expected at "
                f"most {HEAD_MAX}, powers of two"
            )
        return shape

    @classmethod
    def _of_layer(cls, layout: PageLayout, pages: Pool, slots: Pool, layer: int) -> Shape:
        page, slot = pages.layout.extent(VALUE, layer), slots.layout.extent(VALUE, layer)
        if page.dtype not in _KINDS or slot.dtype != FORMAT or page.shape != slot.shape:
            raise LayoutMismatch(
                f"values of layer {layer}: found {page.dtype}{list(page.shape)} in pages, "
                f"{slot.dtype}{list(slot.shape)} in slots; expected full-width values and "
                f"{FORMAT} codes of one shape"
            )
        tokens_first = layout.order is PageOrder.NHD
        axes = (0, 1) if tokens_first else (1, 0)
        sizes = tuple(page.shape[axis] for axis in axes)
        if (*sizes, page.shape[2]) != (layout.page_size, layout.kv_heads, layout.value_width):
            raise LayoutMismatch(f"values: found {page.shape}, expected those of {layout}")
        strides = [tuple(extent.strides[axis] for axis in axes) for extent in (page, slot)]
        cls._check_words(page, pages, strides[0], 16)
        cls._check_words(slot, slots, strides[1], 8)
        stored = layout.scope is not None
        scale = (0, 0)
        if layout.scope is ScaleScope.TOKEN_HEAD:
            steps = slots.layout.extent(VALUE_SCALE, layer).strides
            scale = (steps[axes[0]], steps[axes[1]])
        elif layout.scope in {ScaleScope.HEAD, ScaleScope.PAGE_HEAD}:
            scale = (0, slots.layout.extent(VALUE_SCALE, layer).strides[0])
        return cls(
            sizes[0],
            sizes[1],
            page.shape[2],
            (strides[0][0], strides[0][1]),
            (strides[1][0], strides[1][1]),
            scale,
            _KINDS[page.dtype],
            stored,
        )

    @staticmethod
    def _check_words(extent: Extent, pool: Pool, strides: tuple[int, ...], word: int) -> None:
        """Rows are read and written in words of some bytes: everything has to be a multiple."""
        plane = pool.storage.planes[extent.plane]
        steps = [stride * extent.itemsize for stride in (*strides, extent.shape[2])]
        numbers = (plane.address, plane.stride, extent.offset, *steps)
        if extent.strides[2] != 1 or any(number % word for number in numbers):
            raise LayoutMismatch(
                f"extent {extent.name!r} of {pool.name}: found strides {extent.strides} and offset "
                f"{extent.offset}, expected dense rows and multiples of {word} bytes"
            )

    def program(self, *, outward: bool, scope: int, computed: bool) -> Program:
        """The kernel for these sizes."""
        return _program(self, outward, scope, computed)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def _program(shape: Shape, outward: bool, scope: int, computed: bool) -> Program:  # noqa: FBT001
    tokens, width = _power(shape.tokens), _power(shape.width)
    heads = max(1, min(_power(shape.heads), TILE // (tokens * width)))
    constants = {
        "tokens": shape.tokens,
        "heads": shape.heads,
        "width": shape.width,
        "token_tile": tokens,
        "head_tile": heads,
        "width_tile": width,
        "kind": shape.kind,
        "scope": scope,
        "computed": computed,
        "stored": shape.stored,
        "row_words": ROW,
    }
    kernel = pack_values if outward else unpack_values
    return Program(f"{kernel.__name__} {constants}", kernel, constants, 8, 2)
