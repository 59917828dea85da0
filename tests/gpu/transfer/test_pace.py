"""Every way of posting moves every byte on a real GPU, alone and both directions at once."""

import anyio
import pytest
from tests.gpu.transfer.rig import device, fill_device, pools, same, scattered

from transfer import Engine
from transfer.cuda import Pace, Way

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.may_block]

PACES = {
    "bare": Pace(bare=True),
    "two movers": Pace(movers=2),
    "ahead": Pace(ahead=1 << 20),
    "urgent, level": Pace(urgent=True, ramp=1 << 20),
    "pitched": Pace(pitched=True),
    "all": Pace(ahead=3 << 20, urgent=True, ramp=1 << 18, movers=2, pitched=True, bare=True),
}


@pytest.mark.parametrize("way", [Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED])
@pytest.mark.parametrize("name", PACES)
async def test_every_byte_goes_out_and_comes_back(name: str, way: Way) -> None:
    with pools(400, 400) as (gpu, host):
        fill_device(gpu)
        pages = scattered(gpu, 300)
        slots = host.lease(300).handle
        async with Engine(device(ways=(way,), pace=PACES[name])) as engine:
            await engine.copy(pages, slots, after=())
            assert same(pages, slots)
            await engine.copy(slots[:100], pages[200:], after=())
            assert same(pages[200:], slots[:100])


@pytest.mark.parametrize("name", PACES)
async def test_both_directions_at_once(name: str) -> None:
    with pools(400, 400) as (gpu, host):
        fill_device(gpu)
        pages, slots = scattered(gpu, 400), host.lease(400).handle
        async with Engine(device(ways=(Way.STAGED,), pace=PACES[name])) as engine:
            await engine.copy(pages[:200], slots[:200], after=())
            async with anyio.create_task_group() as group:
                for at in range(0, 100, 25):
                    out, into = slice(100 + at, 125 + at), slice(at, 25 + at)
                    group.start_soon(_copy, engine, pages[out], slots[200:][into])
                    group.start_soon(_copy, engine, slots[into], pages[200:][into])
            assert same(pages[100:200], slots[200:300])
            assert same(pages[200:300], slots[:100])


async def _copy(engine: Engine, src: object, dst: object) -> None:
    await engine.copy(src, dst, after=())  # type: ignore[arg-type]
