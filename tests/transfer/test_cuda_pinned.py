"""Page-locked slots: registered piece by piece, given back in reverse, never unmapped before."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
from tests.transfer.cuda_rig import PAGE
from tests.transfer.gpu_kit import FakeDriver

from transfer import WrongPool
from transfer._cuda_pinned import PinFailed, PinnedPool, PinnedStorage, account, bind, gpu_node
from transfer._extent import BlockLayout, Extent
from transfer._storage import _kept


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(manual=True)


def test_the_whole_pool_is_registered_and_page_aligned(driver: FakeDriver) -> None:  # case 83
    pool = PinnedPool(PAGE, 10, driver=driver)
    (plane,) = pool.storage.planes
    assert driver.registered == {plane.address: 10 * PAGE.nbytes}
    assert plane.address % 4096 == plane.stride % 4096 == 0
    assert pool.placement.nbytes == 10 * PAGE.nbytes
    assert pool.storage.pinned
    pool.close()
    assert not driver.registered


@pytest.mark.parametrize("nbytes", [4096, 12288, 5000, 100])
def test_no_block_straddles_two_registrations(driver: FakeDriver, nbytes: int) -> None:
    storage = PinnedStorage(nbytes, 50, driver, registration=64 << 10)
    (plane,) = storage.planes
    starts = sorted(driver.registered)
    assert starts[0] == plane.address
    for block in range(50):
        first = plane.address + block * plane.stride
        inside = [at for at in starts if at <= first][-1]
        assert first + nbytes <= inside + driver.registered[inside]
    storage.close()


def test_progress_is_told_up_to_the_end(driver: FakeDriver) -> None:
    told: list[tuple[int, int]] = []
    PinnedStorage(
        4096, 64, driver, registration=64 << 10, progress=lambda *at: told.append(at)
    ).close()
    assert [done for done, _ in told] == [1 << 16, 2 << 16, 3 << 16, 4 << 16]
    assert {whole for _, whole in told} == {4 << 16}


@pytest.mark.parametrize("nth", [1, 3])
def test_a_failure_undoes_what_was_registered_in_reverse(  # case 83
    driver: FakeDriver, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone: list[int] = []
    plain = driver.unregister

    def unregister(address: int) -> None:
        undone.append(address)
        plain(address)

    monkeypatch.setattr(driver, "unregister", unregister)
    kept = len(_kept)
    driver.fail("register", nth)
    with pytest.raises(PinFailed, match=r"page-locking 65536 bytes .*ulimit -l"):
        PinnedStorage(4096, 64, driver, registration=64 << 10)
    assert len(undone) == nth - 1
    assert undone == sorted(undone, reverse=True)
    assert not driver.registered
    assert len(_kept) == kept


def test_what_stays_registered_stays_mapped(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    storage = PinnedStorage(4096, 64, driver, registration=64 << 10)
    driver.fail("unregister", 2)
    storage.close()
    assert len(driver.registered) == 3
    assert "stay mapped" in caplog.text
    assert storage in _kept
    ctypes.memset(storage.planes[0].address, 1, 4096)  # would crash if it were unmapped
    storage.close()
    assert not driver.registered
    assert storage not in _kept


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_gives_no_registration_back(driver: FakeDriver) -> None:  # case 82
    storage = PinnedStorage(4096, 4, driver)
    ctypes.memset(storage.planes[0].address, 7, 4096)
    child = os.fork()
    if child == 0:
        seen = ctypes.string_at(storage.planes[0].address, 4096) == b"\7" * 4096
        ctypes.memset(storage.planes[0].address, 8, 1)
        storage.close()
        os._exit(0 if seen and len(driver.registered) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(storage.planes[0].address, 2) == b"\x08\7"
    assert len(driver.registered) == 1
    storage.close()


def test_a_slot_is_one_plane(driver: FakeDriver) -> None:
    two = BlockLayout((Extent("a", (4,), "uint8"), Extent("b", (4,), "uint8", plane=1)), (4, 4))
    with pytest.raises(WrongPool, match="the layout has 2"):
        PinnedPool(two, 1, driver=driver)


def test_the_report_says_what_was_really_done(driver: FakeDriver) -> None:
    pool = PinnedPool(PAGE, 128, driver=driver, huge_pages=True, numa_node=63)
    report = pool.placement
    assert report.huge in {"reserved", "advised", "no"}
    assert report.bound == (63 if not report.notes else report.bound)
    assert report.bound == 63 or any("node 63" in note for note in report.notes)
    assert report.registrations == 1
    pool.close()
    own = PinnedPool(PAGE, 1, driver=driver, numa_node="gpu")
    assert own.placement.bound is None  # this GPU has no address on any bus
    own.close()


def test_accounts_of_the_kernel(tmp_path: Path) -> None:
    assert gpu_node("0000:zz:00.0") is None
    assert account(1) == (0, {})
    memory = np.zeros(4096, dtype=np.uint8)
    assert "node 63" in (bind(int(memory.ctypes.data), 4096, 63) or "node 63")
