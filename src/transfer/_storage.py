"""Where the bytes of a pool are: planes of memory, mapped by us or owned by someone else.

Memory of our own is anonymous, page-aligned and MAP_SHARED: a forked child sees the same pages
instead of a copy-on-write image, so direct I/O that is under way in the parent stays right.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from transfer._errors import LayoutMismatch, SpanError, WrongDevice
from transfer._extent import DTYPES, BlockLayout, Extent, overlapping

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from transfer._extent import Int64Array

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


def let_go(storage: object) -> None:
    """Drop one such reference: there is proof that nothing touches the memory any more."""
    _kept.remove(storage)


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

    Raises:
        SpanError: `align` is less than 1.
    """

    kind: str = "host"
    pinned: bool = False

    def __init__(self, nbytes: int, blocks: int, *, align: int | None = None) -> None:
        if align is not None and align < 1:
            raise SpanError(f"blocks aligned to {align} bytes, expected at least 1")
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
        """Drop our references: the mapping ends with the last view or tensor of a caller.

        Not by closing it: `torch.frombuffer` keeps the mapping object but no buffer of it, so that
        closing would unmap the memory under the tensor.
        """
        self._bytes.release()
        del self._map


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
    if overlapping(tensor.shape, tensor.stride()):
        raise LayoutMismatch(
            f"extent {extent.name!r} of layer {extent.layer}: strides "
            f"{list(tensor.stride())} of shape {list(tensor.shape)} overlap"
        )


def _cells(pieces: Int64Array, stride: int) -> Int64Array:
    """Where the byte runs of block 0 lie when all blocks are folded onto one block stride.

    Args:
        pieces: (n, 2) of first byte and length, each at most `stride` long.
        stride: bytes from block to block.

    Returns:
        (m, 2) of cell and turn: the run covers this cell, a piece of [0, stride) that no run of
        `pieces` covers in part, in these turns of `stride` bytes.
    """
    turn, start = np.divmod(pieces[:, 0], stride)
    end = start + pieces[:, 1]
    over = end > stride  # goes on at the start of the next turn
    starts = np.concatenate((start, np.zeros(int(over.sum()), dtype=np.int64)))
    ends = np.concatenate((np.minimum(end, stride), end[over] - stride))
    turns = np.concatenate((turn, turn[over] + 1))
    edges = np.unique(np.concatenate((starts, ends)))
    first, last = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    width = last - first
    cell = np.repeat(first - np.cumsum(width) + width, width) + np.arange(int(width.sum()))
    return np.stack((cell, np.repeat(turns, width)), axis=1)


def _share_bytes(pieces: Int64Array, stride: int, blocks: int) -> bool:
    """Whether any two runs of any two blocks share a byte; see `_cells` for the arguments.

    Block i's run is block 0's run i turns later, so two runs meet in a cell exactly when their
    turns differ by less than the number of blocks.
    """
    cells = _cells(pieces, stride)
    cells = cells[np.lexsort((cells[:, 1], cells[:, 0]))]
    same = cells[1:, 0] == cells[:-1, 0]
    return bool((same & (cells[1:, 1] - cells[:-1, 1] < blocks)).any())


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
        blocks = tensor.shape[0]
        empty = blocks == 0 or extent.span == 0
        end = start if empty else start + (blocks - 1) * stride + extent.span
        if end > tensor.untyped_storage().nbytes():
            raise SpanError(
                f"extent {extent.name!r} of layer {extent.layer} ends at byte {end} of an "
                f"allocation of {tensor.untyped_storage().nbytes()} bytes"
            )

    def _check_overlap(self, layout: BlockLayout) -> None:
        """No byte may belong to two extents, of the same block or of two."""
        group: list[int] = []
        end = 0
        for number in sorted(range(len(self.planes)), key=lambda n: self.planes[n].address):
            plane = self.planes[number]
            if plane.nbytes == 0 or self.blocks == 0:
                continue
            if plane.address >= end:
                self._check_group(layout, group)
                group = []
            group.append(number)
            end = max(end, plane.address + (self.blocks - 1) * plane.stride + plane.nbytes)
        self._check_group(layout, group)

    def _check_group(self, layout: BlockLayout, group: list[int]) -> None:
        """Compare extents that lie between each other, such as K and V in one tensor."""
        if len(group) < 2:
            return
        names = [(layout.extents[n].name, layout.extents[n].layer) for n in group]
        strides = {self.planes[n].stride for n in group}
        if len(strides) != 1 and self.blocks > 1:
            raise LayoutMismatch(
                f"extents {names} lie between each other with block strides of {sorted(strides)} "
                f"bytes; expected one stride"
            )
        base = self.planes[group[0]].address
        pieces = []
        for number in group:
            extent = layout.extents[number]
            axes = extent.tail
            starts = extent.offsets(axes) + (self.planes[number].address - base)
            run = math.prod(extent.shape[axes:]) * extent.itemsize
            pieces.append(np.stack((starts, np.full_like(starts, run)), axis=1))
        runs = np.concatenate(pieces)
        # A single block needs no stride: one turn that holds everything.
        turn = strides.pop() if self.blocks > 1 else int(runs.sum(axis=1).max())
        if _share_bytes(runs, turn, self.blocks):
            raise LayoutMismatch(f"extents {names} share bytes")

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
