"""A page of more than 2 GiB through a store: no length is 32 bits wide, no call does all of it."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tiers import (
    DiskTier,
    KVStore,
    PageLayout,
    PageOrder,
    Placement,
    Provenance,
    StaticScales,
)
from transfer import Engine, FileDevice, HostDevice, HostPool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUT = PageLayout(
    layers=8,
    page_size=1024,
    kv_heads=32,
    head_dim=2816,
    order=PageOrder.NHD,
    value="float8_e4m3fn",
)
SCALES = StaticScales.unit(LAYOUT.layers)
STEP = 1 << 20


def chunks(page: memoryview) -> "npt.NDArray[np.uint64]":
    """The page in pieces of 1 MiB, each as words."""
    whole = len(page) // STEP * STEP
    return np.frombuffer(page[:whole], np.uint64).reshape(-1, STEP // 8)


def files(root: Path) -> list[Path]:
    return list(root.glob("data/*/*"))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """One loop: what differs between loops is not what this is about."""
    return ("asyncio", {})


# case 22, case 27 (an object above 2**31 bytes)
@pytest.mark.may_block
async def test_a_page_of_more_than_2_gib(tmp_path: Path) -> None:
    provenance = Provenance(model="m", revision="r", layout=LAYOUT, static_scales=SCALES.digest)
    keys = provenance.keys(range(LAYOUT.page_size), extra=b"")
    noise = np.random.default_rng(0).integers(0, 1 << 63, STEP // 8, dtype=np.uint64)
    pool = HostPool(LAYOUT, 1)
    assert pool.layout.nbytes > 1 << 31
    async with (
        Engine(HostDevice(threads=1), FileDevice(threads=2)) as engine,
        KVStore(
            engine,
            layout=LAYOUT,
            placement=Placement.WHOLE_DISK,
            disk=DiskTier(tmp_path),
            static_scales=SCALES,
            write_behind_bytes=1,
            read_bytes=1,
        ) as store,
    ):
        with pool.lease(1) as pages:
            parts = chunks(pages[0].view(write=True))
            for number, part in enumerate(parts):
                np.bitwise_xor(noise, np.uint64(number), out=part)
            del parts, part
            await (await store.put(keys, pages)).resident()
            whole = pages[0].view(write=True)
            for start in range(0, len(whole), STEP):
                whole[start : start + STEP] = bytes(len(whole[start : start + STEP]))
            del whole
            (path,) = files(tmp_path)
            assert path.stat().st_size == store.form.file_bytes > 1 << 31
            with store.lookup(keys) as hit:
                assert await store.fetch(hit, into=pages) == 1
            parts = chunks(pages[0].view())
            wrong = [
                number
                for number, part in enumerate(parts)
                if not np.array_equal(part, noise ^ np.uint64(number))
            ]
            assert wrong == []
            del parts
        assert store.remove(keys) == 1
        await store.drain()
        assert files(tmp_path) == []
    pool.close()
