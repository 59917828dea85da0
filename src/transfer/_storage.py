"""Where the bytes of a pool are: planes of memory, mapped by us or owned by someone else.

Memory of our own is anonymous, page-aligned and MAP_SHARED: a forked child sees the same pages
instead of a copy-on-write image, so direct I/O that is under way in the parent stays right.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from transfer._errors import LayoutMismatch, SpanError, WrongDevice
from transfer._extent import DTYPES, BlockLayout, Extent

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

PAGE: Final = 4096
"""Bytes; the alignment that direct I/O asks of addresses, lengths and offsets."""

_kept: list[object] = []
# The only process-lifetime state there is: memory whose last operation was lost must stay mapped.


class Plane(NamedTuple):
    """One region of memory: block i lies at ``address + i * stride`` for `nbytes` bytes."""

    address: int
    stride: int
    nbytes: int


class Storage(Protocol):
    """The memory behind a pool.

    Attributes:
        kind: ``"host"``, or a device such as ``"cuda:0"``.
        planes: where the blocks lie.
        pinned: whether a GPU can reach host memory by DMA without a bounce buffer.
    """

    kind: str
    planes: tuple[Plane, ...]
    pinned: bool

    def view(self, address: int, nbytes: int) -> memoryview:
        """Host memory as writable bytes; `WrongDevice` for any other kind."""
        ...

    def tensor(self, address: int, extent: Extent) -> torch.Tensor:
        """A view of one tensor whose block starts at `address` in the extent's plane."""
        ...

    def close(self) -> None:
        """Give the memory back. Called once, with nothing held."""
        ...


