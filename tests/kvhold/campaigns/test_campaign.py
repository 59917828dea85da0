"""A campaign: counts add up, a failure is code that fails again, the command says right or not."""

import json
from typing import Any

import pytest

from kvhold._errors import UserError
from kvhold.campaigns import Profile, Report, campaign, replay
from kvhold.campaigns import __main__ as command
from kvhold.campaigns._report import as_code
from transfer.testing import SEEDED_BUGS, Fault

SHORT = Profile(None, 16, real_share=8, bug_schedules=0, naive_schedules=6)


def test_counts_add_up() -> None:
    told: list[tuple[str, float]] = []
    report = campaign(40, SHORT, progress=lambda what, part: told.append((what, part)))
    assert (report.schedules, report.real, report.naive) == (16, 2, 6)
    assert report.operations >= 16 * 20
    assert report.least >= (20, 1)
    assert report.failed == []
    assert sum(report.injected.values()) > 50
    assert told[-1] == ("done", 1.0)
    assert all(0 <= part <= 1 for _, part in told)


def test_a_bug_that_is_not_caught_is_not_right() -> None:
    report = campaign(0, Profile(None, 1, bug_schedules=0, naive_schedules=0))
    assert [bug.schedules for bug in report.bugs] == [None] * len(SEEDED_BUGS)
    assert not report.right
    assert Report(0).right


def test_a_bug_is_caught_and_its_schedule_fails_again_as_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only = "release on cancel"
    monkeypatch.setattr("kvhold.campaigns._campaign.SEEDED_BUGS", {only: SEEDED_BUGS[only]})
    report = campaign(0, Profile(None, 1, bug_schedules=50, naive_schedules=0))
    (bug,) = report.bugs
    assert bug.schedule is not None
    exec(as_code(bug.schedule, only), {})  # noqa: S102 - what a failed campaign asks for
    assert bug.violation is not None
    assert bug.violation[1] in capsys.readouterr().out
    assert replay(bug.schedule).violations == []


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = Profile(None, 2, bug_schedules=0, naive_schedules=0)
    monkeypatch.setattr(Profile, "ci", lambda: few)
    assert command.main(["--seed", "3", "--ci", "--json"]) == 1
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["schedules"] == 2
    assert data["violations"] == 0
    assert data["right"] is False
    assert command.main(["--seed", "3", "--ci", "--schedules", "1"]) == 1
    assert "NOT right" in capsys.readouterr().out


def test_only_the_faults_that_are_asked_for_are_injected() -> None:
    # Two of the simulated device, whose number follows from the seed; short counts are the files'.
    chosen = command.faults_named("lose, twice")
    assert chosen == frozenset({Fault.LOSE, Fault.TWICE})
    report = campaign(0, Profile(None, 16, bug_schedules=0, naive_schedules=0, only=chosen))
    assert set(report.injected) == {Fault.LOSE, Fault.TWICE}
    assert report.failed == []
    assert command.faults_named("") is None
    with pytest.raises(UserError, match="no fault 'gremlins': there are refuse, partial"):
        command.faults_named("lose,gremlins")
