"""Pages: each tensor dense, in a plane of its own."""

import pytest
import torch
from tests.transfer.cuda_rig import PAGE
from tests.transfer.gpu_kit import device_pool

from transfer._cuda_api import CudaMissing
from transfer._cuda_memory import ALIGN, PLANE_ALIGN, DevicePool, DeviceStorage, paged
from transfer._errors import LayoutMismatch, WrongDevice
from transfer._extent import BlockLayout, Extent


def test_every_tensor_gets_a_plane() -> None:
    plan = paged(PAGE)
    assert [extent.plane for extent in plan.extents] == list(range(8))
    assert all(extent.offset == 0 and extent.contiguous for extent in plan.extents)
    assert plan.plane_bytes == tuple(extent.nbytes for extent in PAGE.extents)


def test_planes_do_not_overlap_and_are_aligned() -> None:
    plan = paged(BlockLayout.packed([Extent("a", (5,), "uint8"), Extent("b", (3, 3), "float32")]))
    storage = DeviceStorage(plan, 7, "cpu")
    ends = 0
    base = storage.planes[0].address
    for plane, nbytes in zip(storage.planes, plan.plane_bytes, strict=True):
        assert plane.stride % ALIGN == 0
        assert nbytes <= plane.stride < nbytes + ALIGN
        assert (plane.address - base) % PLANE_ALIGN == 0
        assert plane.address - base >= ends
        ends = plane.address - base + 7 * plane.stride
    assert storage.raw is not None
    assert ends <= len(storage.raw)
    assert not bool(storage.raw.any())


def test_views_of_one_block_and_of_all_are_the_same_memory() -> None:
    pool = device_pool(PAGE, 6)
    storage = pool.storage
    assert isinstance(storage, DeviceStorage)
    whole = storage.whole(pool.layout.extent("value", 2), 6)
    assert whole.shape == (6, 8, 4, 32)
    lease = pool.lease(6)
    for block in lease.handle:
        block.tensor("value", 2, write=True).fill_(float(block.id + 1))
    assert [float(page[0, 0, 0]) for page in whole] == [1, 2, 3, 4, 5, 6]
    assert not bool(storage.whole(pool.layout.extent("value", 1), 6).any())


def test_what_cannot_be_looked_at() -> None:
    pool = device_pool(BlockLayout((Extent("a", (1,), "uint8"),), (1,)), 2)
    storage = pool.storage
    assert isinstance(storage, DeviceStorage)
    with pytest.raises(WrongDevice, match="use a tensor"):
        storage.view(storage.planes[0].address, 1)
    storage.planes = (storage.planes[0]._replace(stride=12),)
    with pytest.raises(LayoutMismatch, match="12 bytes apart, no multiple of an element of 8"):
        storage.whole(Extent("a", (1,), "float64"), 2)
    storage.close()
    with pytest.raises(WrongDevice, match="was given back"):
        storage.tensor(storage.planes[0].address, pool.layout.extents[0])


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaMissing, match="sees no GPU, need a torch built for CUDA 13"):
        DevicePool(PAGE, 1)
    with pytest.raises(CudaMissing, match="need one like 'cuda:0'"):
        DevicePool(PAGE, 1, device="cpu")
