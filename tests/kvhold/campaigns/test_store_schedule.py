"""One schedule of the store campaign: the looks themselves see what they are for."""

import errno
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvhold.campaigns.store_pages import keys_of
from kvhold.campaigns.store_schedule import Schedule, StoreReport, Violation
from tiers import Placement
from transfer.testing import FaultPlan, FaultyCalls

pytestmark = pytest.mark.anyio


class Meddling(Schedule):
    """A schedule in which somebody removes files behind the store's back."""

    async def step(self) -> None:
        """Put, take a file away, look."""
        self.look()
        await self.put()
        await self.store.drain()
        for path in self.root.glob("data/*/*"):
            path.unlink()
        self.look()


@pytest.mark.may_block
async def test_a_file_that_vanishes_is_seen(tmp_path: Path) -> None:
    for seed in range(40):
        schedule = Meddling(seed, tmp_path / str(seed), StoreReport())
        if schedule.faulty or schedule.placement.value == "whole host":
            continue
        with pytest.raises(Violation, match="has no file"):
            await schedule.run()
        return
    pytest.fail("no seed fits")


@pytest.mark.may_block
async def test_a_schedule_of_a_seed_is_right(tmp_path: Path, seed: int) -> None:
    report = StoreReport()
    await Schedule(seed % 1000, tmp_path / "tier", report).run()
    assert report.steps == 40


class LateFault(FaultyCalls):
    """An unlink that met a fault of the first plan, and tells of it under the next one."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._swapped = threading.Event()
        self._plan = FaultPlan(0)
        self.stubborn = False
        super().__init__(self._plan)

    @property
    def plan(self) -> FaultPlan:
        return self._plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        self._plan = plan
        if self.arrived.is_set():
            self._swapped.set()

    def unlink(self, path: Path) -> None:
        is_removal = path.suffix != ".tmp"
        if is_removal and (self.stubborn or not self.arrived.is_set()):
            self.arrived.set()
            self._swapped.wait(60)
            raise OSError(errno.EIO, "late")
        super().unlink(path)


class Ending(Schedule):
    """A schedule that ends while a removal is about to fail."""

    def __init__(self, seed: int, root: Path) -> None:
        super().__init__(seed, root, StoreReport())
        self.placement = Placement.WHOLE_DISK
        self.faulty = False
        self.late = LateFault()
        self.calls = self.late

    async def step(self) -> None:
        """Nothing: the end is what counts."""

    async def finish(self) -> None:
        """Put a page, remove it, and end in the middle of that."""
        keys = keys_of(0, 1)
        with self.pool.lease(1) as blocks:
            await (await self.store.put(keys, blocks)).resident()
        self.drop(0, keys)
        with anyio.fail_after(30):
            while not self.late.arrived.is_set():
                await anyio.lowlevel.checkpoint()
        await super().finish()


async def test_a_fault_that_was_under_way_at_the_end_is_no_violation(tmp_path: Path) -> None:
    await Ending(0, tmp_path / "tier").run()


async def test_a_removal_that_goes_on_failing_is_one(tmp_path: Path) -> None:
    schedule = Ending(0, tmp_path / "tier")
    schedule.late.stubborn = True
    with pytest.raises(Violation, match="is counted, 16384 bytes are there"):
        await schedule.run()


async def test_a_file_that_nobody_counts_is_seen(tmp_path: Path) -> None:
    class Littered(Ending):
        async def finish(self) -> None:
            (self.root / "data" / "00" / "litter").write_bytes(bytes(9000))
            self.look()

    with pytest.raises(Violation, match="12288 bytes are in files, 0 are counted"):
        await Littered(0, tmp_path / "tier").run()
