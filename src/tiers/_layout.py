"""Page layouts: which components a page of K/V cache has, and where each lies in a block.

Axes are single letters: L layer, P page, T token in the page, H head, D element. A page is
described, never guessed from a shape: with two heads and two tokens NHD and HND look the same.
All offsets are Python or 64-bit integers.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, final

import numpy as np

from tiers._errors import ScaleError
from transfer._errors import LayoutMismatch, SpanError
from transfer._extent import DTYPES, BlockLayout, Extent

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

FP8: Final = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
"""Element types that a value can be encoded to."""

KEY: Final = "key"
VALUE: Final = "value"
VALUE_SCALE: Final = "value_scale"
SLOT_ALIGN: Final = 64


class PageOrder(StrEnum):
    """Order of token, head and element inside a page, slowest first."""

    NHD = "NHD"
    HND = "HND"

    @property
    def axes(self) -> str:
        """Axes of a component over all layers and pages, slowest first."""
        return "LPTHD" if self is PageOrder.NHD else "LPHTD"


class ScaleScope(StrEnum):
    """How many values share one scale; the values of one layer are one tensor."""

    TENSOR = "tensor"
    HEAD = "head"
    PAGE_HEAD = "page_head"
    TOKEN_HEAD = "token_head"  # noqa: S105 - an axis name, no secret

    @property
    def kept(self) -> str:
        """Axes along which scales differ."""
        return _KEPT[self]


_KEPT: Final = {
    ScaleScope.TENSOR: "L",
    ScaleScope.HEAD: "LH",
    ScaleScope.PAGE_HEAD: "LPH",
    ScaleScope.TOKEN_HEAD: "LPTH",
}


@dataclass(frozen=True, slots=True)
class Component:
    """One typed part of a block: dense and row-major in its axes.

    Attributes:
        name: ``"key"``, ``"value"`` or ``"value_scale"``, or a name of a codec's own.
        axes: one letter for each axis, slowest first; empty for plain bytes.
        shape: size of each axis.
        dtype: a name of `transfer.DTYPES`.
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * DTYPES[self.dtype]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """One page of K/V cache over a range of layers.

    Attributes:
        layers: number of layers, at least 1.
        page_size: tokens of a page, at least 1.
        kv_heads: key/value heads, at least 1.
        head_dim: elements of a key row, at least 1.
        order: order of token and head; there is no default, since it cannot be seen in a shape.
        key: dtype of keys: bfloat16, float16, float32 or float64.
        value: dtype of values, 16-bit, float32 or an FP8 format; None for a single latent
            component (MLA), which has no values.
        value_dim: elements of a value row; `head_dim` when None.
        scope: how scales of FP8 values are shared; None when values have no scales.

    Raises:
        LayoutMismatch: a size below 1, a dtype that a component cannot have, scales without
            FP8 values.
    """

    layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    order: PageOrder
    key: str = "bfloat16"
    value: str | None = "bfloat16"
    value_dim: int | None = None
    scope: ScaleScope | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", PageOrder(self.order))
        if self.scope is not None:
            object.__setattr__(self, "scope", ScaleScope(self.scope))
        # Stated even when it is the default, so that equal pages are equal layouts.
        width = None if self.value is None else self.value_width
        object.__setattr__(self, "value_dim", width)
        sizes = (self.layers, self.page_size, self.kv_heads, self.head_dim, self.value_width)
        if min(sizes[:4]) < 1 or (self.value is not None and sizes[4] < 1):
            raise LayoutMismatch(
                f"page layout: found layers, page_size, kv_heads, head_dim, value_dim {sizes}, "
                "expected at least 1 of each"
            )
        if self.key not in {"bfloat16", "float16", "float32", "float64"}:
            raise LayoutMismatch(f"keys: found dtype {self.key!r}, expected a full-width float")
        if self.value not in {None, "bfloat16", "float16", "float32", *FP8}:
            raise LayoutMismatch(f"values: found dtype {self.value!r}, expected a float or FP8")
        if self.scope is not None and self.value not in FP8:
            raise LayoutMismatch(f"scales: found {self.value!r} values, expected FP8 values")

    @property
    def value_width(self) -> int:
        """Elements of a value row; 0 without values."""
        if self.value is None:
            return 0
        return self.head_dim if self.value_dim is None else self.value_dim

    def components(self, pages: int = 1) -> tuple[Component, ...]:
        """Components of `pages` pages taken as one block, in the order key, value, value_scale."""
        return _components(self, pages)

    def component(self, name: str, pages: int = 1) -> Component:
        """The component called `name`.

        Raises:
            LayoutMismatch: the layout has none of that name.
        """
        for part in self.components(pages):
            if part.name == name:
                return part
        raise LayoutMismatch(
            f"component: found {name!r}, expected one of {[p.name for p in self.components()]}"
        )

    def encoded(self, *, value: str = "float8_e4m3fn", scope: ScaleScope | None) -> PageLayout:
        """The same page with FP8 values and, unless `scope` is None, their scales."""
        return replace(self, value=value, scope=scope)

    @property
    def block_layout(self) -> BlockLayout:
        """A host slot: one plane with all components, each dense over its layers."""
        return self.slot(part.name for part in self.components())

    def slot(self, names: Iterable[str], *, align: int = SLOT_ALIGN) -> BlockLayout:
        """A host slot with some components only.

        Args:
            names: components, in the order in which they lie in the slot.
            align: bytes; each component starts at a multiple, and the slot's size is one.

        Returns:
            One plane. Each component is dense over (layers, …), so that the bytes from the offset
            of its layer 0 on are exactly one `Component` of one page.
        """
        return _slot(self, tuple(names), align)


