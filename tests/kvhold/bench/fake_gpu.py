"""The benchmarks' GPU, replaced by one that is not there and by small sizes: their logic is run."""

from types import ModuleType
from typing import Any

import pytest
import torch
from tests.transfer import gpu_kit

from kvhold.bench import gpu_rig
from transfer._extent import HasBlockLayout
from transfer._memory import Pool
from transfer.cuda import CudaDevice

MIB = 1 << 16


def _device(ordinal: int = 0, **options: Any) -> CudaDevice:
    driver = gpu_kit.FakeDriver(ordinal)
    kernels = gpu_kit.FakeKernels(driver)
    return CudaDevice(ordinal, driver=driver, kernels=kernels, **options)


def _device_pool(layout: HasBlockLayout, blocks: int) -> Pool:
    pool: Any = gpu_kit.device_pool(layout, blocks)
    storage: Any = pool.storage
    pool.cache = lambda name, layer=None: storage.whole(pool.layout.extent(name, layer), blocks)
    made: Pool = pool
    return made


def _pinned_pool(layout: HasBlockLayout, blocks: int) -> Pool:
    return gpu_kit.pinned_pool(layout, blocks, gpu_kit.FakeDriver(manual=True))


def stand_in(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> gpu_rig.Settings:
    """Patch benchmark modules; settings with small staging areas."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for module in (gpu_rig, *modules):
        for name, value in (
            ("CudaDriver", gpu_kit.FakeDriver),
            ("CudaDevice", _device),
            ("DevicePool", _device_pool),
            ("PinnedPool", _pinned_pool),
            ("MIB", MIB),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        if module is not gpu_rig and hasattr(module, "page_layout"):
            monkeypatch.setattr(module, "page_layout", lambda _layers: LAYOUT)
    return gpu_rig.Settings(staging=1 << 17)


LAYOUT = gpu_rig.page_layout(1)
