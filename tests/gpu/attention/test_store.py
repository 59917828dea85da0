"""The whole way on a GPU: append, offload through the store, evict and poison, fetch, decode."""

from pathlib import Path

import pytest
import torch

from attention import Backends, PagedDecoder, PagedKVCache, PagedPrefill, PageTable, ValueScales
from kvhold.bench.attention_cases import NAN_CODE
from tiers import DiskTier, HostTier, KVStore, Placement, Provenance
from tiers._form import Form
from transfer import Blocks, Engine, FileDevice, HostDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.anyio,
    pytest.mark.may_block,  # modules are built, and results compared, on the loop's thread
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # FlashInfer and what it imports warn on import
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PAGES, PAGE, LAYERS, HEADS = 32, 16, 2, 8
LENGTH = PAGES * PAGE
Plans = list[torch.Tensor]


def bits(cache: PagedKVCache, pages: Blocks) -> list[torch.Tensor]:
    """Keys, codes and stored scales of pages, bit by bit."""
    ids = torch.from_numpy(pages.ids.copy()).to(cache.device)
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


class Attention:
    """Decode and prefill of one request, by the backend that is asked for."""

    def __init__(self, engine: Engine, cache: PagedKVCache, backend: str) -> None:
        self.cache = cache
        backends = Backends()
        self.decoder = PagedDecoder(engine, cache, backend=backend, backends=backends)
        self.prefill = PagedPrefill(engine, cache, backend=backend, backends=backends)

    def run(self, pages: Blocks, query: torch.Tensor) -> Plans:
        table = PageTable.of([pages], [LENGTH], pool=self.cache.pool, page_size=PAGE)
        one = self.decoder.plan(table, query_heads=query.shape[1])
        many = self.prefill.plan(table, [len(query)], query_heads=query.shape[1])
        out = []
        for layer in range(LAYERS):
            out.append(self.decoder.run(one, layer, query[-1:]))
            out.append(self.prefill.run(many, layer, query))
        one.finish()
        many.finish()
        return out


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
async def test_stored_evicted_poisoned_fetched_and_attended(
    tmp_path: Path, placement: Placement, backend: str
) -> None:
    # case 62, with page-locked pages between the GPU and the store
    from transfer.cuda import CudaDevice, PinnedPool

    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    cache = PagedKVCache(
        layers=LAYERS,
        pages=3 * PAGES,
        page_size=PAGE,
        kv_heads=HEADS,
        head_dim=128,
        scales=ValueScales.per_token(),
        device="cuda",
    )
    layout = cache.page_layout
    form = Form(layout, placement)
    host = HostTier.of(form.stored, form.host_names, blocks=PAGES) if form.host_names else None
    disk = DiskTier(tmp_path) if form.file_bytes else None
    keys = Provenance(model="m", revision="r", layout=layout).keys(list(range(LENGTH)), extra=b"")
    key, value = (torch.randn(LENGTH, HEADS, 128, device="cuda").bfloat16() for _ in range(2))
    query = torch.randn(40, 4 * HEADS, 128, device="cuda").bfloat16()
    stream = torch.cuda.current_stream()
    with PinnedPool(layout, PAGES) as between:
        async with (
            Engine(CudaDevice(0), HostDevice(), FileDevice()) as engine,
            KVStore(engine, layout=layout, placement=placement, host=host, disk=disk) as store,
        ):
            attention = Attention(engine, cache, backend)
            lease = cache.lease(PAGES)
            table = PageTable.of([lease], [LENGTH], pool=cache.pool, page_size=PAGE)
            slots = cache.slots(table, [LENGTH])
            for layer in range(LAYERS):
                cache.append(layer, key, value * (layer + 1), slots)
            before = attention.run(lease.handle, query)
            expected = bits(cache, lease.handle)
            with between.lease(PAGES) as pages:
                await engine.copy(cache.pages(lease.handle), pages, after=stream)
                ticket = await store.put(keys, pages)
                await ticket.resident()
            lease.release()
            poison(cache)
            with (
                store.lookup(keys) as hit,
                between.lease(PAGES) as pages,
                cache.pool.lease(5),
                cache.pool.lease(PAGES) as target,
            ):
                for block in pages:
                    block.view(write=True)[:] = b"\xa5" * block.nbytes
                assert await store.fetch(hit, into=pages) == PAGES
                # A table names only pages that nobody writes any more, hence the wait.
                await engine.copy(pages, target, after=stream)
                after = attention.run(target, query)
                for found, right in zip(bits(cache, target), expected, strict=True):
                    assert torch.equal(found, right)
                for one, two in zip(before, after, strict=True):
                    assert torch.equal(one, two)
                # Control: a damaged code shows.
                cache.layer(0).value.view(torch.uint8)[int(target.ids[1])] ^= 0x80
                assert not torch.equal(attention.run(target, query)[0], before[0])
                await engine.drain()
            assert store.evict(PAGES) == PAGES
    if host is not None:
        host.close()
