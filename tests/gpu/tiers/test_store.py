"""Pages on a GPU through a store whose memory is page-locked: no copy in between."""

from pathlib import Path

import pytest
import torch
from tests.gpu.transfer.rig import device

from tiers import DiskTier, HostTier, KVStore, PageLayout, PageOrder, Placement, Provenance
from tiers._form import Form
from transfer import Engine, FileDevice, HostDevice
from transfer.cuda import DevicePool, PinnedPool

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.may_block]

LAYOUT = PageLayout(layers=4, page_size=16, kv_heads=8, head_dim=128, order=PageOrder.NHD)
PAGES = 24


@pytest.mark.parametrize("placement", list(Placement))
async def test_pages_of_a_gpu_go_through_page_locked_memory(
    tmp_path: Path, placement: Placement
) -> None:
    form = Form(LAYOUT, placement)
    host = (
        HostTier.of(form.stored, form.host_names, blocks=PAGES, make_pool=PinnedPool)
        if form.host_names
        else None
    )
    disk = DiskTier(tmp_path) if form.file_bytes else None
    gpu = DevicePool(LAYOUT, 2 * PAGES)
    for layer in range(LAYOUT.layers):
        gpu.cache("key", layer).normal_()
        gpu.cache("value", layer).normal_()
    torch.cuda.synchronize()
    keys = Provenance(model="m", revision="r", layout=LAYOUT).keys(range(16 * PAGES), extra=b"")
    async with (
        Engine(device(), HostDevice(), FileDevice()) as engine,
        KVStore(
            engine,
            layout=LAYOUT,
            placement=placement,
            host=host,
            disk=disk,
            make_pool=PinnedPool,
        ) as store,
    ):
        with gpu.lease(PAGES) as pages, gpu.lease(PAGES) as back:
            await (await store.put(keys, pages, after=())).resident()
            with store.lookup(keys) as hit:
                assert await store.fetch(hit, into=back, after=()) == PAGES
            torch.cuda.synchronize()
            for layer in range(LAYOUT.layers):
                for name, bound in (("key", 0.0), ("value", 0.07)):
                    cache = gpu.cache(name, layer)
                    old, new = (cache[torch.from_numpy(p.ids.copy()).cuda()] for p in (pages, back))
                    assert float((old - new).abs().max() / old.abs().max()) <= bound
        assert all(isinstance(pool, PinnedPool) for pool in store.pools())
    if host is not None:
        host.close()
