"""Health: probes that become rarer, few words in the log, recovery by itself."""

import errno
import logging
from pathlib import Path

import anyio
import pytest
from tests.tiers.store_kit import keys_of, rig

from tiers import Placement
from tiers._health import Monitor

FAULT = OSError(errno.ENOSPC, "No space left on device")


def test_probes_become_rarer_and_success_ends_it() -> None:
    monitor = Monitor("disk", pause=1, longest=4)
    assert monitor.allows(0)
    monitor.fault(FAULT, 10)
    allowed = []
    for now in range(11, 40):
        if monitor.allows(now):
            allowed.append(now)
            monitor.fault(FAULT, now)
    assert allowed == [11, 13, 17, 21, 25, 29, 33, 37]
    assert monitor.health() == ("disk", True, str(FAULT), 9, 0)
    monitor.success()
    assert monitor.allows(40)
    assert monitor.health() == ("disk", False, None, 9, 1)


def test_only_one_probe_at_a_time() -> None:
    monitor = Monitor("disk", pause=1)
    monitor.fault(FAULT, 0)
    assert [monitor.allows(1), monitor.allows(1), monitor.allows(1.5)] == [True, False, False]


def test_faults_in_a_row_may_be_tolerated() -> None:
    monitor = Monitor("disk", tolerate=2)
    for _ in range(5):
        monitor.fault(FAULT, 0)
        monitor.fault(FAULT, 0)
        assert monitor.allows(0)
        monitor.success()
    for _ in range(3):
        monitor.fault(FAULT, 0)
    assert not monitor.allows(0)


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    # case 78 (one line for each of ten thousand faults, elsewhere)
    monitor = Monitor("disk", quiet=10)
    with caplog.at_level(logging.INFO):
        for number in range(10_000):
            monitor.fault(FAULT, number / 100)
        monitor.success()
        monitor.success()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 2 + 10
    assert "No space left" in lines[0]
    assert "works again after 10000 faults" in lines[-1]
    assert sum("works again" in line for line in lines) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EROFS, errno.EMFILE], ids=errno.errorcode.get
)
async def test_ten_thousand_failing_puts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    # case 78 (a standing fault, then recovery, then another), case 52 (cheap while it lasts)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        kept = keys_of(2, start=7)
        await it.put(kept)
        it.calls.every(error, only=["create"])
        with it.lease(1) as pages, caplog.at_level(logging.INFO):
            for start in range(2000):
                await it.store.put(keys_of(1, start=10 + start), pages)
            await it.store.drain()
            assert it.store.health().degraded
            assert await it.get(kept) == 2  # reads go on
            it.calls.fail = None
            with anyio.fail_after(30):
                while it.store.health().degraded:
                    await it.store.put(keys_of(1, start=5), pages)
                    await it.store.drain()
                    await anyio.sleep(0.01)
        statistics = it.store.statistics()
        refused = statistics.refused["degraded"]
        assert refused + statistics.failed + statistics.stored == statistics.offered
        assert refused > 1900
        assert statistics.health.recoveries == 1
    assert len(caplog.records) <= 6


@pytest.mark.anyio
async def test_a_folder_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    async with rig(root, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys_of(2))
        away = tmp_path / "away"
        root.rename(away)
        ticket = await it.put(keys_of(1, start=1), wait=False)
        await it.store.drain()
        assert ticket.stored == 1
        assert it.store.health().degraded
        assert "No such file" in str(it.store.health().reason)
        assert root.is_dir()  # made again by itself
        with anyio.fail_after(30):
            while it.store.health().degraded:
                await it.put(keys_of(1, start=2), wait=False)
                await it.store.drain()
                await anyio.sleep(0.01)
        assert await it.get(keys_of(2)) == 0  # the files are where the folder went
        await it.store.drain()
        await it.put(keys_of(2))
        assert await it.get(keys_of(2)) == 2