@final
@dataclass(frozen=True, slots=True, init=False)
class StaticScales:
    """Scales of FP8 values that were fixed beforehand: given with a model, or calibrated once.

    Every page has the same, so they are not part of a page: they are part of its provenance, by
    their digest, and pages that differ in one bit of one scale have keys that never match.

    Args:
        scope: TENSOR, one for each layer, or HEAD, one for each layer and head.
        values: as float32, [layers] or [layers, 1] per tensor, [layers, kv_heads] per head.

    Attributes:
        scope: as given.
        layers: how many layers they are for.
        data: float32, little-endian, row-major.

    Raises:
        LayoutMismatch: a scope whose scales depend on the page, or values of another rank.
        ScaleError: a scale that is not finite and above 0.
    """

    scope: ScaleScope
    layers: int
    data: bytes

    def __init__(self, scope: ScaleScope, values: npt.ArrayLike) -> None:
        rows = np.asarray(values, dtype="<f4")
        if scope not in {ScaleScope.TENSOR, ScaleScope.HEAD}:
            raise LayoutMismatch(f"static scales: found {scope}, expected per tensor or per head")
        ranks = (1, 2) if scope is ScaleScope.TENSOR else (2,)
        row = rows.shape[1] if rows.ndim == 2 else 1
        if rows.ndim not in ranks or not rows.size or (scope is ScaleScope.TENSOR and row != 1):
            raise LayoutMismatch(f"static scales: found shape {rows.shape}, scope {scope.value}")
        flat = rows.reshape(-1)
        good = np.isfinite(flat) & (flat > 0)
        if not good.all():
            at = int(np.argmin(good))
            raise ScaleError(
                f"static scale {at}", found=float(flat[at]), expected="finite and above 0"
            )
        object.__setattr__(self, "scope", ScaleScope(scope))
        object.__setattr__(self, "layers", len(rows))
        object.__setattr__(self, "data", rows.tobytes())

    @classmethod
    def unit(cls, layers: int) -> StaticScales:
        """1.0 everywhere: codes are the values."""
        return cls(ScaleScope.TENSOR, np.ones(layers))

    @property
    def digest(self) -> bytes:
        """32 bytes for `Provenance.static_scales`; other scales, or another scope, have another."""
        head = f"kvhold static scales 1 {self.scope.value} {self.layers}\0"
        return hashlib.sha256(head.encode() + self.data).digest()

    def stored(self, layout: PageLayout) -> PageLayout:
        """The layout as it is kept, with these scales beside the values of `layout`.

        Raises:
            LayoutMismatch: values that are not FP8 or have scales of their own, or as many layers
                or heads as there are no scales for.
        """
        if layout.value not in FP8 or layout.scope is not None:
            raise LayoutMismatch(
                f"static scales: found {layout.value} values with scales {layout.scope}, expected "
                "FP8 values without scales of their own"
            )
        stored = replace(layout, scope=self.scope)
        expected = stored.component(VALUE_SCALE).nbytes
        if (self.layers, len(self.data)) != (layout.layers, expected):
            raise LayoutMismatch(
                f"static scales: found {len(self.data)} bytes for {self.layers} layers, expected "
                f"{expected} for {layout.layers} layers of {layout.kv_heads} heads"
            )
        return stored


@functools.lru_cache(maxsize=256)
def _components(layout: PageLayout, pages: int) -> tuple[Component, ...]:
    axes = layout.order.axes
    sizes = {
        "L": layout.layers,
        "P": pages,
        "T": layout.page_size,
        "H": layout.kv_heads,
        "D": layout.head_dim,
    }
    parts = [Component(KEY, axes, tuple(sizes[a] for a in axes), layout.key)]
    if layout.value is not None:
        sizes["D"] = layout.value_width
        parts.append(Component(VALUE, axes, tuple(sizes[a] for a in axes), layout.value))
    if layout.scope is not None:
        kept = "".join(a for a in axes if a in layout.scope.kept)
        parts.append(Component(VALUE_SCALE, kept, tuple(sizes[a] for a in kept), "float32"))
    return tuple(parts)


@functools.lru_cache(maxsize=256)
def _slot(layout: PageLayout, names: tuple[str, ...], align: int) -> BlockLayout:
    extents = []
    offset = 0
    for name in names:
        part = layout.component(name)
        inner = tuple(n for a, n in zip(part.axes, part.shape, strict=True) if a not in "LP")
        step = part.nbytes // layout.layers
        extents += [
            Extent(name, inner, part.dtype, offset=offset + layer * step, layer=layer)
            for layer in range(layout.layers)
        ]
        offset += -(-part.nbytes // align) * align
    return BlockLayout(tuple(extents), (offset,))


def byte_offsets(ids: npt.ArrayLike, stride: int, *, limit: int) -> npt.NDArray[np.int64]:
    """Where blocks start: ids times stride in 64 bits, whatever the width of the ids.

    Args:
        ids: block numbers, any integer dtype.
        stride: bytes from one block to the next.
        limit: bytes of the region; every block has to end inside it.

    Raises:
        SpanError: a negative id, or a block that ends behind `limit`.
    """
    wide = np.asarray(ids, dtype=np.int64)
    last = int(wide.max(initial=-1))
    if int(wide.min(initial=0)) < 0 or (last + 1) * stride > limit:
        raise SpanError(
            f"block ids: found {int(wide.min(initial=0))} to {last}, "
            f"expected 0 to {limit // stride - 1}"
        )
    return wide * np.int64(stride)
