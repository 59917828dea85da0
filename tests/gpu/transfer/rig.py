"""What the suites on a real GPU share."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from transfer import BlockLayout, Blocks, Extent, Pool
from transfer._cuda_api import CudaError
from transfer._cuda_driver import CudaDriver
from transfer.cuda import CudaDevice, DevicePool, PinnedPool

cu: Any = torch.cuda
"""torch.cuda, whose classes have no annotations."""


def layout(layers: int = 4, shape: tuple[int, ...] = (16, 8, 128)) -> BlockLayout:
    """Keys and values of some layers, as a slot holds them."""
    return BlockLayout.packed(
        [
            Extent(name, shape, "bfloat16", layer=layer)
            for name in ("key", "value")
            for layer in range(layers)
        ]
    )


def scattered(pool: Pool, count: int, seed: int = 0) -> Blocks:
    """Leased blocks of a pool in random order."""
    handle = pool.lease(count).handle
    order = np.random.default_rng(seed).permutation(count)
    return Blocks(pool, handle.ids[order], handle.generations[order])


def device_bytes(pool: DevicePool, name: str, layer: int | None, ids: Any) -> torch.Tensor:
    """One tensor of some blocks, as bytes on the host."""
    where = torch.as_tensor(np.asarray(ids, dtype=np.int64), device=pool.kind)
    picked = pool.cache(name, layer)[where].contiguous()
    return picked.reshape(len(where), -1).view(torch.uint8).cpu()


def host_bytes(pool: Pool, name: str, layer: int | None, ids: Any) -> torch.Tensor:
    """The same of slots."""
    extent = pool.layout.extent(name, layer)
    rows: list[npt.NDArray[np.uint8]] = []
    for block_id in map(int, ids):
        raw = (ctypes.c_uint8 * extent.nbytes).from_address(
            pool.address(0, block_id) + extent.offset
        )
        rows.append(np.ctypeslib.as_array(raw).copy())
    return torch.from_numpy(np.stack(rows))


def fill_device(pool: DevicePool, seed: int = 1) -> None:
    """Random bytes everywhere."""
    generator = torch.Generator(device=pool.kind).manual_seed(seed)
    for extent in pool.layout.extents:
        whole = pool.cache(extent.name, extent.layer)
        bits = whole.view(torch.int16) if extent.itemsize == 2 else whole.view(torch.uint8)
        bits.random_(generator=generator)
    torch.cuda.synchronize()


def fill_host(pool: Pool, seed: int = 2) -> None:
    """Random bytes everywhere, padding included."""
    plane = pool.storage.planes[0]
    raw = (ctypes.c_uint8 * (plane.stride * pool.blocks)).from_address(plane.address)
    view = np.ctypeslib.as_array(raw)
    view[:] = np.random.default_rng(seed).integers(0, 256, len(view), dtype=np.uint8)


def same(pages: Blocks, slots: Blocks, names: tuple[str, ...] | None = None) -> bool:
    """Whether pages and slots hold the same bytes."""
    assert isinstance(pages.pool, DevicePool)
    for extent in pages.pool.layout.extents:
        if names is not None and extent.name not in names:
            continue
        left = device_bytes(pages.pool, extent.name, extent.layer, pages.ids)
        right = host_bytes(slots.pool, extent.name, extent.layer, slots.ids)
        if not torch.equal(left, right):
            return False
    return True


@contextmanager
def pools(
    pages: int, slots: int, plan: BlockLayout | None = None, **options: Any
) -> Iterator[tuple[DevicePool, PinnedPool]]:
    """Pages and slots of one layout; closed at the end if nothing holds them."""
    chosen = plan or layout()
    gpu = DevicePool(chosen, pages)
    host = PinnedPool(chosen, slots, **options)
    yield gpu, host
    gpu.close()
    host.close()


class Breaking:
    """The real driver, one of whose calls fails.

    Everything else is passed on.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._real = CudaDriver(ordinal)
        self.left: dict[str, int] = {}

    def fail(self, name: str, nth: int) -> None:
        """Make the nth call from now on fail before it reaches the driver."""
        self.left[name] = nth

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name not in self.left:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            left = self.left.get(name, 0) - 1
            if left == 0:
                del self.left[name]
                raise CudaError(2, name, "injected")
            if name in self.left:
                self.left[name] = left
            return real(*args, **kwargs)

        return call


def sleep(milliseconds: float) -> None:
    """Keep the current stream busy for about so long."""
    cu._sleep(int(milliseconds * 1.7e6))


def device(**options: Any) -> CudaDevice:
    """A device with small staging areas, so that small copies take many chunks."""
    return CudaDevice(0, **{"staging": 1 << 20, **options})
