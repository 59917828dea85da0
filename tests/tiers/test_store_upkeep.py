"""Opening a folder that others left, or have."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.store_kit import LAYOUT, PROVENANCE, keys_of, rig

from tiers import DiskTier, KVStore, Lru, Placement, S3Fifo, TierBusy, TierError
from tiers._folder import Name
from transfer import Engine, FileDevice, HostDevice

pytestmark = pytest.mark.anyio


def files(root: Path) -> list[Path]:
    return sorted(root.glob("data/*/*"))


def leave(root: Path, name: Name, data: bytes) -> Path:
    path = root / "data" / name.shard / str(name)
    path.write_bytes(data)
    return path


async def test_a_folder_is_taken_over_step_by_step(tmp_path: Path) -> None:
    # case 21, case 29 (what a killed process left)
    keys = keys_of(3)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys)
    good = files(tmp_path)[0].read_bytes()
    dead = b"deadbeef"
    leave(tmp_path, Name(bytes(32), dead + bytes(8), "whole", temporary=True), b"x" * 100)
    leave(tmp_path, Name(bytes(32), dead + bytes(8), "part"), good)
    twin = Name(keys.digests[0], dead + bytes(8), "whole")
    leave(tmp_path, twin, good)
    steps: list[tuple[int, int]] = []
    async with Engine(HostDevice(threads=1), FileDevice(threads=1)) as engine:
        disk = DiskTier(tmp_path)
        store = KVStore(engine, layout=LAYOUT, placement=Placement.WHOLE_DISK, disk=disk)
        await store.start(progress=lambda done, all_: steps.append((done, all_)))
        assert await store.recovered() == 3
        await store.drain()
        found = store.statistics()
        assert (found.temporaries_removed, found.orphans_removed, found.adopted) == (1, 1, 3)
        assert len(files(tmp_path)) == 3  # of two files of one key one is kept
        assert steps[-1] == (256, 256)
        assert len(steps) > 2
        await store.aclose()


@pytest.mark.parametrize("placement", [Placement.SPLIT, Placement.WHOLE_DISK])
async def test_split_values_are_misses_after_a_restart(
    tmp_path: Path, placement: Placement
) -> None:
    # case 38 (keys are gone with the process), and files of the other placement are left alone
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        kept = [path.read_bytes() for path in it.files()]
    other = next(p for p in (Placement.SPLIT, Placement.WHOLE_DISK) if p is not placement)
    kind = "part" if placement is Placement.SPLIT else "whole"
    if placement is Placement.SPLIT:
        for number, digest in enumerate(keys.digests):  # as if it had been killed
            name = Name(digest, b"deadbeef" + number.to_bytes(8, "big"), kind)  # type: ignore[arg-type]
            leave(tmp_path, name, kept[number])
    async with rig(tmp_path, placement=other, recover=False) as it:
        assert await it.store.recovered() == 0
        assert it.store.match(keys) == 0
        found = it.store.statistics()
        if placement is Placement.SPLIT:
            assert found.orphans_removed == 3
            assert it.files() == []
        else:
            assert found.tiers["disk"].other == sum(len(data) for data in kept)
            assert len(it.files()) == 3
            for path in it.files():
                path.unlink()
            it.store._disk.add_other(-found.tiers["disk"].other)  # type: ignore[union-attr]


async def test_a_folder_beyond_its_quota_is_trimmed(tmp_path: Path) -> None:
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys_of(6))
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, quota=3 * 16384) as it:
        await it.store.drain()
        assert it.store.statistics().tiers["disk"].charged == 3 * 16384
        assert len(it.files()) == 3


async def test_what_was_written_last_is_kept_longest(tmp_path: Path) -> None:
    old, new = keys_of(4), keys_of(4, start=1)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(new)
        await it.put(old)
        for digest in old.digests:
            for path in it.files(f"data/*/{digest.hex()}-*"):
                os.utime(path, (1e9, 1e9))
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, quota=6 * 16384) as it:
        await it.store.drain()
        # Of pages written together the first ones are kept: the others are of no use without them.
        assert (it.store.match(new), it.store.match(old)) == (4, 2)
        await it.put(keys_of(2, start=2))
        assert (it.store.match(new), it.store.match(old)) == (4, 0)
        assert it.store.match(keys_of(2, start=2)) == 2


@pytest.mark.parametrize("policy", [Lru, S3Fifo])
async def test_a_page_that_is_taken_over_is_its_tenants_when_it_is_found(
    tmp_path: Path, policy: Any
) -> None:
    ours = keys_of(3, provenance=replace(PROVENANCE, tenant="t"))
    other = keys_of(2, start=1)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(ours)
        await it.put(other)
    options: dict[str, Any] = {"policy": policy, "quotas": {"t": 3 * 16384}}
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, **options) as it:
        # A file does not say whose it is.
        assert it.store.statistics().tenants == {"": 5 * 16384}
        assert await it.get(ours) == 3
        assert it.store.statistics().tenants == {"t": 3 * 16384, "": 2 * 16384}
        fresh = keys_of(1, start=2, provenance=replace(PROVENANCE, tenant="t"))
        await it.put(fresh)
        await it.store.drain()
        # A page of its own has given way, by age the deepest, and nobody else's.
        assert it.store.match(ours) == (2 if policy is Lru else 0)
        assert (it.store.match(fresh), it.store.match(other)) == (1, 2)
        assert it.store.statistics().tenants == {"t": 3 * 16384, "": 2 * 16384}


async def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        store = KVStore(
            it.engine, layout=LAYOUT, placement=Placement.WHOLE_DISK, disk=DiskTier(tmp_path)
        )
        with pytest.raises(TierBusy, match="another writer"):
            await store.start()
        await store.aclose()


@pytest.mark.may_block
@pytest.mark.parametrize("shared", [False, True])
async def test_a_tier_belongs_to_one_store(tmp_path: Path, *, shared: bool) -> None:
    # A second store with the same tier must not take the first one's locks away.
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, shared=shared) as it:
        await it.put(keys_of(2))
        disk = it.store._disk
        assert disk is not None
        second = KVStore(it.engine, layout=LAYOUT, placement=Placement.WHOLE_DISK, disk=disk)
        with pytest.raises(TierBusy, match="open already"):
            await second.start()
        await second.aclose()
        other = DiskTier(tmp_path, shared=shared)
        if shared:
            other.open()
            assert [scan for scan in other.scan_all() if scan.whole] == []
        else:
            with pytest.raises(TierBusy):
                other.open()
        other.close()
        assert await it.get(keys_of(2)) == 2


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with rig(tmp_path / "tier") as it:
        disk = DiskTier(tmp_path / "file" / "below")
        store = KVStore(it.engine, layout=LAYOUT, placement=Placement.WHOLE_DISK, disk=disk)
        with pytest.raises(NotADirectoryError):
            await store.start()


async def test_a_part_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiers import _folder

    scan = _folder.Folder.scan

    def fail(self: _folder.Folder, shard: str) -> _folder.Scan:
        if shard == "77":
            raise OSError(5, "cannot be read")
        return scan(self, shard)

    monkeypatch.setattr(_folder.Folder, "scan", fail)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, recover=False) as it:
        with pytest.raises(TierError, match="cannot be read"):
            await it.store.recovered()
        await it.put(keys_of(1))
        assert await it.get(keys_of(1)) == 1
