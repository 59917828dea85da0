"""A short crash campaign."""

import pytest
from rich.console import Console

from kvhold.campaigns.crash import CrashReport, campaign, show


def test_children_are_killed_and_nothing_is_wrong() -> None:
    # case 21 (a writer dies), case 22 (two processes), case 29 (leftovers), case 45 (keys)
    report = campaign(3, kills=20)
    console = Console(record=True, width=120)
    show(report, console)
    assert report.right, console.export_text()
    assert report.kills >= 20
    assert report.checked > 0


@pytest.mark.slow
def test_five_hundred_kills_in_three_minutes() -> None:
    report = campaign(0, kills=500)
    assert report.right, report
    assert report.seconds < 180


def test_what_is_not_right_shows() -> None:
    good = CrashReport(left=0)
    assert good.right
    for name, value in (
        ("wrong", ["bytes of sequence 1"]),
        ("unreadable", ["x"]),
        ("odd", ["y"]),
        ("left", 1),
        ("damaged", 1),
        ("files", 1),
    ):
        report = CrashReport(left=0)
        setattr(report, name, value)
        assert not report.right
    console = Console(record=True, width=120)
    show(CrashReport(wrong=["bytes of sequence 1"]), console)
    assert "bytes of sequence 1" in console.export_text()
