"""DevicePool: pages on a GPU, one plane for each component of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from transfer._cuda_api import CudaMissing
from transfer._errors import LayoutMismatch, WrongDevice
from transfer._extent import BlockLayout, Extent
from transfer._memory import Pool
from transfer._storage import Plane, torch_dtype

if TYPE_CHECKING:
    import torch

    from transfer._extent import HasBlockLayout

ALIGN: Final = 16
"""Bytes: the stride of a plane is a multiple, so that kernels move whole words of this size."""
PLANE_ALIGN: Final = 512


def paged(layout: BlockLayout) -> BlockLayout:
    """The same tensors, each dense and in a plane of its own: how a paged cache lies on a GPU."""
    extents = tuple(
        Extent(e.name, e.shape, e.dtype, layer=e.layer, plane=number)
        for number, e in enumerate(layout.extents)
    )
    return BlockLayout(extents, tuple(e.nbytes for e in extents))


@final
class DeviceStorage:
    """One allocation of torch's, cut into planes.

    Args:
        layout: each extent in a plane of its own.
        blocks: how many.
        device: where, as torch names it.
    """

    pinned: bool = False

    def __init__(self, layout: BlockLayout, blocks: int, device: str) -> None:
        import torch  # noqa: PLC0415 - import torch costs a second; bookkeeping does without

        self._torch: Any = torch
        self.kind = device
        strides = [-(-size // ALIGN) * ALIGN for size in layout.plane_bytes]
        starts = []
        end = 0
        for stride in strides:
            starts.append(end)
            end += -(-stride * blocks // PLANE_ALIGN) * PLANE_ALIGN
        # Zeroed, so that no page ever shows what was in the memory before.
        self.raw: torch.Tensor | None = torch.zeros(end, dtype=torch.uint8, device=device)
        if device != "cpu":
            torch.cuda.current_stream(device).synchronize()
        self._base = self.raw.data_ptr()
        self.planes = tuple(
            Plane(self._base + start, stride, size)
            for start, stride, size in zip(starts, strides, layout.plane_bytes, strict=True)
        )

    def view(self, address: int, nbytes: int) -> memoryview:
        """Refuse: the host cannot look at it."""
        raise WrongDevice(f"{nbytes} bytes at {address:#x} of {self.kind} memory: use a tensor")

    def tensor(self, address: int, extent: Extent) -> torch.Tensor:
        """A view of one tensor of one block."""
        return self._strided(address + extent.offset, extent, (), ())

    def whole(self, extent: Extent, blocks: int) -> torch.Tensor:
        """A view of one tensor of all blocks, block axis first."""
        plane = self.planes[extent.plane]
        if plane.stride % extent.itemsize:
            raise LayoutMismatch(
                f"extent {extent.name!r}: blocks are {plane.stride} bytes apart, no multiple of an "
                f"element of {extent.itemsize}"
            )
        step = plane.stride // extent.itemsize
        return self._strided(plane.address + extent.offset, extent, (blocks,), (step,))

    def _strided(
        self, address: int, extent: Extent, sizes: tuple[int, ...], steps: tuple[int, ...]
    ) -> torch.Tensor:
        if self.raw is None:
            raise WrongDevice(f"the {self.kind} memory of {extent.name!r} was given back")
        dtype = torch_dtype(extent.dtype)
        start = address - self._base
        usable = (len(self.raw) - start) // extent.itemsize * extent.itemsize
        tail = self.raw[start : start + usable].view(dtype)
        view: torch.Tensor = tail.as_strided((*sizes, *extent.shape), (*steps, *extent.strides))
        return view

    def close(self) -> None:
        """Give the allocation back to torch."""
        self.raw = None


@final
class DevicePool(Pool):
    """Pages on a GPU: each tensor of the layout dense, in a plane of its own, zeroed.

    Args:
        layout: which tensors a page has; where they lie in it is decided here.
        blocks: how many pages.
        device: which GPU.
        name: for messages.

    Raises:
        CudaMissing: torch cannot use that GPU.
    """

    def __init__(
        self,
        layout: HasBlockLayout,
        blocks: int,
        *,
        device: int | str = 0,
        name: str = "device pool",
    ) -> None:
        place = f"cuda:{device}" if isinstance(device, int) else device
        _check_torch(place)
        plan = paged(layout.block_layout)
        self._storage = DeviceStorage(plan, blocks, place)
        super().__init__(plan, blocks, self._storage, name=name)

    def cache(self, name: str, layer: int | None = None) -> torch.Tensor:
        """One tensor of all pages, as kernels of the model read it: (blocks, *shape).

        What is done with it is not checked: work on pages that operations may touch has to hold
        them too, by a `Launch`, an `External` or ``after=``.
        """
        return self._storage.whole(self.layout.extent(name, layer), self.blocks)


def _check_torch(place: str) -> None:
    import torch  # noqa: PLC0415 - import torch costs a second; bookkeeping does without

    if not place.startswith("cuda:"):
        raise CudaMissing(f"found device {place!r}, need one like 'cuda:0'")
    if not torch.cuda.is_available():
        raise CudaMissing(
            f"found torch {torch.__version__} (CUDA {torch.version.cuda}) that sees no GPU, need "
            f"a torch built for CUDA 13 and a visible GPU for {place}"
        )
