"""Store campaign: random schedules over a whole store, each held against a plain model.

A schedule puts, looks up, fetches, evicts and removes pages of a few sequences while file calls fail,
awaits are cancelled and writes stand still. After every step the books are held against the files and
the model; a wrong byte, a page that is visible too early or too late, or a byte that is not accounted
for ends the schedule. Run it as ``python -m kvhold.campaigns.store``.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Console
from rich.table import Table

from kvhold.campaigns.store_bugs import STORE_BUGS
from kvhold.campaigns.store_schedule import Schedule, StoreReport, Violation
from transfer import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run_schedule(seed: int, report: StoreReport, folder: Path, *, backend: str = "asyncio") -> str:
    """Run one schedule; what was violated, "" if nothing."""
    root = folder / str(seed)

    async def main() -> str:
        try:
            with anyio.fail_after(60):
                await Schedule(seed, root, report).run()
        except Violation as violation:
            return str(violation)
        except TimeoutError:
            return "the schedule did not end"
        return ""

    try:
        return _unwrap(lambda: anyio.run(main, backend=backend))
    finally:
        report.schedules += 1
        shutil.rmtree(root, ignore_errors=True)


def _unwrap(call: Callable[[], str]) -> str:
    """Errors of the library in a schedule are violations, too."""
    try:
        return call()
    except (TransferError, RuntimeError, AssertionError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def campaign(
    seed: int,
    *,
    duration: float,
    bug_schedules: int = 400,
    progress: Callable[[str, float], None] | None = None,
) -> StoreReport:
    """Run schedules for `duration` seconds, then look for every seeded bug.

    Args:
        seed: of the first schedule.
        duration: seconds, without the bugs.
        bug_schedules: schedules that a seeded bug may go unnoticed.
        progress: called with what is being done, and how far that is.
    """
    report, tell = StoreReport(), progress or (lambda _what, _part: None)
    backends = ("asyncio", "trio")
    with tempfile.TemporaryDirectory(prefix="kvhold-store-") as name:
        folder, begun = Path(name), time.monotonic()
        number = seed
        while report.seconds < duration:
            tell("schedules", report.seconds / duration)
            found = run_schedule(number, report, folder, backend=backends[number % 2])
            if found:
                report.failed[number] = found
            number += 1
            report.seconds = time.monotonic() - begun
        for index, (bug, make) in enumerate(STORE_BUGS.items()):
            tell(f"seeded bug: {bug}", index / len(STORE_BUGS))
            report.bugs[bug] = _find(make, seed, folder, bug_schedules)
    return report


def _find(make: Callable[[], Any], seed: int, folder: Path, most: int) -> tuple[int | None, str]:
    """Run schedules with a bug until one notices it."""
    for number in range(most):
        with make():
            found = run_schedule(seed + number, StoreReport(), folder)
        if found and not run_schedule(seed + number, StoreReport(), folder):
            return number + 1, found
    return None, ""


def show(report: StoreReport, console: Console) -> None:
    """Print the report as tables."""
    table = Table(title="store campaign")
    table.add_column("what")
    table.add_column("count", justify="right")
    rows: dict[str, object] = {
        "schedules": report.schedules,
        "steps, each checked against files and model": report.steps,
        "pages fetched and compared": report.pages,
        **{f"injected: {name}": count for name, count in sorted(report.faults.items())},
        "violations": len(report.failed),
        "seconds": f"{report.seconds:.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    bugs = Table(title="seeded bugs")
    for heading in ("bug", "schedules", "noticed by"):
        bugs.add_column(heading)
    for name, (found, how) in report.bugs.items():
        bugs.add_row(name, "not found" if found is None else str(found), how[:100])
    console.print(bugs)
    for seed, what in report.failed.items():
        console.print(f"seed {seed}: {what}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; 0 if all is right, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m kvhold.campaigns.store", description=__doc__)
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of schedules")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    given = parser.parse_args(arguments)
    logging.getLogger("kvhold").setLevel(logging.ERROR)  # every fault is in the table
    report = campaign(given.seed, duration=given.duration)
    show(report, Console())
    return 0 if report.right else 1


if __name__ == "__main__":
    sys.exit(main())
