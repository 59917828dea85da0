"""The paged cache on the CPU: appended bytes, defined tails, block views with real strides."""

import math
from dataclasses import replace

import pytest
import torch

from attention import cache as cache_module
from attention._errors import CacheError, PageTableError, Unsupported
from attention._pages import PageTable
from attention._reference import gather
from attention._scales import ValueScales, quantise
from attention.cache import PagedKVCache
from tiers._layout import PageOrder, ScaleScope
from transfer._errors import PoolExhausted, StaleBlock
from transfer._extent import copy_runs
from transfer._memory import HostPool

ORDERS = (PageOrder.NHD, PageOrder.HND)


def make(
    order: PageOrder = PageOrder.NHD, scales: ValueScales | None = None, layers: int = 2
) -> PagedKVCache:
    return PagedKVCache(
        layers=layers,
        pages=8,
        page_size=4,
        kv_heads=2,
        head_dim=16,
        order=order,
        scales=scales,
    )


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    key = torch.randn(count, 2, 16, generator=source).to(torch.bfloat16)
    return key, torch.randn(count, 2, 16, generator=source).to(torch.bfloat16)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "scales",
    [None, ValueScales.static([0.01, 0.02]), ValueScales.static([[0.01, 0.02], [0.5, 0.25]])],
)
def test_appended_tokens_come_back(order: PageOrder, scales: ValueScales | None) -> None:
    cache = make(order, scales)
    with cache.lease(2) as a, cache.lease(1) as b:
        table = PageTable.of([a, b], [7, 3], pool=cache.pool, page_size=4)
        slots = cache.slots(table, [7, 3])
        key, value = tokens(10)
        for layer in range(2):
            cache.append(layer, key, value, slots)
            step = cache.layer(layer).scale.reshape(1, -1, 1)
            codes, _ = quantise(value, step, torch.float8_e4m3fn)
            real = codes.to(torch.float32) * step
            for request, (first, last) in enumerate([(0, 7), (7, 10)]):
                found_key, found_value = gather(cache.layer(layer), table, request)
                assert torch.equal(found_key, key[first:last].to(torch.float32))
                assert torch.equal(found_value, real[first:last])
    assert cache.saturated() == [0, 0]


