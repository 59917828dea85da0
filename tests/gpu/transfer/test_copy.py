"""Bytes of copies on a real GPU, by every way, and the memory they go between."""

import gc

import numpy as np
import pytest
import torch
from tests.gpu.transfer.rig import (
    cu,
    device,
    device_bytes,
    fill_device,
    fill_host,
    host_bytes,
    layout,
    pools,
    same,
    scattered,
)

from transfer import BlockLayout, Blocks, Copy, Engine, Extent, HostPool, Pool, WrongDevice
from transfer.cuda import CudaDevice, DevicePool, PinnedPool, Way

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.may_block]

WAYS = [Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 7, 150])
async def test_every_way_moves_every_byte(way: Way, count: int) -> None:
    with pools(200, 220) as (gpu, host):
        fill_device(gpu)
        fill_host(host)
        pages, slots, back = scattered(gpu, count), scattered(host, count, 5), None
        used = set(slots.ids.tolist())
        others = np.array([i for i in range(host.blocks) if i not in used])
        before = host_bytes(host, "key", 0, others)
        chosen = device(ways=(way,))
        async with Engine(chosen) as engine:
            await engine.copy(pages, slots, after=())
            assert same(pages, slots)
            assert torch.equal(before, host_bytes(host, "key", 0, others))
            back = scattered(gpu, min(count, 50), 9)
            await engine.copy(slots[: len(back)], back, after=())
            assert same(back, slots[: len(back)])
            assert same(pages, slots)
        assert chosen.taken == {way: 2}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5), "uint8"), ((7, 3), "float32"), ((16, 2, 24), "bfloat16"), ((64, 8, 128), "bfloat16")],
)
async def test_sizes_that_are_no_round_numbers(
    way: Way, shape: tuple[int, ...], dtype: str
) -> None:
    extents = [Extent("a", shape, dtype, layer=i) for i in range(3)] + [Extent("b", (5,), "uint8")]
    plan = BlockLayout.packed(extents, align=1 if dtype == "uint8" else 4)
    with pools(40, 40, plan) as (gpu, host):
        fill_host(host)
        slots, pages, again = scattered(host, 30), scattered(gpu, 30, 4), host.lease(10).handle
        async with Engine(device(ways=(way,))) as engine:
            await engine.copy(slots, pages, after=())
            assert same(pages, slots)
            await engine.copy(pages[:10], again, after=(), names=("a",))
            assert same(pages[:10], again, ("a",))


async def test_copies_inside_the_gpu() -> None:
    with pools(100, 10) as (gpu, _host):
        fill_device(gpu)
        src, dst = scattered(gpu, 40), scattered(gpu, 40, 3)
        async with Engine(device()) as engine:
            await engine.copy(src, dst, after=())
        for extent in gpu.layout.extents:
            assert torch.equal(
                device_bytes(gpu, extent.name, extent.layer, src.ids),
                device_bytes(gpu, extent.name, extent.layer, dst.ids),
            )


@pytest.mark.parametrize("way", WAYS)
async def test_foreign_memory_with_strides_of_its_own(way: Way) -> None:  # case 17
    """Keys and values are halves of one tensor, rows are padded: neighbours stay untouched."""
    blocks, pad = 32, 8
    raw = torch.zeros((blocks, 2, 16, 8, 128 + pad), dtype=torch.bfloat16, device="cuda:0")
    # Compared as integers: random bits are sometimes NaN, which equals nothing.
    bits = raw.view(torch.int16)
    bits.random_()
    tensors: dict[tuple[str, int | None], torch.Tensor] = {
        ("key", 0): raw[:, 0, :, :, :128],
        ("value", 0): raw[:, 1, :, :, :128],
    }
    step = 128 + pad
    plan = BlockLayout(
        tuple(
            Extent(n, (16, 8, 128), "bfloat16", layer=0, plane=p, strides=(8 * step, step, 1))
            for p, n in enumerate(("key", "value"))
        ),
        tuple((15 * 8 * step + 7 * step + 128) * 2 for _ in range(2)),
    )
    foreign = Pool.over(tensors, plan)
    host = PinnedPool(layout(1), blocks)
    torch.cuda.synchronize()
    before = bits.clone()
    ids = np.random.default_rng(1).permutation(blocks)[:20]
    slots = host.lease(20).handle
    async with Engine(device(ways=(way,))) as engine:
        await engine.copy(foreign.blocks_of(ids), slots, after=())
        for name in ("key", "value"):
            want = tensors[name, 0][torch.as_tensor(ids, device="cuda:0")].contiguous().cpu()
            got = host_bytes(host, name, 0, slots.ids)
            assert torch.equal(want.reshape(20, -1).view(torch.uint8), got)
        fill_host(host, 7)
        await engine.copy(slots, foreign.blocks_of(ids), after=())
    changed = torch.zeros(blocks, dtype=torch.bool, device="cuda:0")
    changed[torch.as_tensor(ids, device="cuda:0")] = True
    assert torch.equal(bits[~changed], before[~changed])
    assert torch.equal(bits[..., 128:], before[..., 128:])
    for name in ("key", "value"):
        got = tensors[name, 0][torch.as_tensor(ids, device="cuda:0")].contiguous().cpu()
        want = host_bytes(host, name, 0, slots.ids)
        assert torch.equal(got.reshape(20, -1).view(torch.uint8), want)


