"""A started CUDA device on a GPU that is not there, driven step by step or by itself."""

import threading
import time
from typing import Any, final

import torch
from tests.transfer.gpu_kit import FakeDriver, FakeKernels, device_pool, pinned_pool

from transfer._cuda_watch import CudaFence
from transfer._extent import BlockLayout, Extent
from transfer._fence import Completion
from transfer._handle import Block, Blocks, Handle
from transfer._memory import Pool
from transfer._work import Copy
from transfer.cuda import CudaDevice

PAGE = BlockLayout.packed(
    [
        Extent(name, (8, 4, 32), "bfloat16", layer=layer)
        for name in ("key", "value")
        for layer in range(4)
    ]
)
"""16 KiB: four pages fill the smallest staging area."""


def each(handle: Handle) -> list[Block]:
    """The blocks of a handle, one by one."""
    return list(handle) if isinstance(handle, Blocks) else [handle]


@final
class Rig:
    """Device, pages with random bytes, and slots.

    Args:
        manual: the GPU runs in `driver.run` only.
        blocks: pages, and slots.
        layout: of both.
        options: of the device.
    """

    def __init__(
        self,
        *,
        manual: bool = True,
        blocks: int = 64,
        layout: BlockLayout = PAGE,
        start: bool = True,
        **options: Any,
    ) -> None:
        self.driver = FakeDriver(manual=manual)
        self.kernels = FakeKernels(self.driver)
        chosen = {"staging": 1 << 16, "spin": float("inf"), **options}
        self.device = CudaDevice(driver=self.driver, kernels=self.kernels, **chosen)
        if start:
            self.device.start()
        self.gpu = device_pool(layout, blocks)
        self.host = pinned_pool(layout, blocks, self.driver)
        self.seen: list[Completion] = []
        self._rung = threading.Event()
        self._leased: dict[Pool, Blocks] = {}

    def copy(self, count: int, first: int = 0, *, outward: bool = True) -> Copy:
        """A copy of pages `first` to ``first + count``, filled afresh, to slots or back."""
        pages, slots = self.leased(self.gpu), self.leased(self.host)
        ends = (pages[first : first + count], slots[first : first + count])
        self.fill(ends[0 if outward else 1], first + count)
        return Copy(*(ends if outward else ends[::-1]))

    def leased(self, pool: Pool) -> Blocks:
        """All blocks of a pool."""
        if pool not in self._leased:
            self._leased[pool] = pool.lease(pool.blocks).handle
        return self._leased[pool]

    @staticmethod
    def fill(blocks: Blocks, seed: int) -> None:
        """Random bytes."""
        generator = torch.Generator().manual_seed(seed)
        for block in blocks:
            for extent in block.pool.layout.extents:
                tensor = block.tensor(extent.name, extent.layer, write=True)
                tensor.view(torch.int16).random_(generator=generator)

    @staticmethod
    def same(work: Copy) -> bool:
        """Whether both sides have the same bytes."""
        return all(
            torch.equal(
                src.tensor(extent.name, extent.layer).view(torch.int16),
                dst.tensor(extent.name, extent.layer).view(torch.int16),
            )
            for src, dst in zip(each(work.src), each(work.dst), strict=True)
            for extent in PAGE.extents
        )

    def post(self, work: Any, *waits: CudaFence) -> CudaFence:
        """Enqueue."""
        fence = self.device.enqueue(work, waits)
        assert isinstance(fence, CudaFence)
        return fence

    def ends(self, count: int) -> list[Completion]:
        """Wait until so many completions have come, running the GPU meanwhile; all of them."""
        queue = self.device.completions
        queue.wake = self._rung.set
        end = time.monotonic() + 10
        while True:
            self._rung.clear()
            queue.open()
            while queue.items:
                self.seen.append(queue.items.popleft())
            if len(self.seen) >= count:
                return self.seen
            self.driver.run()
            # Short, since a long job is posted on by a thread of the device as it gets ahead.
            self._rung.wait(1e-3)
            assert time.monotonic() < end, f"{len(self.seen)} of {count} completions came"

    def close(self) -> None:
        """Stop the device and the GPU."""
        self.device.close()
        self.driver.stop()