def keep_for_ever(storage: object) -> None:
    """Keep a reference until the process ends, since something may still touch the memory."""
    _kept.append(storage)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a `DTYPES` name."""
    import torch  # noqa: PLC0415 - import torch costs a second; bookkeeping does without

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - narrows the type; names are checked
    return dtype


class MappedStorage:
    """Anonymous shared memory of our own: one plane of page-aligned blocks.

    Args:
        nbytes: bytes of one block.
        blocks: how many.
        align: block stride is a multiple of this; a page by default from one page up, so that
            every block can be read and written by direct I/O.
    """

    kind: str = "host"
    pinned: bool = False

    def __init__(self, nbytes: int, blocks: int, *, align: int | None = None) -> None:
        unit = align or (PAGE if nbytes >= PAGE else 64)
        stride = -(-max(nbytes, 1) // unit) * unit
        self._map = mmap.mmap(-1, max(stride * blocks, 1))
        self._bytes = memoryview(self._map)
        address = int(np.frombuffer(self._bytes, dtype=np.uint8).ctypes.data)
        self._address = address
        self.planes: tuple[Plane, ...] = (Plane(address, stride, nbytes),)

    @property
    def nbytes(self) -> int:
        """Bytes mapped."""
        return len(self._bytes)

    def view(self, address: int, nbytes: int) -> memoryview:
        """Bytes at an absolute address inside the mapping."""
        start = address - self._address
        return self._bytes[start : start + nbytes]

    def tensor(self, address: int, extent: Extent) -> torch.Tensor:
        """A torch view of one tensor of the block at `address`."""
        import torch  # noqa: PLC0415 - import torch costs a second; bookkeeping does without

        dtype = torch_dtype(extent.dtype)
        start = address - self._address + extent.offset
        if extent.span == 0:
            return torch.empty(extent.shape, dtype=dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=extent.span, offset=start)
        return raw.view(dtype).as_strided(extent.shape, extent.strides)

    def close(self) -> None:
        """Unmap, or leave that to the last view a caller still has."""
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            # A caller's tensor still looks at the memory. The mapping ends with the last view.
            return


def _check_axes(extent: Extent, tensor: torch.Tensor) -> None:
    """Compare one tensor with what the layout says of it, before any address is computed."""
    found = str(tensor.dtype).removeprefix("torch.")
    shape, strides = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
    if found != extent.dtype or shape != extent.shape:
        raise LayoutMismatch(
            f"extent {extent.name!r} of layer {extent.layer}: memory is {found}{list(shape)} per "
            f"block, layout says {extent.dtype}{list(extent.shape)}"
        )
    for axis, size in enumerate(shape):
        if size > 1 and strides[axis] != extent.strides[axis]:
            raise LayoutMismatch(
                f"extent {extent.name!r} of layer {extent.layer}: memory has strides "
                f"{list(strides)} in elements, layout says {list(extent.strides)}"
            )
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise LayoutMismatch(
                    f"extent {extent.name!r} of layer {extent.layer}: strides "
                    f"{list(tensor.stride())} of shape {list(tensor.shape)} overlap"
                )
            reach += stride * (size - 1)


class TensorStorage:
    """Memory that a host program owns, one tensor per extent, block axis first.

    The tensors' storages are referenced for as long as this object lives: the program may drop its
    own references, and for a quarantined block they live for ever.

    Args:
        tensors: the memory of each extent by (name, layer), shape (blocks, *extent.shape).
        layout: what the program says of it; every extent in a plane of its own, in order.

    Raises:
        LayoutMismatch: real shape, dtype or strides differ from the layout, or elements overlap.
        SpanError: a block reaches past the tensor's allocation.
        WrongDevice: tensors on different devices.
    """

    def __init__(
        self, tensors: Mapping[tuple[str, int | None], torch.Tensor], layout: BlockLayout
    ) -> None:
        planes = []
        kinds = set()
        blocks = set()
        self._tensors = []
        for number, extent in enumerate(layout.extents):
            tensor = tensors.get((extent.name, extent.layer))
            if tensor is None or extent.plane != number or extent.offset != 0:
                raise LayoutMismatch(
                    f"extent {extent.name!r} of layer {extent.layer}: expected a tensor for it, "
                    f"plane {number} and offset 0; found plane {extent.plane}, offset "
                    f"{extent.offset}, tensors {sorted(tensors, key=str)}"
                )
            _check_axes(extent, tensor)
            stride = tensor.stride(0) * extent.itemsize
            self._check_inside(extent, tensor, stride)
            planes.append(Plane(tensor.data_ptr(), stride, extent.span))
            device = tensor.device
            kinds.add("host" if device.type == "cpu" else f"{device.type}:{device.index or 0}")
            blocks.add(tensor.shape[0])
            self._tensors.append(tensor)
        if len(kinds) != 1 or len(blocks) != 1 or len(tensors) != len(layout.extents):
            raise WrongDevice(
                f"one kind of memory, one number of blocks and one tensor per extent are "
                f"expected; found kinds {sorted(kinds)}, blocks {sorted(blocks)}, "
                f"{len(tensors)} tensors for {len(layout.extents)} extents"
            )
        self.kind = kinds.pop()
        self.blocks: int = blocks.pop()
        self.planes = tuple(planes)
        self.pinned = self.kind == "host" and all(t.is_pinned() for t in self._tensors)
        self._check_overlap(layout)

    @staticmethod
    def _check_inside(extent: Extent, tensor: torch.Tensor, stride: int) -> None:
        """Every byte of every block must lie in the tensor's allocation."""
        start = tensor.storage_offset() * extent.itemsize
        end = start + max(tensor.shape[0] - 1, 0) * stride + extent.span
        if end > tensor.untyped_storage().nbytes():
            raise SpanError(
                f"extent {extent.name!r} of layer {extent.layer} ends at byte {end} of an "
                f"allocation of {tensor.untyped_storage().nbytes()} bytes"
            )

    def _check_overlap(self, layout: BlockLayout) -> None:
        """No byte of a block may belong to two extents."""
        pieces = []
        for extent, plane in zip(layout.extents, self.planes, strict=True):
            axes = extent.tail
            starts = extent.offsets(axes) + plane.address
            run = int(np.prod(extent.shape[axes:], dtype=np.int64)) * extent.itemsize
            pieces.append(np.stack((starts, starts + run), axis=1))
        spans = np.concatenate(pieces)
        spans = spans[np.argsort(spans[:, 0])]
        if len(spans) > 1 and bool((spans[1:, 0] < spans[:-1, 1]).any()):
            raise LayoutMismatch("two extents of one block share bytes")

    def view(self, address: int, nbytes: int) -> memoryview:
        """Bytes at an absolute address of host memory."""
        if self.kind != "host":
            raise WrongDevice(f"bytes of {self.kind} memory cannot be viewed from the host")
        for tensor in self._tensors:
            base = tensor.untyped_storage().data_ptr()
            size = tensor.untyped_storage().nbytes()
            if base <= address and address + nbytes <= base + size:
                raw = tensor.untyped_storage()
                return _storage_bytes(raw)[address - base : address - base + nbytes]
        raise SpanError(f"{nbytes} bytes at {address:#x} lie in no tensor of this pool")

    def tensor(self, address: int, extent: Extent) -> torch.Tensor:
        """The caller's own tensor at the block that starts at `address`."""
        plane = self.planes[extent.plane]
        index = (address - plane.address) // plane.stride if plane.stride else 0
        return self._tensors[extent.plane][index]

    def close(self) -> None:
        """Drop the references; the memory is the program's."""
        self._tensors = []


def _storage_bytes(storage: torch.UntypedStorage) -> memoryview:
    """The whole allocation as writable bytes."""
    import torch  # noqa: PLC0415 - import torch costs a second; bookkeeping does without

    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return flat.numpy().data


def own_layout(tensors: Mapping[tuple[str, int | None], torch.Tensor]) -> BlockLayout:
    """Describe tensors as they are, one plane each: for callers that have no layout of their own.

    Args:
        tensors: by (name, layer), shape (blocks, ...).

    Raises:
        LayoutMismatch: a dtype that is not in `DTYPES`.
    """
    extents = []
    for plane, ((name, layer), tensor) in enumerate(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise LayoutMismatch(f"{name!r}: dtype {dtype}, expected one of {', '.join(DTYPES)}")
        extents.append(
            Extent(
                name,
                tuple(tensor.shape[1:]),
                dtype,
                layer=layer,
                plane=plane,
                strides=tuple(tensor.stride()[1:]),
            )
        )
    return BlockLayout(tuple(extents), tuple(e.span for e in extents))