def test_tokens_appended_in_steps_are_tokens_appended_at_once() -> None:
    once, steps = make(), make()
    key, value = tokens(7)
    for cache, counts in ((once, [7]), (steps, [3, 2, 2])):
        with cache.lease(2) as pages:
            done = 0
            for count in counts:
                done += count
                mine = pages[: -(-done // 4)]
                table = PageTable.of([mine], [done], pool=cache.pool, page_size=4)
                part = slice(done - count, done)
                cache.append(0, key[part], value[part], cache.slots(table, [count]))
    assert torch.equal(once.layer(0).key, steps.layer(0).key)
    assert torch.equal(
        once.layer(0).value.view(torch.uint8), steps.layer(0).value.view(torch.uint8)
    )


# case 61, a recycled page's unused slots are zeros, not the former request's bytes
def test_leased_pages_have_defined_slots() -> None:
    cache = make(scales=ValueScales.per_token())
    lease = cache.lease(8)
    for layer in range(2):
        view = cache.layer(layer)
        view.key.fill_(math.nan)
        view.value.view(torch.uint8).fill_(0xFF)
        view.scale.fill_(math.nan)
    lease.release()
    with cache.lease(3) as pages:
        for page in pages.ids.tolist():
            view = cache.layer(1)
            assert (view.key[page] == 0).all()
            assert (view.value.view(torch.uint8)[page] == 0).all()
            assert (view.scale[page] == 1).all()
        others = sorted(set(range(8)) - set(pages.ids.tolist()))
        assert torch.isnan(cache.layer(1).key[others]).all()  # nobody else's page was touched


def test_saturation_is_counted_by_layer() -> None:
    cache = make(scales=ValueScales.static([0.001, 10.0]))
    with cache.lease(1) as pages:
        table = PageTable.of([pages], [2], pool=cache.pool, page_size=4)
        key, value = tokens(2)
        value = torch.full_like(value, 1.0)
        value[0, 0, 0] = math.inf
        value[1, 1, 3] = math.nan
        slots = cache.slots(table, [2])
        cache.append(0, key, value, slots)
        cache.append(1, key, value, slots)
    assert cache.saturated() == [64, 2]


def test_per_token_scales_follow_each_token() -> None:
    cache = make(scales=ValueScales.per_token())
    with cache.lease(1) as pages:
        table = PageTable.of([pages], [3], pool=cache.pool, page_size=4)
        key, value = tokens(3)
        value *= torch.tensor([1.0, 1e-3, 100.0], dtype=torch.bfloat16)[:, None, None]
        cache.append(0, key, value, cache.slots(table, [3]))
        _, found = gather(cache.layer(0), table, 0)
        exact = value.to(torch.float32)
        error = (found - exact).norm(dim=2) / exact.norm(dim=2)
        assert error.max() < 0.06  # each token at format noise, whatever its size
    assert cache.saturated() == [0, 0]


def test_first_page_scales_stay_with_their_request() -> None:
    cache = make(scales=ValueScales.first_page())
    key, value = tokens(6)
    value[4:] *= 50
    with cache.lease(2) as pages:
        for done, count in ((5, 5), (6, 1)):
            table = PageTable.of([pages], [done], pool=cache.pool, page_size=4)
            part = slice(done - count, done)
            cache.append(0, key[part], value[part], cache.slots(table, [count]))
        scale = cache.layer(0).scale
        expected = value[:4].to(torch.float32).abs().amax((0, 2)) / 448
        first, second = pages.ids.tolist()
        for place in range(4):
            torch.testing.assert_close(scale[first, place], expected)
        for place in range(2):
            torch.testing.assert_close(scale[second, place], expected)
        assert cache.saturated()[0] > 0
        with pytest.raises(CacheError, match="private"):
            cache.pages(pages)
        assert cache.pages(pages, private=True) is pages


def test_wrong_tokens_are_refused() -> None:
    cache = make()
    with cache.lease(1) as pages:
        table = PageTable.of([pages], [2], pool=cache.pool, page_size=4)
        slots = cache.slots(table, [2])
        key, value = tokens(2)
        with pytest.raises(CacheError, match=r"key is torch\.float16"):
            cache.append(0, key.to(torch.float16), value, slots)
        with pytest.raises(CacheError, match=r"not \(2, 2, 16\)"):
            cache.append(0, key[:1], value, slots)
        with pytest.raises(PageTableError, match="3 new tokens, length 2"):
            cache.slots(table, [3])
        cache.append(0, key[:0], value[:0], cache.slots(table, [0]))
        assert (cache.layer(0).key == 0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": torch.float32},
        {"value": torch.float8_e4m3fnuz},
        {"value": torch.bfloat16},
        {"head_dim": 24},
        {"kv_heads": 0},
        {"scales": ValueScales.unit(3)},
        {"scales": ValueScales.static([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])},
    ],
)
def test_caches_that_no_kernel_reads_are_refused(wrong: dict[str, object]) -> None:
    good: dict[str, object] = {
        "layers": 2,
        "pages": 4,
        "page_size": 4,
        "kv_heads": 2,
        "head_dim": 16,
    }
    PagedKVCache(**good)  # type: ignore[arg-type]
    with pytest.raises(CacheError):
        PagedKVCache(**{**good, **wrong})  # type: ignore[arg-type]


def test_the_pool_counts_and_refuses() -> None:
    cache = make()
    with cache.lease(8), pytest.raises(PoolExhausted, match="1 blocks wanted, 0 free; 8 leased"):
        cache.lease(1)
    with cache.lease(8) as pages:
        assert len(pages) == 8


# cases 16 and 17, blocks are these very pages: real strides, neighbours untouched
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scales", [None, ValueScales.per_token()])
def test_a_block_goes_to_a_host_slot_and_back(order: PageOrder, scales: ValueScales | None) -> None:
    cache = make(order, scales)
    host = HostPool(cache.page_layout, 2)
    runs = copy_runs(cache.block_layout, host.layout)
    assert runs.total == cache.block_layout.payload
    with cache.lease(2) as pages, host.lease() as slot:
        table = PageTable.of([pages], [8], pool=cache.pool, page_size=4)
        key, value = tokens(8)
        for layer in range(2):
            cache.append(layer, key, value + layer, cache.slots(table, [8]))
        source, other = pages[0], pages[1]
        for name, layer in [("key", 0), ("value", 1)]:
            slot.tensor(name, layer, write=True).view(torch.uint8).copy_(
                source.tensor(name, layer).view(torch.uint8)
            )
            assert torch.equal(
                slot.tensor(name, layer).view(torch.uint8),
                getattr(cache.layer(layer), name)[source.id].view(torch.uint8),
            )
            before = other.tensor(name, layer).clone()
            cache.clear(pages[:1])
            source.tensor(name, layer, write=True).view(torch.uint8).copy_(
                slot.tensor(name, layer).view(torch.uint8)
            )
            assert torch.equal(
                other.tensor(name, layer).view(torch.uint8), before.view(torch.uint8)
            )


def test_page_layout_says_what_a_page_is() -> None:
    fixed, own = make(PageOrder.HND), make(scales=ValueScales.per_token())
    assert fixed.page_layout.order is PageOrder.HND
    assert (fixed.page_layout.key, fixed.page_layout.value) == ("bfloat16", "float8_e4m3fn")
    assert fixed.page_layout.scope is None
    assert own.page_layout.scope is ScaleScope.TOKEN_HEAD
    assert {e.name for e in own.block_layout.extents} == {"key", "value", "value_scale"}


def test_pages_of_another_cache_are_refused() -> None:
    one, two = make(), make()
    with two.lease(1) as pages, pytest.raises(CacheError, match="not of this cache"):
        one.pages(pages)


def test_importing_the_cache_imports_no_kernels() -> None:
    assert not hasattr(cache_module, "triton")


# case 16 and case 17, memory of a host program, with the order stated and its real strides
@pytest.mark.parametrize("order", ORDERS)
def test_a_cache_over_foreign_pages(order: PageOrder) -> None:
    inner = (4, 2) if order is PageOrder.NHD else (2, 4)
    # K and V of each page lie beside each other in one allocation, V in half of its room.
    room = torch.zeros(6, 2, *inner, 16, dtype=torch.bfloat16)
    codes = room[:, 1].view(torch.uint8)[..., :16].view(torch.float8_e4m3fn)
    cache = PagedKVCache.over([room[:, 0]], [codes], order=order)
    assert (cache.page_size, cache.kv_heads, cache.pool.blocks) == (4, 2, 6)
    table = PageTable.of([cache.pool.blocks_of([4, 1])], [7], pool=cache.pool, page_size=4)
    key, value = tokens(7)
    cache.append(0, key, value, cache.slots(table, [7]))
    found, real = gather(cache.layer(0), table, 0)
    assert torch.equal(found, key.to(torch.float32))
    assert torch.equal(real, quantise(value, torch.ones(1), torch.float8_e4m3fn)[0].float())
    untouched = room[:, 1].view(torch.uint8)[..., 16:]
    assert (untouched == 0).all()
    assert (room[[0, 2, 3, 5]].view(torch.uint8) == 0).all()


def test_foreign_pages_that_do_not_fit_are_refused() -> None:
    key = torch.zeros(6, 4, 2, 16, dtype=torch.bfloat16)
    codes = torch.zeros(6, 4, 2, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(CacheError, match="1 layers of keys, 2 of values"):
        PagedKVCache.over([key], [codes, codes], order=PageOrder.NHD)
    with pytest.raises(CacheError, match="pages differ between layers"):
        PagedKVCache.over([key, key[:, :2]], [codes, codes[:, :2]], order=PageOrder.NHD)
    with pytest.raises(CacheError, match="value pages are"):
        PagedKVCache.over([key], [key], order=PageOrder.NHD)


def test_a_cache_of_a_page_layout() -> None:
    layout = make(PageOrder.HND, ValueScales.per_token()).page_layout
    cache = PagedKVCache.of(layout, pages=3)
    assert cache.page_layout == layout
    assert cache.scales.scope is ScaleScope.TOKEN_HEAD


def test_latent_pages_are_refused_and_not_guessed() -> None:
    layout = replace(make().page_layout, value=None)
    with pytest.raises(Unsupported, match="MLA"):
        PagedKVCache.of(layout, pages=3)
    with pytest.raises(Unsupported, match="values of width 8, keys of 16"):
        PagedKVCache.of(replace(make().page_layout, value_dim=8), pages=3)


# case 62, no cache writes by the table of another
def test_tables_of_another_cache_give_no_slots() -> None:
    cache, other = make(), make()
    with other.lease(2) as pages:
        table = PageTable.of([pages], [7], pool=other.pool, page_size=4)
        with pytest.raises(PageTableError, match="not of this cache's"):
            cache.slots(table, [7])
    for page, size, message in ((7, 8, "pages of 8, the cache has 4"), (50, 4, "page 50 of")):
        table = PageTable.raw([0, 1], [page], [4], page_size=size, pages=99)
        with pytest.raises(PageTableError, match=message):
            cache.slots(table, [4])
    stale = cache.lease(1)
    table = PageTable.of([stale], [4], pool=cache.pool, page_size=4)
    stale.release()
    with pytest.raises(PageTableError, match="are stale"):
        cache.slots(table, [4])


def test_pages_that_are_not_the_callers_are_not_cleared() -> None:
    cache, other = make(), make()
    lease = cache.lease(1)
    stale = lease.handle
    lease.release()
    cache.layer(0).key.fill_(1.0)
    with pytest.raises(StaleBlock):
        cache.clear(stale)
    with other.lease(2) as pages, pytest.raises(CacheError, match="not of this cache's"):
        cache.clear(pages)
    assert bool((cache.layer(0).key == 1.0).all())


@pytest.mark.parametrize("layer", [-1, 2, 7])
def test_layers_that_are_not_there_are_refused(layer: int) -> None:
    cache = make()
    with cache.lease(1) as pages:
        table = PageTable.of([pages], [3], pool=cache.pool, page_size=4)
        slots = cache.slots(table, [3])
        with pytest.raises(CacheError, match=f"layer {layer} of 2"):
            cache.append(layer, *tokens(3), slots)
        with pytest.raises(CacheError, match=f"layer {layer} of 2"):
            cache.layer(layer)
    assert not any(bool(cache.layer(n).key.any()) for n in range(2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
def test_values_of_other_types_are_refused(dtype: torch.dtype) -> None:
    cache = make()
    with cache.lease(1) as pages:
        table = PageTable.of([pages], [3], pool=cache.pool, page_size=4)
        key, value = tokens(3)
        with pytest.raises(CacheError, match="value is"):
            cache.append(0, key, value.to(dtype), cache.slots(table, [3]))


def test_layers_of_different_types_are_refused() -> None:
    keys = [torch.zeros(4, 4, 2, 16, dtype=d) for d in (torch.bfloat16, torch.float16)]
    codes = [torch.zeros(4, 4, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    with pytest.raises(CacheError, match="differ between layers"):
        PagedKVCache.over(keys, codes, order=PageOrder.NHD)
    mixed = [codes[0], torch.zeros(4, 4, 2, 16, dtype=torch.float8_e5m2)]
    with pytest.raises(CacheError, match="differ between layers"):
        PagedKVCache.over([keys[0], keys[0].clone()], mixed, order=PageOrder.NHD)


@pytest.mark.parametrize("values", [[], [[]], [[], []], 1.0])
def test_scales_of_nothing_are_refused(values: list[float]) -> None:
    with pytest.raises(CacheError, match="scales"):
        ValueScales.static(values)
