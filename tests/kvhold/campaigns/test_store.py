"""A few schedules of the store campaign, and its report."""

from pathlib import Path

import pytest
from rich.console import Console

from kvhold.campaigns.store import campaign, run_schedule, show
from kvhold.campaigns.store_schedule import StoreReport


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_schedules_are_right(tmp_path: Path, backend: str) -> None:
    report = StoreReport()
    found = {seed: run_schedule(seed, report, tmp_path, backend=backend) for seed in range(12)}
    assert {seed: what for seed, what in found.items() if what} == {}
    assert report.schedules == 12
    assert report.pages > 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_campaign_is_right_and_finds_every_bug() -> None:
    report = campaign(0, duration=10)
    console = Console(record=True, width=120)
    show(report, console)
    assert report.right, console.export_text()
    assert len(report.bugs) == 9


def test_a_report_with_a_violation_is_not_right() -> None:
    assert StoreReport().right
    assert not StoreReport(bugs={"bug": (None, "")}).right
    report = StoreReport(bugs={"bug": (1, "seen")}, failed={7: "wrong bytes"})
    assert not report.right
    console = Console(record=True, width=120)
    show(report, console)
    assert "seed 7: wrong bytes" in console.export_text()
