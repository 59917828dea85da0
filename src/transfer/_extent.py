"""Named tensors inside a block, and the byte runs that carry one block's tensors into another's.

A *plane* is one region of memory with a base address and a stride from block to block. A host slot
that holds all layers of a page is one plane; a paged cache with a tensor per layer and component
has one plane for each of them. An `Extent` is one named tensor inside one plane's part of a block.
Every number here is a Python or 64-bit integer: offsets do not wrap.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np

from transfer._errors import LayoutMismatch, SpanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    Int64Array: TypeAlias = npt.NDArray[np.int64]

DTYPES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "uint8": 1,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
    }
)
"""Item size in bytes by the name that torch also uses."""


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense row-major tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def overlapping(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may share an element.

    Sure for axes of which each steps over all smaller ones; other strides count as overlapping.
    """
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return 0 not in shape
            reach += stride * (size - 1)
    return False


@dataclass(frozen=True, slots=True)
class Extent:
    """One named tensor inside a block.

    Attributes:
        name: what it is, e.g. ``"key"``.
        shape: elements along each axis.
        dtype: a name of `DTYPES`.
        offset: bytes from the start of the block's part of the plane.
        layer: layer number, or None for a tensor that belongs to no layer.
        plane: index of the plane.
        strides: elements from one index to the next along each axis; row-major when not given.

    Raises:
        LayoutMismatch: unknown dtype, negative numbers, or strides that overlap elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    layer: int | None = None
    plane: int = 0
    strides: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LayoutMismatch(
                f"extent {self.name!r}: dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}"
            )
        if not self.strides:
            object.__setattr__(self, "strides", row_major(self.shape))
        if len(self.strides) != len(self.shape):
            raise LayoutMismatch(
                f"extent {self.name!r}: {len(self.strides)} strides for {len(self.shape)} axes"
            )
        if min((self.offset, self.plane, *self.shape, *self.strides)) < 0:
            raise LayoutMismatch(f"extent {self.name!r}: negative offset, plane, size or stride")
        if overlapping(self.shape, self.strides):
            raise LayoutMismatch(
                f"extent {self.name!r}: strides {self.strides} of shape {self.shape} overlap"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of payload: elements times item size, without padding."""
        return math.prod(self.shape) * self.itemsize

    @property
    def span(self) -> int:
        """Bytes from the first byte of the tensor to behind its last."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return (sum((n - 1) * s for n, s in steps) + 1) * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the payload is one dense row-major run."""
        return self.span == self.nbytes and self.tail == 0

    @property
    def tail(self) -> int:
        """First axis from which on the tensor is dense and row-major."""
        expected = 1
        axis = len(self.shape)
        while axis > 0:
            size, stride = self.shape[axis - 1], self.strides[axis - 1]
            if size != 1 and stride != expected:
                break
            expected *= max(size, 1)
            axis -= 1
        return axis

    def offsets(self, axes: int) -> Int64Array:
        """Byte offsets in the block of every index over the first `axes` axes, in row-major order.

        Shape: (product of the first `axes` sizes,), int64.
        """
        out = np.array([self.offset], dtype=np.int64)
        for size, stride in zip(self.shape[:axes], self.strides[:axes], strict=True):
            step = np.arange(size, dtype=np.int64) * (stride * self.itemsize)
            out = (out[:, None] + step[None, :]).reshape(-1)
        return out


