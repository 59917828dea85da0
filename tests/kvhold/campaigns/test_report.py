"""A report: tables, plain data, and code for what failed."""

import io
import json

from rich.console import Console

from kvhold.campaigns._campaign import Caught, Report
from kvhold.campaigns._report import as_code, as_data, show
from kvhold.campaigns._schedule import Outcome, Schedule
from transfer.testing import Fault


def sample() -> Report:
    report = Report(9)
    good = Outcome(Schedule(9), 21, 2, 300)
    good.injected[Fault.TWICE] = 4
    report.add(good)
    report.add(Outcome(Schedule(10), 3, 0, 20, violations=[("bytes", "block 3 is not its data")]))
    report.bugs.append(Caught("release on cancel", 3, ("bytes", "damage"), Schedule(4)))
    report.bugs.append(Caught("release by age", None))
    report.naive, report.corrupted = 10, 4
    return report


def test_data_is_plain_and_complete() -> None:
    data = json.loads(json.dumps(as_data(sample())))
    assert data["schedules"] == 2
    assert data["operations"] == 24
    assert (data["operations_least"], data["reuses_least"]) == (21, 2)
    assert data["faults"] == {"signal twice": 4}
    assert data["violations"] == 1
    assert "replay(Schedule(seed=10" in data["failures"][0]["code"]
    assert data["seeded_bugs"]["release by age"]["schedules_until_caught"] is None
    assert data["naive_corrupted"] == 4
    assert data["right"] is False


def test_people_see_the_same() -> None:
    text = io.StringIO()
    show(sample(), Console(file=text, width=200))
    for expected in ("not caught", "signal twice", "4 of 10", "bytes: block 3", "NOT right"):
        assert expected in text.getvalue()


def test_code_compiles() -> None:
    compile(as_code(Schedule(1)), "printed", "exec")
    assert "SEEDED_BUGS['close unmaps']" in as_code(Schedule(1), "close unmaps")
    compile(as_code(Schedule(1), "close unmaps"), "printed", "exec")
