"""A campaign: schedules for a while, then every seeded bug, then the naive control."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvhold.campaigns._schedule import Outcome, Schedule, run
from transfer.testing import SEEDED_BUGS, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Profile:
    """How much a campaign does.

    Attributes:
        duration: seconds of schedules; None to go by `schedules` alone.
        schedules: how many at most; None to go by `duration` alone.
        real_share: one schedule of so many runs real threads, memory and files.
        bug_schedules: how many schedules a seeded bug may go uncaught.
        naive_schedules: how many schedules the naive control runs.
        only: faults that the schedules inject; None for all. Bugs and control meet all of them.
    """

    duration: float | None = 60.0
    schedules: int | None = None
    real_share: int = 8
    bug_schedules: int = 3000
    naive_schedules: int = 200
    only: frozenset[Fault] | None = None

    @staticmethod
    def ci() -> Profile:
        """A fixed number of schedules, a few seconds in all."""
        return Profile(None, 80, real_share=10, bug_schedules=600, naive_schedules=30)


@dataclass
class Caught:
    """How a seeded bug was noticed.

    Attributes:
        name: the bug.
        schedules: how many it took, the one that failed included; None if none did.
        violation: (kind, what) was wrong first.
        schedule: the one that failed.
    """

    name: str
    schedules: int | None
    violation: tuple[str, str] | None = None
    schedule: Schedule | None = None


@dataclass
class Report:
    """What a campaign found.

    Attributes:
        seed: of the first schedule; the next have the next numbers.
        schedules: how many were run.
        real: how many of them on real devices.
        operations: how many were begun.
        reuses: leases of blocks that had been leased before.
        steps: how often every live block's bytes were checked.
        least: the fewest operations, and the fewest reuses, of any schedule.
        injected: how often each fault struck.
        failed: schedules with violations.
        bugs: how each seeded bug was noticed.
        naive: schedules that the naive engine ran.
        corrupted: how many of them damaged bytes.
        seconds: how long the schedules took, without bugs and control.
    """

    seed: int
    schedules: int = 0
    real: int = 0
    operations: int = 0
    reuses: int = 0
    steps: int = 0
    least: tuple[int, int] = (1 << 30, 1 << 30)
    injected: Counter[Fault] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)
    bugs: list[Caught] = field(default_factory=list)
    naive: int = 0
    corrupted: int = 0
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether nothing was violated, every bug was caught and the control was seen to fail."""
        caught = all(bug.schedules is not None for bug in self.bugs)
        return not self.failed and caught and (self.corrupted > 0 or not self.naive)

    def add(self, outcome: Outcome) -> None:
        """Count a schedule in."""
        self.schedules += 1
        self.real += outcome.schedule.real
        self.operations += outcome.operations
        self.reuses += outcome.reuses
        self.steps += outcome.steps
        self.injected += outcome.injected
        if outcome.violations:
            self.failed.append(outcome)
        else:
            fewest_operations, fewest_reuses = self.least
            self.least = (
                min(fewest_operations, outcome.operations),
                min(fewest_reuses, outcome.reuses),
            )


class Runner:
    """Runs schedules one after another on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self._loop = loop
        self._folder = folder
        self._count = 0

    def run(self, schedule: Schedule) -> Outcome:
        """Run one schedule in a folder of its own."""
        self._count += 1
        folder = self._folder / str(self._count)
        if schedule.real:
            folder.mkdir()
        return run(schedule, folder, self._loop)


@contextmanager
def runner() -> Iterator[Runner]:
    """A runner with a loop and a folder for as long as the `with` lasts."""
    loop = asyncio.new_event_loop()
    try:
        with tempfile.TemporaryDirectory(prefix="kvhold-campaign-") as folder:
            yield Runner(loop, Path(folder))
    finally:
        loop.close()


def replay(schedule: Schedule) -> Outcome:
    """Run one schedule, as a failed campaign prints it, and print what is wrong."""
    with runner() as runs:
        outcome = runs.run(schedule)
    for kind, what in outcome.violations:
        print(f"{kind}: {what}")  # noqa: T201 - this is what it is for
    return outcome


def campaign(
    seed: int, profile: Profile, *, progress: Callable[[str, float], None] | None = None
) -> Report:
    """Run a campaign.

    Args:
        seed: of the first schedule.
        profile: how much to do.
        progress: called with what is being done, and how far that is, from 0 to 1.
    """
    report = Report(seed)
    tell = progress or (lambda _what, _part: None)
    with runner() as runs:
        _schedules(report, runs, profile, tell)
        for number, name in enumerate(SEEDED_BUGS):
            watch = partial(tell, f"seeded bug: {name}", number / len(SEEDED_BUGS))
            report.bugs.append(_bug(name, seed, runs, profile.bug_schedules, watch))
        for number in range(profile.naive_schedules):
            tell("naive control", number / profile.naive_schedules)
            outcome = runs.run(Schedule.drawn(seed + number, naive=True, deep=False))
            report.naive += 1
            report.corrupted += any(kind == "bytes" for kind, _ in outcome.violations)
    tell("done", 1.0)
    return report


def _schedules(
    report: Report, runs: Runner, profile: Profile, tell: Callable[[str, float], None]
) -> None:
    begun = time.monotonic()
    while True:
        report.seconds = time.monotonic() - begun
        by_time = 0.0 if profile.duration is None else report.seconds / max(profile.duration, 1e-9)
        by_count = 0.0 if profile.schedules is None else report.schedules / profile.schedules
        part = max(by_time, by_count)
        tell(_counts(report), min(part, 1.0))
        if part >= 1:
            return
        number = report.schedules
        real = number % profile.real_share == profile.real_share - 1
        schedule = Schedule.drawn(report.seed + number, real=real)
        report.add(runs.run(schedule.limited_to(profile.only) if profile.only else schedule))


def _counts(report: Report) -> str:
    """What was done so far, for people who watch."""
    faults = sum(report.injected.values())
    wrong = f", {len(report.failed)} WRONG" if report.failed else ""
    return f"{report.schedules} schedules, {report.operations} operations, {faults} faults{wrong}"


def _bug(name: str, seed: int, runs: Runner, most: int, watch: Callable[[], None]) -> Caught:
    """Put a bug in and run schedules until one fails that is right without it.

    The engine's own books are not looked at: bytes, outcomes and order must show it.
    """
    for number in range(most):
        watch()
        schedule = Schedule.drawn(seed + number, deep=False)
        with SEEDED_BUGS[name]():
            outcome = runs.run(schedule)
        if outcome.violations and not runs.run(schedule).violations:
            return Caught(name, number + 1, outcome.violations[0], schedule)
    return Caught(name, None)
