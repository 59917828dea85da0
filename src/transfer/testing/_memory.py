"""Memory that is no device's: a pretend kind of memory for `SimDevice`, and bytes of any pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from transfer._errors import WrongDevice
from transfer._memory import Pool
from transfer._storage import MappedStorage, Plane, Storage, torch_dtype

if TYPE_CHECKING:
    import torch

    from transfer._extent import BlockLayout, Extent, HasBlockLayout
    from transfer._handle import Block


@final
class SimStorage:
    """Process memory under any name of a kind; blocks lie next to each other, without padding.

    Nothing is ever unmapped, so that a use after `close` can be seen instead of ending the
    process: `SimDevice` counts it.

    Args:
        layout: what one block takes in each plane.
        blocks: how many.
        kind: ``"host"``, or a pretend device such as ``"sim:0"`` that the host cannot look into.

    Attributes:
        closed: whether the memory was given back.
    """

    pinned: bool = False

    def __init__(self, layout: BlockLayout, blocks: int, *, kind: str = "sim:0") -> None:
        self.kind = kind
        self.closed = False
        self._regions = [np.zeros(max(n * blocks, 1), np.uint8) for n in layout.plane_bytes]
        self._views = [memoryview(region.data) for region in self._regions]
        self.planes: tuple[Plane, ...] = tuple(
            Plane(int(region.ctypes.data), nbytes, nbytes)
            for region, nbytes in zip(self._regions, layout.plane_bytes, strict=True)
        )

    def raw(self, address: int, nbytes: int) -> memoryview:
        """Writable bytes at an absolute address, whatever the kind: the device's own look."""
        for plane, view in zip(self.planes, self._views, strict=True):
            start = address - plane.address
            if start >= 0 and start + nbytes <= len(view):
                return view[start : start + nbytes]
        raise WrongDevice(f"{nbytes} bytes at {address:#x} lie in no plane of this memory")

    def view(self, address: int, nbytes: int) -> memoryview:
        """Host memory as writable bytes.

        Raises:
            WrongDevice: the memory pretends to be a device's.
        """
        if self.kind != "host":
            raise WrongDevice(f"bytes of {self.kind} memory cannot be viewed from the host")
        return self.raw(address, nbytes)

    def tensor(self, address: int, extent: Extent) -> torch.Tensor:
        """A view of one tensor of the block that starts at `address`."""
        import torch  # noqa: PLC0415 - import torch costs a second; bookkeeping does without

        dtype = torch_dtype(extent.dtype)
        if extent.span == 0:
            return torch.empty(extent.shape, dtype=dtype)
        flat = torch.frombuffer(self.raw(address + extent.offset, extent.span), dtype=torch.uint8)
        return flat.view(dtype).as_strided(extent.shape, extent.strides)

    def close(self) -> None:
        """Note that the memory was given back."""
        self.closed = True


@final
class KeptStorage(MappedStorage):
    """Mapped host memory that real devices can use, and that `close` does not unmap.

    A use after `close` then does damage that can be seen, instead of ending the process.

    Attributes:
        closed: whether the memory was given back.
    """

    closed: bool = False

    def close(self) -> None:
        """Note that the memory was given back; it is unmapped with the last reference."""
        self.closed = True


@final
class SimPool(Pool):
    """Blocks of a pretend device's memory.

    Args:
        layout: how the tensors lie inside a block; any number of planes.
        blocks: how many.
        kind: the pretend device, or ``"host"``.
        foreign: whether they stand for blocks that a host program owns.
        name: for messages.
    """

    def __init__(
        self,
        layout: HasBlockLayout,
        blocks: int,
        *,
        kind: str = "sim:0",
        foreign: bool = False,
        name: str = "sim pool",
    ) -> None:
        plan = layout.block_layout
        storage = SimStorage(plan, blocks, kind=kind)
        super().__init__(plan, blocks, storage, name=name, foreign=foreign)


def memory_at(storage: Storage, address: int, nbytes: int) -> memoryview:
    """Writable bytes of any storage that this process can reach, past every check of the pool.

    Raises:
        WrongDevice: memory of a real device.
    """
    if isinstance(storage, SimStorage):
        return storage.raw(address, nbytes)
    return storage.view(address, nbytes)


def peek(block: Block, *, plane: int = 0) -> bytes:
    """What a block's bytes are right now, whoever writes them: a test's look, never a program's."""
    pool = block.pool
    return bytes(
        memory_at(pool.storage, pool.address(plane, block.id), pool.layout.plane_bytes[plane])
    )


def poke(block: Block, data: bytes, *, plane: int = 0) -> None:
    """Change a block's bytes past every check: a test's hand, never a program's."""
    pool = block.pool
    memory_at(pool.storage, pool.address(plane, block.id), len(data))[:] = data