@pytest.mark.parametrize("way", [Way.BATCH, Way.STAGED, Way.MAPPED])
async def test_a_pool_beyond_four_gigabytes(way: Way) -> None:  # case 18
    plan = BlockLayout.packed([Extent("key", (16, 8, 128), "bfloat16", layer=0)])
    gpu = DevicePool(plan, 170_000)
    assert gpu.storage.planes[0].stride * gpu.blocks > 5 << 30
    host = PinnedPool(plan, 4)
    lease = gpu.lease(gpu.blocks)
    gpu.cache("key", 0).view(torch.int16)[[0, -1]] = torch.randint(
        -999, 999, (2, 16, 8, 128), dtype=torch.int16, device="cuda:0"
    )
    torch.cuda.synchronize()
    ends = Blocks(gpu, lease.handle.ids[[0, -1]], lease.handle.generations[[0, -1]])
    slots, back = host.lease(2).handle, lease.handle[gpu.blocks - 3 : gpu.blocks - 1]
    async with Engine(device(ways=(way,))) as engine:
        await engine.copy(ends, slots, after=())
        assert same(ends, slots)
        await engine.copy(slots, back, after=())
        assert same(back, slots)


async def test_a_huge_batch_is_split() -> None:  # case 4, the size of it
    plan = BlockLayout.packed([Extent("a", (64,), "uint8", layer=i) for i in range(2)])
    with pools(60_000, 60_000, plan) as (gpu, host):
        fill_device(gpu)
        pages, slots = scattered(gpu, 60_000), host.lease(60_000).handle
        for way in (Way.BATCH, Way.STAGED, Way.MAPPED):
            fill_host(host)
            async with Engine(device(ways=(way,))) as engine:
                await engine.copy(pages, slots, after=())
            assert same(pages, slots)


async def test_many_copies_at_once_stay_apart() -> None:
    with pools(600, 600) as (gpu, host):
        fill_device(gpu)
        fill_host(host)
        chosen = device(spin=0.0)
        async with Engine(chosen) as engine:
            pairs = [(gpu.lease(2).handle, host.lease(2).handle) for _ in range(250)]
            ops = [await engine.submit(Copy(a, b), after=()) for a, b in pairs]
            for op in ops:
                await op.wait()
            assert all(same(a, b) for a, b in pairs[::10])


async def test_registrations_are_not_crossed_by_a_dma() -> None:
    with pools(64, 64, registration=3 << 20) as (gpu, host):
        assert host.placement.registrations > 5
        fill_device(gpu)
        pages, slots = gpu.lease(64).handle, host.lease(64).handle
        for way in WAYS:
            fill_host(host)
            async with Engine(device(ways=(way,))) as engine:
                await engine.copy(pages, slots, after=())
                assert same(pages, slots)


async def test_pageable_memory_is_refused() -> None:
    plan = layout(1)
    gpu, host = DevicePool(plan, 2), HostPool(plan, 2)
    async with Engine(device()) as engine:
        with pytest.raises(WrongDevice, match="PinnedPool"):
            await engine.copy(gpu.lease().handle, host.lease().handle, after=())


async def test_the_source_may_be_dropped_at_once() -> None:  # case 12
    with pools(1, 8) as (_gpu, host):
        slot = host.lease().handle
        tensor = torch.randint(0, 255, (1, 1 << 18), dtype=torch.uint8, device="cuda:0")
        want = tensor.cpu()
        plan = BlockLayout((Extent("bytes", (1 << 18,), "uint8"),), (1 << 18,))
        target = PinnedPool(plan, 1)
        foreign = Pool.over({("bytes", None): tensor}, plan)
        async with Engine(device()) as engine:
            cu._sleep(20_000_000)
            op = await engine.submit(
                Copy(foreign.block(0), target.lease().handle),
                after=torch.cuda.current_stream(),
            )
            del foreign, tensor
            gc.collect()
            for _ in range(4):
                torch.full((1, 1 << 18), 7, dtype=torch.uint8, device="cuda:0")
            await op.wait()
        assert torch.equal(want, host_bytes(target, "bytes", None, [0]))
        del slot


def test_the_current_device_and_context_stay_the_callers() -> None:
    before = torch.cuda.current_device()
    chosen = CudaDevice(0)
    chosen.start()
    assert torch.cuda.current_device() == before
    chosen.close()
    assert torch.ones(4, device="cuda").sum().item() == 4
