"""Removals: a few at a time, in order, and kept when they fail; faults have names."""

import errno
import threading
from pathlib import Path

import anyio
import pytest
from tests.tiers.store_kit import keys_of, rig, until

from tiers import LengthError, Placement
from tiers._store_removals import AT_ONCE, fault_name

pytestmark = pytest.mark.anyio


async def test_only_a_few_removals_are_under_way(tmp_path: Path) -> None:
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys_of(12))
        gate = it.calls.gates["unlink"] = threading.Event()
        assert it.store.evict(12) == 12
        await until(it.calls.arrived.is_set)
        removals = it.store._core.removals
        assert len(removals._active) == AT_ONCE
        assert removals.queued == 12 - AT_ONCE
        assert removals.pages() == removals.pages("") == 12
        assert removals.pages("somebody") == 0
        gate.set()
        await it.store.drain()
        assert it.files() == []


async def test_what_fails_is_tried_again_and_nothing_else_is(tmp_path: Path) -> None:
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys_of(3))
        it.calls.nth(2, errno.EIO, only=["unlink"])
        it.store.evict(3)
        await it.store.drain()
        assert len(it.files()) == it.store.statistics().stuck_removals == 1
        it.store._core.removals.retry()
        await it.store.drain()
        assert it.files() == []


@pytest.mark.parametrize("placement", [Placement.WHOLE_DISK, Placement.SPLIT])
async def test_closing_tries_again_what_failed(tmp_path: Path, placement: Placement) -> None:
    # A page that was removed would be taken over, and be there again, by the next process.
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        it.calls.every(errno.EIO, only=["unlink"])
        assert it.store.remove(keys) == 3
        await it.store.drain()
        assert len(it.files()) == it.store.statistics().stuck_removals == 3
    assert it.files() == []


async def test_closing_does_not_wait_for_what_goes_on_failing(tmp_path: Path) -> None:
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys_of(1))
        it.calls.every(errno.EROFS, only=["unlink"])
        it.store.remove(keys_of(1))
        await it.store.drain()
        with anyio.fail_after(10):
            await it.store.aclose()
        assert len(it.files()) == it.store.statistics().stuck_removals == 1


def test_faults_have_names() -> None:
    assert fault_name(OSError(errno.ENOSPC, "full")) == "ENOSPC"
    assert fault_name(OSError("no number")) == "OSError"
    assert fault_name(LengthError("a", found=1, expected=2)) == "LengthError"
