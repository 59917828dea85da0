"""The conformance suite on both tiers, and on tiers that break it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiers.store_kit import LAYOUT

from tiers import CapacityExceeded, DiskTier, HostTier, Item, Slot
from tiers._folder import Scan
from tiers._form import Form, Placement
from tiers._residency import Change
from tiers._tier import Account
from tiers.testing import check_tier
from transfer import BlockLayout, Engine, FileDevice, FileRemove, HostDevice, HostPool
from transfer._work import Work

pytestmark = pytest.mark.anyio
FORM = Form(LAYOUT, Placement.SPLIT)


async def check_host(tier: HostTier) -> None:
    with HostPool(FORM.stored.slot(("key",)), 2) as pool:
        async with Engine(HostDevice(), FileDevice()) as engine:
            await check_tier(tier, engine, pool, FORM.host_parts, nbytes=FORM.host_bytes)


async def check_disk(tier: DiskTier) -> None:
    tier.open()
    try:
        with HostPool(BlockLayout.raw(FORM.file_bytes), 2) as pool:
            async with Engine(HostDevice(), FileDevice()) as engine:
                await check_tier(tier, engine, pool, FORM.disk_parts, nbytes=FORM.file_bytes)
    finally:
        tier.close()


@pytest.mark.parametrize("huge", [False, True])
async def test_the_host_tier_conforms(huge: bool) -> None:
    tier = HostTier.of(FORM.stored, FORM.host_names, blocks=3, huge=huge)
    await check_host(tier)
    assert tier.pool.counts().free == 3
    tier.close()


@pytest.mark.may_block
@pytest.mark.parametrize("durability", ["none", "data", "full"])
@pytest.mark.parametrize("quota", [None, 4 * 12288])
async def test_the_disk_tier_conforms(tmp_path: Path, durability: str, quota: int | None) -> None:
    tier = DiskTier(tmp_path, quota=quota, durability=durability)  # type: ignore[arg-type]
    await check_disk(tier)
    assert tier.counts().charged == 0
    assert [scan for scan in tier.scan_all() if scan != Scan()] == []


class Broken:
    """A disk tier with one fault."""

    def __init__(self, tier: DiskTier) -> None:
        self.inner = tier
        self.name = tier.name
        self.capacity = tier.capacity

    def fits(self, nbytes: int) -> int:
        return self.inner.fits(nbytes)

    def reserve(self, item: Item) -> Slot:
        return self.inner.reserve(item)

    def write(self, slot: Slot, source: object) -> Work:
        return self.inner.write(slot, source)  # type: ignore[arg-type]

    def publish(self, slot: Slot) -> None:
        self.inner.publish(slot)

    def read(self, slot: Slot, into: object) -> Work:
        return self.inner.read(slot, into)  # type: ignore[arg-type]

    def withdraw(self, slot: Slot) -> Sequence[Work]:
        return self.inner.withdraw(slot)

    def evict(self, slot: Slot) -> Sequence[Work]:
        return self.inner.evict(slot)

    def freed(self, slot: Slot) -> None:
        self.inner.freed(slot)

    def counts(self) -> object:
        return self.inner.counts()


class RemovesByKey(Broken):
    def evict(self, slot: Slot) -> Sequence[Work]:
        self.inner.evict(slot)
        folder = self.inner.folder.root / "data" / slot.item.key[:1].hex()
        same = folder.glob(f"{slot.item.key.hex()}-*")
        return [FileRemove(path) for path in same]


class CountsAtOnce(Broken):
    def freed(self, slot: Slot) -> None:
        slot.apply(Change.FREED)


class TakesLateReports(Broken):
    def publish(self, slot: Slot) -> None:
        if slot.residency.name == "FILLING":
            self.inner.publish(slot)


class HasNoEnd(Broken):
    def reserve(self, item: Item) -> Slot:
        try:
            return self.inner.reserve(item)
        except CapacityExceeded:
            return Slot(item, item.nbytes)


@pytest.mark.may_block
@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (RemovesByKey, "hits nothing of a newer one|No such file"),
        (CountsAtOnce, "count no longer"),
        (TakesLateReports, "published twice"),
        (HasNoEnd, "took another item"),
    ],
)
async def test_the_suite_sees_a_broken_tier(tmp_path: Path, broken: type[Broken], why: str) -> None:
    tier = broken(DiskTier(tmp_path, quota=3 * 12288))
    tier.inner.open()
    try:
        with HostPool(BlockLayout.raw(FORM.file_bytes), 2) as pool:
            async with Engine(HostDevice(), FileDevice()) as engine:
                with pytest.raises(Exception, match=why):
                    await check_tier(
                        tier,  # type: ignore[arg-type]
                        engine,
                        pool,
                        FORM.disk_parts,
                        nbytes=FORM.file_bytes,
                    )
    finally:
        tier.inner.close()


def test_an_item_has_to_make_sense() -> None:
    parts = FORM.disk_parts
    for key, put, what, nbytes in (
        (b"k", bytes(16), parts, 1),
        (bytes(32), b"p", parts, 1),
        (bytes(32), bytes(16), (), 1),
        (bytes(32), bytes(16), parts, 0),
    ):
        with pytest.raises(ValueError, match="item"):
            Item(key, put, what, nbytes)


def test_an_account_says_what_is_left() -> None:
    account = Account("disk", 100)
    slot = Slot(Item(bytes(32), bytes(16), FORM.disk_parts, 60), 60)
    account.begin(slot)
    account.other = 10
    with pytest.raises(CapacityExceeded, match="31 bytes wanted, 30 of 100 left"):
        account.check(31)
    account.check(30)
    account.apply(slot, Change.PUBLISH)
    assert account.counts() == (0, 60, 0, 10)
    account.apply(slot, Change.EVICT, Change.FREED)
    assert account.charged == 10
    assert Account("disk", None).room() is None