class HasBlockLayout(Protocol):
    """Anything that can say how it lies inside a block."""

    @property
    def block_layout(self) -> BlockLayout:
        """The layout of one block."""
        ...


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """All tensors of a block and the bytes a block takes in each plane.

    Attributes:
        extents: the tensors; (name, layer) is unique.
        plane_bytes: bytes of one block in each plane.

    Raises:
        LayoutMismatch: a duplicate name, or a plane that is not there.
        SpanError: a tensor that reaches past its block.
    """

    extents: tuple[Extent, ...]
    plane_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        seen = set()
        for extent in self.extents:
            identity = (extent.name, extent.layer)
            if identity in seen:
                raise LayoutMismatch(f"two extents are named {identity}")
            seen.add(identity)
            if extent.plane >= len(self.plane_bytes):
                raise LayoutMismatch(
                    f"extent {identity}: plane {extent.plane} of {len(self.plane_bytes)}"
                )
            end = extent.offset + extent.span
            if end > self.plane_bytes[extent.plane]:
                raise SpanError(
                    f"extent {identity} ends at byte {end} of a block of "
                    f"{self.plane_bytes[extent.plane]} bytes in plane {extent.plane}"
                )

    @property
    def block_layout(self) -> BlockLayout:
        """Itself, so that it can stand wherever a layout is wanted."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of one block over all planes, padding included."""
        return sum(self.plane_bytes)

    @property
    def payload(self) -> int:
        """Bytes of all tensors of one block, padding left out."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def scattered(self) -> frozenset[int]:
        """Planes in which a block has bytes that belong to none of its tensors."""
        gaps = list(self.plane_bytes)
        for extent in self.extents:
            gaps[extent.plane] -= extent.nbytes
        return frozenset(plane for plane, left in enumerate(gaps) if left)

    def extent(self, name: str, layer: int | None = None) -> Extent:
        """Find a tensor by name and layer.

        Raises:
            LayoutMismatch: there is none; the message lists what there is.
        """
        for extent in self.extents:
            if extent.name == name and extent.layer == layer:
                return extent
        known = sorted({(e.name, -1 if e.layer is None else e.layer) for e in self.extents})
        raise LayoutMismatch(f"no extent {name!r} of layer {layer}; there are {known[:8]}")

    @classmethod
    def packed(cls, extents: Iterable[Extent], *, align: int = 16) -> BlockLayout:
        """Lay dense tensors one after the other in a single plane.

        Args:
            extents: name, shape, dtype and layer count; offsets, strides and planes are replaced.
            align: each tensor starts at a multiple of this many bytes.
        """
        placed = []
        offset = 0
        for extent in extents:
            offset = -(-offset // align) * align
            placed.append(
                Extent(extent.name, extent.shape, extent.dtype, offset=offset, layer=extent.layer)
            )
            offset += placed[-1].nbytes
        return cls(tuple(placed), (offset,))

    @classmethod
    def raw(cls, nbytes: int) -> BlockLayout:
        """One tensor of bytes, named ``"bytes"``."""
        return cls((Extent("bytes", (nbytes,), "uint8"),), (nbytes,))


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Byte runs that carry one block into another; int64 arrays of equal length.

    Attributes:
        src_plane: plane of the source.
        src_offset: bytes from the start of the source block in that plane.
        dst_plane: plane of the destination.
        dst_offset: bytes from the start of the destination block in that plane.
        nbytes: length of each run.
        total: sum of all lengths.
    """

    src_plane: Int64Array
    src_offset: Int64Array
    dst_plane: Int64Array
    dst_offset: Int64Array
    nbytes: Int64Array
    total: int
    rows: tuple[tuple[int, int, int, int, int], ...]


def _extent_runs(src: Extent, dst: Extent) -> Int64Array:
    """Runs of one tensor: (n, 5) of source plane, offset, destination plane, offset, bytes."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise LayoutMismatch(
            f"extent {src.name!r} of layer {src.layer}: source {src.dtype}{list(src.shape)}, "
            f"destination {dst.dtype}{list(dst.shape)}"
        )
    axes = max(src.tail, dst.tail)
    run = math.prod(src.shape[axes:]) * src.itemsize
    starts, ends = src.offsets(axes), dst.offsets(axes)
    columns = (
        np.full_like(starts, src.plane),
        starts,
        np.full_like(starts, dst.plane),
        ends,
        np.full_like(starts, run),
    )
    return np.stack(columns, axis=1)


def _coalesce(rows: Int64Array) -> Int64Array:
    """Join runs that continue each other on both sides."""
    rows = rows[rows[:, 4] > 0]
    if len(rows) < 2:
        return rows
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    before, after = rows[:-1], rows[1:]
    joined = (
        (before[:, 0] == after[:, 0])
        & (before[:, 2] == after[:, 2])
        & (before[:, 1] + before[:, 4] == after[:, 1])
        & (before[:, 3] + before[:, 4] == after[:, 3])
    )
    first = np.concatenate(([True], ~joined))
    out = rows[first].copy()
    out[:, 4] = np.add.reduceat(rows[:, 4], np.flatnonzero(first))
    return out


@functools.lru_cache(maxsize=256)
def copy_runs(src: BlockLayout, dst: BlockLayout, names: tuple[str, ...] | None = None) -> Runs:
    """The byte runs that carry every tensor of a `src` block into a `dst` block.

    Tensors are matched by name and layer; shapes and dtypes must agree, strides and places may
    differ. Padding and neighbours are not touched.

    Args:
        src: layout of the source block.
        dst: layout of the destination block.
        names: carry these tensors only; every one of the destination's when None.

    Raises:
        LayoutMismatch: a tensor is missing on one side, or differs in shape or dtype.
    """
    wanted = [e for e in dst.extents if names is None or e.name in names]
    missing = set(names or ()) - {e.name for e in wanted}
    if missing or (names is None and len(src.extents) != len(dst.extents)):
        raise LayoutMismatch(
            f"source has {sorted({e.name for e in src.extents})} in {len(src.extents)} extents, "
            f"destination {sorted({e.name for e in dst.extents})} in {len(dst.extents)}"
            + (f"; asked for {sorted(names)}" if names is not None else "")
        )
    parts = [_extent_runs(src.extent(e.name, e.layer), e) for e in wanted]
    rows = _coalesce(np.concatenate(parts) if parts else np.zeros((0, 5), dtype=np.int64))
    return Runs(
        rows[:, 0],
        rows[:, 1],
        rows[:, 2],
        rows[:, 3],
        rows[:, 4],
        int(rows[:, 4].sum()),
        tuple((int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in rows),
    )
