"""Attention on a GPU: a part of the sweep, the controls, the append kernel, and the whole way."""

import itertools
from typing import Any

import pytest
import torch

from attention import (
    Backends,
    MissingPart,
    PagedDecoder,
    PagedKVCache,
    PageTable,
    Unsupported,
    ValueScales,
)
from attention._scales import quantise, scale_of
from kvhold.bench import attention_check
from kvhold.bench.attention_cases import Case, build, lse_error, relative_error
from tiers._layout import PageOrder, ScaleScope
from transfer import Copy, Engine, HostDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.may_block,  # modules are built, and results compared, on the loop's thread
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # FlashInfer and what it imports warn on import
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def backends() -> Backends:
    return Backends()


@needs_gpu
def test_a_part_of_the_sweep(backends: Backends) -> None:
    """Every 37th combination at head_dim 128; `python -m kvhold.bench.attention` does them all."""
    verdicts: list[dict[str, Any]] = []
    attention_check.sweep(backends, set(), 300, verdicts.append, head_dims=(128,), every=37)
    wrong = [line for line in verdicts if line["verdict"] == "wrong"]
    assert not wrong
    right = {line["cell"].split()[0] for line in verdicts if line["verdict"] == "right"}
    assert "triton" in right
    combinations = {line["cell"].split(" ", 1)[1] for line in verdicts}
    computed = {line["cell"].split(" ", 1)[1] for line in verdicts if line["verdict"] == "right"}
    assert computed == combinations  # at least one backend computes every combination


@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scope", [ScaleScope.HEAD, ScaleScope.TOKEN_HEAD])
def test_every_shape_of_a_decode_program(head_dim: int, scope: ScaleScope) -> None:
    """A plan takes the shape that fits its batch; here each computes the same one."""
    kernels = pytest.importorskip("attention.kernels")
    by_token = scope is ScaleScope.TOKEN_HEAD
    for group in (4, 20) if head_dim == 128 else (4,):
        case = Case(head_dim=head_dim, group=group, scope=scope, lengths=(0, 1, 63, 700, 2049))
        inputs = build(case, "cuda")
        oracle = attention_check.expected(inputs, causal=False)
        parts = (inputs.table.indptr, inputs.table.indices, inputs.table.last_page_len)
        table = tuple(torch.from_numpy(part).cuda() for part in parts)
        batch, heads, dim = inputs.query.shape
        for tiles in kernels.decode_tiles(head_dim, group, by_token=by_token):
            for splits in (1, 3):
                out = torch.full_like(inputs.query, torch.nan)
                lse = torch.full(out.shape[:2], torch.nan, device="cuda")
                kernels.decode_pages(
                    inputs.view,
                    table,
                    inputs.query,
                    out,
                    lse,
                    sm_scale=dim**-0.5,
                    splits=splits,
                    partial=kernels.Partial.empty(batch, splits, heads, dim, out.device),
                    tiles=tiles,
                )
                assert relative_error(out, oracle.out) <= attention_check.OUT_MAX, tiles
                assert lse_error(lse, oracle.lse) <= attention_check.LSE_MAX, tiles


@needs_gpu
def test_damage_shows_on_every_backend(backends: Backends) -> None:
    for line in attention_check.controls(backends):
        if line["verdict"] != "refused":
            assert line["verdict"] == ("right" if line["damage"] == "none" else "wrong"), line


@needs_gpu
@pytest.mark.parametrize(
    ("order", "key", "value"),
    list(
        itertools.product(
            PageOrder, (torch.bfloat16, torch.float16), (torch.float8_e4m3fn, torch.float8_e5m2)
        )
    ),
)
@pytest.mark.parametrize("by_token", [False, True])
def test_append_is_bit_for_bit_the_plain_path(
    order: PageOrder, key: torch.dtype, value: torch.dtype, by_token: bool
) -> None:
    scales = ValueScales.per_token() if by_token else ValueScales.static([[0.01, 0.003]])
    cache = PagedKVCache(
        layers=1,
        pages=8,
        page_size=16,
        kv_heads=2,
        head_dim=128,
        key=key,
        value=value,
        order=order,
        scales=scales,
        device="cuda",
    )
    table = PageTable.raw([0, 4], [6, 1, 3, 0], [5], page_size=16, pages=8)
    keys, values = (torch.randn(53, 2, 128, device="cuda").to(key) for _ in range(2))
    values[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 60000.0])
    slots = cache.slots(table, [53])
    cache.append(0, keys, values, slots)
    page, place = slots.where // 16, slots.where % 16
    view = cache.layer(0)
    found = view.by_token(view.key)[page, place]
    assert torch.equal(found.view(torch.int16), keys.view(torch.int16))
    # The plain path on the CPU: bytes do not depend on where they were made.
    plain = values.cpu()
    step = scale_of(plain, (2,), value)[..., None] if by_token else view.scale.cpu()[None, :, None]
    if view.scope is ScaleScope.TOKEN_HEAD:
        assert torch.equal(view.by_token(view.scale)[page, place][..., None].cpu(), step)
        assert torch.equal(scale_of(values, (2,), value).cpu(), step[..., 0])
    codes, lost = (made.cuda() for made in quantise(plain, step, value))
    written = view.by_token(view.value)[page, place].view(torch.uint8)
    nan = torch.isnan(codes.to(torch.float32))
    assert torch.equal(written[~nan], codes.view(torch.uint8)[~nan])
    assert torch.isnan(written.view(value).to(torch.float32))[nan].all()
    assert cache.saturated() == [int(lost)]


