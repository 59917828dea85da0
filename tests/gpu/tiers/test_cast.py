"""Casting on a real GPU gives the bytes of the CPU."""

import numpy as np
import pytest
import torch
from tests.gpu.transfer.rig import device, device_bytes, host_bytes

from tiers._layout import PageLayout, PageOrder, ScaleScope
from tiers.fp8 import quantize
from tiers.kernels import PageCast
from transfer import Engine
from transfer.cuda import DevicePool, Pace, PinnedPool, Way

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.may_block]

SPECIAL = [
    0.0, -0.0, 2.0**-9, 2.0**-10, 447.0, 448.0, 464.0, 465.0, 480.0, 1e4, 1e-30,
    float("inf"), -float("inf"), float("nan"), -float("nan"),
]  # fmt: skip


def values_of(pool: DevicePool, layers: int, seed: int) -> None:
    """Gaussian values of many sizes; layer 0 has special ones, layer 1 is zero."""
    generator = torch.Generator(device="cuda:0").manual_seed(seed)
    for layer in range(layers):
        pool.cache("key", layer).view(torch.int16).random_(generator=generator)
        cache = pool.cache("value", layer)
        cache.normal_(generator=generator)
        sizes = torch.randint(-6, 3, (pool.blocks, 1, 1, 1), device="cuda:0", generator=generator)
        cache.mul_(10.0**sizes)
    special = torch.tensor(SPECIAL, device="cuda:0")
    pool.cache("value", 0)[0, 0, 0, : len(SPECIAL)] = special.to(pool.cache("value", 0).dtype)
    pool.cache("value", 1).zero_()
    torch.cuda.synchronize()


def shared_axes(order: PageOrder, scope: ScaleScope) -> tuple[int, ...]:
    token = 1 if order is PageOrder.NHD else 2
    return {
        ScaleScope.TENSOR: (1, 2, 3),
        ScaleScope.HEAD: (token, 3),
        ScaleScope.PAGE_HEAD: (token, 3),
        ScaleScope.TOKEN_HEAD: (3,),
    }[scope]


@pytest.mark.parametrize(
    ("way", "pace"),
    [(Way.STAGED, Pace()), (Way.STAGED, Pace(pitched=True, bare=True)), (Way.MAPPED, Pace())],
)
@pytest.mark.parametrize("scope", list(ScaleScope))
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_bytes_equal_those_of_the_cpu(  # case 53, case 54, case 56
    way: Way, pace: Pace, scope: ScaleScope, order: PageOrder, dtype: str
) -> None:
    plan = PageLayout(layers=3, page_size=16, kv_heads=8, head_dim=128, order=order, value=dtype)
    encoded = plan.encoded(scope=scope)
    gpu, back = DevicePool(plan, 50), DevicePool(plan, 50)
    keys = PinnedPool(plan.slot(["key"]), 50)
    values = PinnedPool(encoded.slot(["value", "value_scale"]), 50)
    values_of(gpu, 3, 5)
    pages, restored = gpu.lease(50).handle, back.lease(50).handle
    key_slots, value_slots = keys.lease(50).handle, values.lease(50).handle
    async with Engine(device(ways=(way,), pace=pace)) as engine:
        out = PageCast(gpu, keys, values, layout=encoded).pack(pages, key_slots, value_slots)
        await engine.run(out, after=())
        into = PageCast(back, keys, values, layout=encoded).unpack(key_slots, value_slots, restored)
        await engine.run(into, after=())
    for layer in range(3):
        assert torch.equal(
            device_bytes(gpu, "key", layer, pages.ids),
            host_bytes(keys, "key", layer, key_slots.ids),
        )
        assert torch.equal(
            device_bytes(gpu, "key", layer, pages.ids),
            device_bytes(back, "key", layer, restored.ids),
        )
        where = torch.as_tensor(pages.ids)
        exact = gpu.cache("value", layer).cpu()[where]
        codes, scales = quantize(exact, shared=shared_axes(order, scope))
        got = host_bytes(values, "value", layer, value_slots.ids)
        assert torch.equal(codes.view(torch.uint8).reshape(50, -1), got)
        found = host_bytes(values, "value_scale", layer, value_slots.ids).view(torch.float32)
        assert torch.equal(scales.reshape(50, -1), found)
        want = (codes.float() * scales).to(exact.dtype)
        read = back.cache("value", layer).cpu()[torch.as_tensor(restored.ids)]
        assert torch.equal(want.isnan(), read.isnan())
        assert torch.equal(want.nan_to_num(0.0), read.nan_to_num(0.0))


@pytest.mark.parametrize("shape", [(2,), (2, 8)])
async def test_given_scales_are_used(shape: tuple[int, ...]) -> None:
    plan = PageLayout(layers=2, page_size=16, kv_heads=8, head_dim=128, order=PageOrder.NHD)
    encoded = plan.encoded(scope=None)
    gpu = DevicePool(plan, 20)
    slots = PinnedPool(encoded.block_layout, 20)
    values_of(gpu, 2, 9)
    pages, both = gpu.lease(20).handle, slots.lease(20).handle
    scales = np.linspace(0.01, 2.0, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    async with Engine(device()) as engine:
        cast = PageCast(gpu, slots, slots, layout=encoded, scales=scales)
        await engine.run(cast.pack(pages, both, both), after=())
    for layer in range(2):
        exact = gpu.cache("value", layer).cpu()[torch.as_tensor(pages.ids)].float()
        scale = torch.from_numpy(scales[layer].reshape(1, 1, -1, 1))
        codes = (exact / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        codes[exact.isnan()] = 0x7F
        assert torch.equal(codes.reshape(20, -1), host_bytes(slots, "value", layer, both.ids))
