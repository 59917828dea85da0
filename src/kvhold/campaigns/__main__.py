"""``python -m kvhold.campaigns``: run a fault campaign and say what it found."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from kvhold.campaigns import Profile, campaign
from kvhold.campaigns._report import as_data, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvhold.campaigns import Report


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvhold.campaigns", description=__doc__)
    parser.add_argument("--duration", type=float, help="seconds of schedules; 60 by default")
    parser.add_argument("--schedules", type=int, help="stop after so many schedules")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--ci", action="store_true", help="a fixed, short number of schedules")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _profile(given: argparse.Namespace) -> Profile:
    profile = Profile.ci() if given.ci else Profile()
    if given.schedules is not None:
        profile = replace(profile, duration=given.duration, schedules=given.schedules)
    elif given.duration is not None:
        profile = replace(profile, duration=given.duration, schedules=None)
    return profile


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; 0 if all is right, 1 if not."""
    given = _arguments().parse_args(arguments)
    profile = _profile(given)
    console = Console(stderr=given.json)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("schedules", total=1.0)
            report = _run(
                given.seed,
                profile,
                lambda what, part: bar.update(task, description=what, completed=part),
            )
    else:
        report = _run(given.seed, profile, None)
    if given.json:
        json.dump(as_data(report), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(report, console)
    return 0 if report.right else 1


def _run(seed: int, profile: Profile, progress: Callable[[str, float], None] | None) -> Report:
    return campaign(seed, profile, progress=progress)


if __name__ == "__main__":
    sys.exit(main())
