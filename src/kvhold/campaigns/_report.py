"""A campaign's report: tables for people, JSON for programs, code to paste for what failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from kvhold.campaigns._campaign import Report
    from kvhold.campaigns._schedule import Outcome, Schedule


def as_code(schedule: Schedule, bug: str | None = None) -> str:
    """A schedule as a program that runs it again."""
    lines = [
        "from kvhold.campaigns import Schedule, replay",
        "from transfer.testing import SEEDED_BUGS, Fault, FaultPlan",
        "",
    ]
    if bug is not None:
        return "\n".join([*lines, f"with SEEDED_BUGS[{bug!r}]():", f"    replay({schedule!r})"])
    return "\n".join([*lines, f"replay({schedule!r})"])


def as_data(report: Report) -> dict[str, Any]:
    """The report as plain data; counts, seconds, and code for each failure."""
    return {
        "seed": report.seed,
        "seconds": round(report.seconds, 2),
        "schedules": report.schedules,
        "schedules_on_real_devices": report.real,
        "operations": report.operations,
        "operations_least": report.least[0],
        "reuses": report.reuses,
        "reuses_least": report.least[1],
        "byte_checks": report.steps,
        "faults": {fault.value: n for fault, n in sorted(report.injected.items(), key=_by_name)},
        "violations": len(report.failed),
        "failures": [_failure(outcome) for outcome in report.failed[:20]],
        "seeded_bugs": {
            bug.name: {
                "schedules_until_caught": bug.schedules,
                "seen_as": None if bug.violation is None else bug.violation[0],
            }
            for bug in report.bugs
        },
        "naive_schedules": report.naive,
        "naive_corrupted": report.corrupted,
        "right": report.right,
    }


def _by_name(item: tuple[Any, int]) -> str:
    return str(item[0].value)


def _failure(outcome: Outcome) -> dict[str, Any]:
    return {
        "violations": [f"{kind}: {what}" for kind, what in outcome.violations],
        "code": as_code(outcome.schedule),
    }


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    totals = Table("schedules", "")
    totals.add_row("run", f"{report.schedules:,} in {report.seconds:.1f} s")
    totals.add_row("of these on real devices", f"{report.real:,}")
    totals.add_row("operations", f"{report.operations:,}, at least {report.least[0]} in each")
    totals.add_row(
        "reuses of freed blocks", f"{report.reuses:,}, at least {report.least[1]} in each"
    )
    totals.add_row("checks of every live byte", f"{report.steps:,}")
    totals.add_row("violations", f"{len(report.failed)}")
    console.print(totals)
    faults = Table("fault", "injected")
    for fault, count in sorted(report.injected.items(), key=_by_name):
        faults.add_row(fault.value, f"{count:,}")
    console.print(faults)
    if report.bugs:
        _show_bugs(report, console)
    if report.naive:
        console.print(
            f"naive engine: {report.corrupted} of {report.naive} schedules with damaged bytes"
        )
    for outcome in report.failed[:3]:
        for kind, what in outcome.violations[:3]:
            console.print(f"{kind}: {what}", style="red", markup=False)
        console.print(as_code(outcome.schedule), markup=False, soft_wrap=True)
    console.print("right" if report.right else "NOT right")


def _show_bugs(report: Report, console: Console) -> None:
    bugs = Table("seeded bug", "schedules until caught", "seen as")
    for bug in report.bugs:
        until = "not caught" if bug.schedules is None else str(bug.schedules)
        bugs.add_row(bug.name, until, "" if bug.violation is None else bug.violation[0])
    console.print(bugs)
