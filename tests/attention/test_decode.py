"""PagedDecoder and PagedPrefill on the CPU, the whole way: append, run, move away and back."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention import (
    PagedDecoder,
    PagedKVCache,
    PagedPrefill,
    PageTable,
    PageTableError,
    Room,
    Unsupported,
    ValueScales,
)
from attention._reference import Attended, attend, gather, merge
from kvhold.bench.attention_cases import relative_error
from tiers._layout import PageOrder
from transfer import Engine, HostDevice, HostPool

SOURCE = Path(__file__).parent.parent.parent / "src"
ORDERS = list(PageOrder)
SCALES = (
    ValueScales.static([0.25]),
    ValueScales.static([1.0]),
    ValueScales.static([4.0]),
    ValueScales.static([[0.25, 4.0]]),
    ValueScales.per_token(),
)


def make(
    order: PageOrder = PageOrder.NHD, scales: ValueScales | None = None, pages: int = 8
) -> PagedKVCache:
    return PagedKVCache(
        layers=1,
        pages=pages,
        page_size=4,
        kv_heads=2,
        head_dim=16,
        order=order,
        scales=scales,
    )


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(count, heads, 16, generator=source).to(torch.bfloat16) for heads in (4, 2, 2)
    ]
    return made[0], made[1], made[2]


# case 59, the scale used on write is used on every read path, and doubling it doubles the output
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scales", SCALES, ids=lambda s: s.provenance[:20])
def test_every_read_path_uses_the_scale(order: PageOrder, scales: ValueScales) -> None:
    cache = make(order, scales)
    query, key, value = tokens(7)
    with cache.lease(2) as pages:
        table = PageTable.of([pages], [7], pool=cache.pool, page_size=4)
        cache.append(0, key, value, cache.slots(table, [7]))
        exact = attend(query.float(), key.float(), value.float(), causal=True)
        prefill = PagedPrefill(None, cache)
        whole = prefill.run(prefill.plan(table, [7], query_heads=4), 0, query)
        assert relative_error(whole, exact.out) < 0.08  # E4M3's own noise
        decoder = PagedDecoder(None, cache)
        plan = decoder.plan(table, query_heads=4)
        last, lse = decoder.run_with_lse(plan, 0, query[-1:])
        torch.testing.assert_close(last, whole[-1:])
        torch.testing.assert_close(lse, exact.lse[-1:], atol=1e-4, rtol=0)
        # Prefix and new tokens merged: the prefix from pages, the rest from dense tensors.
        prefix = PageTable.of([pages[:1]], [4], pool=cache.pool, page_size=4)
        part, sums = decoder.run_with_lse(decoder.plan(prefix, query_heads=4), 0, query[-1:])
        _, real = gather(cache.layer(0), table, 0)
        rest = attend(query[-1:].float(), key[4:].float(), real[4:])
        joined = merge(Attended(part.float(), sums), rest)
        assert relative_error(joined.out, last.float()) < 6e-3
        before = last.clone()
        cache.layer(0).scale.mul_(2)
        doubled = decoder.run(plan, 0, query[-1:])
        torch.testing.assert_close(doubled.float(), before.float() * 2)


# case 61, a partial page in a recycled pool full of NaN
@pytest.mark.parametrize("order", ORDERS)
def test_partial_pages_of_a_recycled_pool(order: PageOrder) -> None:
    clean, dirty = make(order), make(order)
    query, key, value = tokens(13, seed=2)
    found = []
    for cache in (clean, dirty):
        if cache is dirty:
            view = cache.layer(0)
            view.key.fill_(torch.nan)
            view.value.view(torch.uint8).fill_(0xFF)
        lease = cache.pool.lease(4)  # not cleared: slots keep what they had
        table = PageTable.of([lease], [13], pool=cache.pool, page_size=4)
        cache.append(0, key, value, cache.slots(table, [13]))
        decoder = PagedDecoder(None, cache)
        found.append(decoder.run(decoder.plan(table, query_heads=4), 0, query[-1:]))
        lease.release()
    assert torch.isfinite(found[1]).all()
    assert torch.equal(found[0], found[1])


# case 62, a block that went to the host comes back to another slot and decodes the same
@pytest.mark.anyio
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scales", [ValueScales.static([0.02]), ValueScales.per_token()])
async def test_moved_away_poisoned_and_back_in_other_slots(
    order: PageOrder, scales: ValueScales
) -> None:
    cache = make(order, scales)
    host = HostPool(cache.page_layout, 4)
    query, key, value = tokens(16, seed=3)
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        first = cache.lease(4)
        table = PageTable.of([first], [16], pool=cache.pool, page_size=4)
        cache.append(0, key, value, cache.slots(table, [16]))
        plan = decoder.plan(table, query_heads=4)
        before = decoder.run(plan, 0, query[-1:])
        plan.finish()
        await engine.drain()
        keys, codes = cache.layer(0).key.clone(), cache.layer(0).value.view(torch.uint8).clone()
        old = first.handle.ids.copy()
        with host.lease(4) as slots:
            await engine.copy(first.handle, slots)
            first.release()
            view = cache.layer(0)
            view.key.fill_(torch.nan)
            view.value.view(torch.uint8).fill_(0x7F)
            with cache.pool.lease(2), cache.pool.lease(4) as pages:
                assert pages.ids.tolist() != old.tolist()
                await engine.copy(slots, pages)
                moved = PageTable.of([pages], [16], pool=cache.pool, page_size=4)
                for was, now in zip(old.tolist(), pages.ids.tolist(), strict=True):
                    assert torch.equal(view.key[now], keys[was])
                    assert torch.equal(view.value.view(torch.uint8)[now], codes[was])
                plan = decoder.plan(moved, query_heads=4)
                after = decoder.run(plan, 0, query[-1:])
                plan.finish()
                assert torch.equal(after, before)  # bit for bit
                # Control: one damaged page shows.
                view.value.view(torch.uint8)[int(pages.ids[1])] ^= 0x80
                plan = decoder.plan(moved, query_heads=4)
                assert not torch.equal(decoder.run(plan, 0, query[-1:]), before)
                plan.finish()
                await engine.drain()


def test_types_that_the_caller_takes_for_granted_are_checked() -> None:
    cache = make()
    table = PageTable.raw([0, 1], [0], [4], page_size=4, pages=8)
    decoder = PagedDecoder(None, cache)
    plan = decoder.plan(
        table, query_heads=4, k_data_type=torch.bfloat16, v_data_type=torch.float8_e4m3fn
    )
    assert plan.backend == "reference"
    with pytest.raises(Unsupported, match=r"k_data_type is torch\.float16"):
        decoder.plan(table, query_heads=4, k_data_type=torch.float16)
    with pytest.raises(Unsupported, match=r"v_data_type is torch\.float8_e5m2"):
        decoder.plan(table, query_heads=4, v_data_type=torch.float8_e5m2)


def test_tables_of_another_cache_are_refused() -> None:
    cache, other = make(), make()
    decoder = PagedDecoder(None, cache)
    with pytest.raises(PageTableError, match="pages of 8, the cache has 4"):
        decoder.plan(PageTable.raw([0, 1], [0], [4], page_size=8, pages=8), query_heads=4)
    with pytest.raises(PageTableError, match="page 9 of a pool of 8"):
        decoder.plan(PageTable.raw([0, 1], [9], [4], page_size=4, pages=10), query_heads=4)
    with other.lease(1) as pages:
        table = PageTable.of([pages], [4], pool=other.pool, page_size=4)
        with pytest.raises(PageTableError, match="not of this cache"):
            decoder.plan(table, query_heads=4)


def test_prefill_tables_hold_the_new_tokens() -> None:
    prefill = PagedPrefill(None, make())
    table = PageTable.raw([0, 1, 2], [0, 1], [3, 4], page_size=4, pages=8)
    with pytest.raises(PageTableError, match="request 0: 4 new tokens, length 3"):
        prefill.plan(table, [4, 1], query_heads=4)
    assert prefill.plan(table, [4, 1], query_heads=4, causal=False).backend == "reference"
    for fresh in ([1], [1, -1]):
        with pytest.raises(PageTableError, match="2 requests, new tokens"):
            prefill.plan(table, fresh, query_heads=4)


def test_unsupported_combinations_are_refused_at_plan() -> None:
    table = PageTable.raw([0, 1], [0], [4], page_size=4, pages=8)
    with pytest.raises(Unsupported, match="5 query heads over 2 KV heads"):
        PagedDecoder(None, make()).plan(table, query_heads=5)
    with pytest.raises(Unsupported, match="triton: pages on cpu: use reference"):
        PagedDecoder(None, make(), backend="triton").plan(table, query_heads=4)
    with pytest.raises(Unsupported, match="no graph can replay"):
        PagedDecoder(None, make()).plan(table, query_heads=4, room=Room(pages=4))


def test_empty_batches_are_no_error() -> None:
    decoder = PagedDecoder(None, make())
    plan = decoder.plan(PageTable.raw([0], [], [], page_size=4, pages=8), query_heads=4)
    out = decoder.run(plan, 0, torch.empty(0, 4, 16, dtype=torch.bfloat16))
    assert out.shape == (0, 4, 16)


def test_importing_attention_imports_no_kernel_library() -> None:
    code = (
        "import sys, attention; "
        "print([m for m in ('triton', 'flashinfer', 'tvm_ffi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
