"""The disk tier: names, charges and steps of recovery."""

from pathlib import Path

import pytest
from tests.tiers.store_kit import LAYOUT

from tiers import CapacityExceeded, DiskTier, Item
from tiers._folder import SHARDS, Found, Name
from tiers._form import Form, Placement
from tiers.disk import STEP_SHARDS, findings

FORM = Form(LAYOUT, Placement.WHOLE_DISK)


def item(tier: DiskTier, number: int = 0) -> Item:
    return Item(bytes([number]) * 32, tier.new_put(), FORM.disk_parts, FORM.file_bytes)


def test_no_name_is_used_twice(tmp_path: Path) -> None:
    tiers = [DiskTier(tmp_path, shared=True) for _ in range(3)]
    names = {tier.reserve(item(tier)).name for tier in tiers for _ in range(100)}
    assert len(names) == 300
    assert {name.writer for name in names} == {tier.folder.writer for tier in tiers}


def test_whole_blocks_are_charged(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, quota=10 * 4096)
    assert [tier.charge(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]
    assert tier.fits(8192) == 5
    slot = tier.reserve(item(tier))
    assert slot.charged == FORM.file_bytes
    with pytest.raises(CapacityExceeded):
        [tier.reserve(item(tier)) for _ in range(3)]
    assert DiskTier(tmp_path).fits(1) > 1 << 30


def test_what_is_there_counts_even_beyond_the_quota(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, quota=4096)
    name = Name(bytes(32), bytes(16), "whole")
    slot = tier.adopt(Found(name, FORM.file_bytes, 20480), item(tier))
    assert tier.counts() == (0, 20480, 0, 0)
    assert tier.fits(1) == 0
    assert tier.path(slot) == tmp_path / "data" / "00" / str(name)


def test_recovery_goes_in_steps(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    tier.open()
    try:
        for number in range(3):
            name = Name(bytes([number]) * 32, b"deadbeef" + bytes(8), "whole")
            tier.folder.path(name).write_bytes(bytes(FORM.file_bytes))
        stranger = tmp_path / "data" / "ff" / "stranger"
        stranger.write_bytes(b"x")
        seen, steps = [], 0
        for step in tier.scan():
            step.fn()
            shards = findings(tier, step)
            assert len(shards) <= STEP_SHARDS
            seen += [found.name.key[0] for shard in shards for found in shard.whole]
            steps += 1
        assert seen == [0, 1, 2]
        assert steps == len(SHARDS) // STEP_SHARDS
        assert tier.counts().other == stranger.stat().st_blocks * 512
        assert sum(len(scan.whole) for scan in tier.scan_all()) == 3
    finally:
        tier.close()


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    for bad in ({"durability": "maybe"}, {"quota": 0}):
        with pytest.raises(ValueError, match="disk"):
            DiskTier(tmp_path, **bad)
