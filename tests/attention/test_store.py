"""The whole way through the store: append, put, evict and poison, fetch, decode."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attention import PagedDecoder, PagedKVCache, PagedPrefill, PageTable, ValueScales
from kvhold.bench.attention_cases import NAN_CODE
from tiers import (
    DiskTier,
    HostTier,
    KVStore,
    PageOrder,
    Placement,
    Provenance,
    ScaleScope,
    StaticScales,
)
from tiers._form import Form
from transfer import Blocks, Engine, FileDevice, HostDevice

pytestmark = pytest.mark.anyio
PAGES, PAGE, LAYERS = 4, 4, 2


def bits(cache: PagedKVCache, pages: Blocks) -> list[torch.Tensor]:
    """Keys, codes and stored scales of pages, bit by bit."""
    ids = torch.from_numpy(pages.ids.copy())
    out = []
    for layer in range(cache.layers):
        view = cache.layer(layer)
        out += [view.key.view(torch.int16)[ids], view.value.view(torch.uint8)[ids]]
        out.append(view.scale.view(torch.int32)[ids])
    return out


def poison(cache: PagedKVCache) -> None:
    for layer in range(cache.layers):
        view = cache.layer(layer)
        view.key.fill_(torch.nan)
        view.value.view(torch.uint8).fill_(NAN_CODE)
        view.scale.fill_(torch.nan)


def scales_of(kind: str) -> ValueScales:
    if kind == "unit":
        return ValueScales.unit(LAYERS)
    if kind == "static":
        return ValueScales.static([[0.015, 0.02], [0.03, 0.045]])
    source = torch.Generator().manual_seed(6)
    samples = [torch.randn(64, 2, 16, generator=source) * (n + 1) for n in range(LAYERS)]
    per_head = kind == "calibrated"
    return ValueScales.calibrated(samples, per_head=per_head, margin=1.25)


def test_fixed_scales_are_told_to_the_store() -> None:
    sizes: dict[str, Any] = {"layers": 2, "pages": 1, "page_size": 4, "kv_heads": 2, "head_dim": 16}
    fixed = ValueScales.static([[0.5, 2.0], [0.25, 3.0]])
    found = PagedKVCache(**sizes, scales=fixed).static_scales
    assert found == StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0]])
    assert PagedKVCache(**sizes).static_scales == StaticScales.unit(2)
    for own in (ValueScales.per_token(), ValueScales.first_page()):
        assert PagedKVCache(**sizes, scales=own).static_scales is None


# case 59, case 62 (codes of fixed scales go through as they are)
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("kind", ["unit", "static", "calibrated", "calibrated per layer"])
async def test_pages_of_fixed_scales_go_through_the_store(
    tmp_path: Path, kind: str, placement: Placement, order: PageOrder
) -> None:
    cache = PagedKVCache(
        layers=LAYERS,
        pages=12,
        page_size=PAGE,
        kv_heads=2,
        head_dim=16,
        order=order,
        scales=scales_of(kind),
    )
    layout, fixed = cache.page_layout, cache.static_scales
    assert fixed is not None
    form = Form(layout, placement, static_scales=fixed)
    host = HostTier.of(form.stored, form.host_names, blocks=8) if form.host_names else None
    disk = DiskTier(tmp_path) if form.file_bytes else None
    source = torch.Generator().manual_seed(5)
    length = PAGES * PAGE
    query, key, value = (
        torch.randn(length, heads, 16, generator=source).to(torch.bfloat16) for heads in (4, 2, 2)
    )
    provenance = Provenance(model="m", revision="r", layout=layout, static_scales=fixed.digest)
    keys = provenance.keys(list(range(length)), extra=b"")
    async with (
        Engine(HostDevice(threads=1), FileDevice(threads=2)) as engine,
        KVStore(
            engine,
            layout=layout,
            placement=placement,
            host=host,
            disk=disk,
            static_scales=fixed,
        ) as store,
    ):
        decoder = PagedDecoder(engine, cache)
        lease = cache.lease(PAGES)
        table = PageTable.of([lease], [length], pool=cache.pool, page_size=PAGE)
        slots = cache.slots(table, [length])
        for layer in range(LAYERS):
            cache.append(layer, key, value * (layer + 1), slots)
        plan = decoder.plan(table, query_heads=4)
        before = [decoder.run(plan, layer, query[-1:]) for layer in range(LAYERS)]
        plan.finish()
        await engine.drain()
        codes, old = codes_of(cache, lease.handle), lease.handle.ids.tolist()
        await (await store.put(keys, cache.pages(lease.handle))).resident()
        lease.release()
        for layer in range(LAYERS):
            cache.layer(layer).key.fill_(torch.nan)
            cache.layer(layer).value.view(torch.uint8).fill_(NAN_CODE)
        with store.lookup(keys) as hit, cache.pool.lease(5), cache.pool.lease(PAGES) as pages:
            assert pages.ids.tolist() != old
            assert await store.fetch(hit, into=pages) == PAGES
            for found, right in zip(codes_of(cache, pages), codes, strict=True):
                assert torch.equal(found, right)
            moved = PageTable.of([pages], [length], pool=cache.pool, page_size=PAGE)
            plan = decoder.plan(moved, query_heads=4)
            for layer in range(LAYERS):
                assert torch.equal(decoder.run(plan, layer, query[-1:]), before[layer])
            plan.finish()
            await engine.drain()
    if host is not None:
        host.close()


def codes_of(cache: PagedKVCache, pages: Blocks) -> list[torch.Tensor]:
    """Keys and codes of pages, bit by bit."""
    ids = torch.from_numpy(pages.ids.copy())
    views = [cache.layer(layer) for layer in range(cache.layers)]
    keys = [view.key.view(torch.int16)[ids] for view in views]
    return keys + [view.value.view(torch.uint8)[ids] for view in views]


# case 62, through host memory and files, to other pages, and decoded the same
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("placement", list(Placement))
async def test_stored_evicted_poisoned_fetched_and_decoded(
    tmp_path: Path, placement: Placement, order: PageOrder
) -> None:
    cache = PagedKVCache(
        layers=LAYERS,
        pages=12,
        page_size=PAGE,
        kv_heads=2,
        head_dim=16,
        order=order,
        scales=ValueScales.per_token(),
    )
    layout = cache.page_layout
    form = Form(layout, placement)
    host = HostTier.of(form.stored, form.host_names, blocks=8) if form.host_names else None
    disk = DiskTier(tmp_path) if form.file_bytes else None
    source = torch.Generator().manual_seed(5)
    length = PAGES * PAGE
    query, key, value = (
        torch.randn(length, heads, 16, generator=source).to(torch.bfloat16) for heads in (4, 2, 2)
    )
    provenance = Provenance(model="m", revision="r", layout=layout)
    keys = provenance.keys(list(range(length)), extra=b"")
    async with (
        Engine(HostDevice(threads=1), FileDevice(threads=2)) as engine,
        KVStore(engine, layout=layout, placement=placement, host=host, disk=disk) as store,
    ):
        decoder, prefill = PagedDecoder(engine, cache), PagedPrefill(engine, cache)
        lease = cache.lease(PAGES)
        table = PageTable.of([lease], [length], pool=cache.pool, page_size=PAGE)
        slots = cache.slots(table, [length])
        plans = decoder.plan(table, query_heads=4), prefill.plan(table, [3], query_heads=4)
        before = []
        for layer in range(LAYERS):
            cache.append(layer, key, value * (layer + 1), slots)
            before.append(decoder.run(plans[0], layer, query[-1:]))
            before.append(prefill.run(plans[1], layer, query[-3:]))
        for plan in plans:
            plan.finish()
        await engine.drain()
        expected, old = bits(cache, lease.handle), lease.handle.ids.tolist()
        ticket = await store.put(keys, cache.pages(lease.handle))
        await ticket.resident()
        lease.release()
        poison(cache)
        with store.lookup(keys) as hit, cache.pool.lease(5), cache.pool.lease(PAGES) as pages:
            assert len(hit) == PAGES
            assert pages.ids.tolist() != old
            assert await store.fetch(hit, into=pages) == PAGES
            for found, right in zip(bits(cache, pages), expected, strict=True):
                assert torch.equal(found, right)
            moved = PageTable.of([pages], [length], pool=cache.pool, page_size=PAGE)
            after = []
            plans = decoder.plan(moved, query_heads=4), prefill.plan(moved, [3], query_heads=4)
            for layer in range(LAYERS):
                after.append(decoder.run(plans[0], layer, query[-1:]))
                after.append(prefill.run(plans[1], layer, query[-3:]))
            for one, two in zip(before, after, strict=True):
                assert torch.equal(one, two)
            # Control: a damaged code, and a damaged key, show.
            for damaged in (cache.layer(0).value, cache.layer(0).key):
                damaged.view(torch.uint8)[int(pages.ids[1])] ^= 0x40
                assert not torch.equal(decoder.run(plans[0], 0, query[-1:]), before[0])
            for plan in plans:
                plan.finish()
            await engine.drain()
        assert store.evict(PAGES) == PAGES
        assert store.match(keys) == 0
    if host is not None:
        host.close()
