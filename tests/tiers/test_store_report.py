"""Statistics: exact, frozen, and adding up; verify finds every damaged page."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from tests.tiers.store_kit import keys_of, rig

from tiers import Placement

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("placement", Placement)
async def test_counters_equal_a_script(tmp_path: Path, placement: Placement) -> None:
    # case 77 (counters, known hits, misses, puts and evictions; each hit is one tier's)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys_of(3))
        await it.put(keys_of(3))
        assert await it.get(keys_of(4)) == 3
        assert await it.get(keys_of(2, start=9)) == 0
        it.store.evict(1)
        it.store.remove(keys_of(1))
        await it.store.drain()
        found = it.store.statistics()
        tier = "host" if placement is Placement.WHOLE_HOST else "disk"
        assert dict(found.hits) == {tier: 3}
        assert (found.lookups, found.misses, found.offered) == (2, 3, 6)
        assert (found.stored, found.evicted, found.failed, found.dropped) == (3, 1, 0, 0)
        assert found.pages == 1
        assert found.written_bytes == 3 * it.store.form.file_bytes
        assert found.read_bytes == 3 * it.store.form.file_bytes
        assert not found.faults
        assert not found.refused
        with pytest.raises(FrozenInstanceError):
            found.pages = 5  # type: ignore[misc]
        with pytest.raises(TypeError):
            found.hits["x"] = 1  # type: ignore[index]


@pytest.mark.parametrize("placement", [Placement.SPLIT, Placement.WHOLE_DISK])
async def test_verify_finds_every_damaged_page(tmp_path: Path, placement: Placement) -> None:
    keys = keys_of(6)
    steps: list[tuple[int, int]] = []
    async with rig(tmp_path, placement=placement, read_bytes=1) as it:
        await it.put(keys)
        for number in (1, 4):
            (path,) = it.files(f"data/*/{keys.digests[number].hex()}-*")
            data = bytearray(path.read_bytes())
            data[4100] ^= 8
            path.write_bytes(data)
        report = await it.store.verify(progress=lambda done, all_: steps.append((done, all_)))
        assert report.checked == 6
        assert set(report.damaged) == {keys.digests[n].hex() for n in (1, 4)}
        assert all("CRC" in why for why in report.damaged.values())
        assert steps[-1] == (6, 6)
        assert len(steps) > 1
        await it.store.drain()
        assert it.store.match(keys) == 1
        again = await it.store.verify()
        assert (again.checked, dict(again.damaged)) == (4, {})
