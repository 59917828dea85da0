"""One schedule of the store campaign: the looks themselves see what they are for."""

from pathlib import Path

import pytest

from kvhold.campaigns.store_schedule import Schedule, StoreReport, Violation

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