@needs_gpu
@pytest.mark.anyio
@pytest.mark.parametrize("backend", ["flashinfer", "flashinfer-cores", "triton"])
@pytest.mark.parametrize("by_token", [False, True])
async def test_away_and_back_is_bit_for_bit_as_if_it_never_left(
    backends: Backends, backend: str, by_token: bool
) -> None:
    from transfer.cuda import CudaDevice, PinnedPool

    scales = ValueScales.per_token() if by_token else ValueScales.static([0.02, 0.01])
    cache = PagedKVCache(
        layers=2,
        pages=40,
        page_size=16,
        kv_heads=2,
        head_dim=128,
        scales=scales,
        device="cuda",
    )
    keys, values = (torch.randn(500, 2, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    query = torch.randn(1, 8, 128, device="cuda").to(torch.bfloat16)
    stream = torch.cuda.current_stream()
    with PinnedPool(cache.page_layout, 32) as host:
        async with Engine(CudaDevice(0), HostDevice()) as engine:
            decoder = PagedDecoder(engine, cache, backend=backend, backends=backends)
            lease = cache.lease(32)
            table = PageTable.of([lease], [500], pool=cache.pool, page_size=16)
            slots = cache.slots(table, [500])
            for layer in range(2):
                cache.append(layer, keys, values * (layer + 1), slots)
            try:
                plan = decoder.plan(table, query_heads=8)
            except (Unsupported, MissingPart) as refusal:
                pytest.skip(str(refusal))
            before = [decoder.run(plan, layer, query) for layer in range(2)]
            plan.finish()
            with host.lease(32) as slots_of_host:
                await engine.copy(lease.handle, slots_of_host, after=stream)
                lease.release()
                for layer in range(2):
                    cache.layer(layer).key.fill_(torch.nan)
                    cache.layer(layer).value.view(torch.uint8).fill_(0x7F)
                with cache.pool.lease(5), cache.pool.lease(32) as pages:
                    back = await engine.submit(Copy(slots_of_host, pages), after=stream)
                    await back.wait_posted()
                    back.order_before(stream)
                    await back.wait()
                    moved = PageTable.of([pages], [500], pool=cache.pool, page_size=16)
                    plan = decoder.plan(moved, query_heads=8)
                    after = [decoder.run(plan, layer, query) for layer in range(2)]
                    plan.finish()
                    for one, two in zip(before, after, strict=True):
                        assert torch.equal(one, two)
                    await engine.drain()


@needs_gpu
@pytest.mark.anyio
async def test_pages_are_held_until_the_stream_is_through(backends: Backends) -> None:
    """The hold outlives the lease and `finish`, until a queue that is still busy gets there."""
    from transfer.cuda import CudaDevice

    cache = PagedKVCache(layers=1, pages=4, page_size=16, kv_heads=2, head_dim=128, device="cuda")
    query = torch.randn(1, 8, 128, device="cuda").to(torch.bfloat16)
    async with Engine(CudaDevice(0)) as engine:
        decoder = PagedDecoder(engine, cache, backend="triton", backends=backends)
        lease = cache.lease(4)
        table = PageTable.of([lease], [64], pool=cache.pool, page_size=16)
        warm = decoder.plan(table, query_heads=8)
        decoder.run(warm, 0, query)
        warm.finish()
        await engine.drain()
        plan = decoder.plan(table, query_heads=8)
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        decoder.run(plan, 0, query)
        plan.finish()
        lease.release()
        assert cache.pool.counts().held == 4
        assert cache.pool.counts().free == 0
        await engine.drain()
        assert cache.pool.counts().free == 4


@needs_gpu
def test_a_pool_beyond_four_gigabytes_is_addressed_in_64_bits(backends: Backends) -> None:
    # case 18, the last pages of a pool whose bytes and elements do not fit 32 bits
    cache = PagedKVCache(
        layers=1, pages=300_000, page_size=16, kv_heads=8, head_dim=128, device="cuda"
    )
    assert cache.layer(0).key.numel() > 2**32
    ids = [299_999, 0, 299_998, 131_072]
    near = PagedKVCache(layers=1, pages=4, page_size=16, kv_heads=8, head_dim=128, device="cuda")
    keys, values = (torch.randn(60, 8, 128, device="cuda").to(torch.bfloat16) for _ in range(2))
    query = torch.randn(1, 32, 128, device="cuda").to(torch.bfloat16)
    for name in ("triton", "flashinfer", "flashinfer-cores"):
        found = []
        for pool, pages in ((cache, ids), (near, [0, 1, 2, 3])):
            count = pool.pool.blocks
            table = PageTable.raw([0, 4], pages, [12], page_size=16, pages=count)
            pool.append(0, keys, values, pool.slots(table, [60]))
            decoder = PagedDecoder(None, pool, backend=name, backends=backends)
            try:
                plan = decoder.plan(table, query_heads=32)
            except (Unsupported, MissingPart):
                continue
            found.append(decoder.run(plan, 0, query))
        assert all(torch.equal(found[0], other) for other in found[1:])
