"""``python -m kvhold.campaigns``: run a fault campaign and say what it found."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from kvhold._errors import UserError
from kvhold._output import show as show_as
from kvhold.campaigns import Profile, campaign
from kvhold.campaigns._report import as_data, show
from kvhold.interrupts import Stop
from transfer.testing import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


def faults_named(given: str) -> frozenset[Fault] | None:
    """Faults by their names, separated by commas; None if none is named.

    Raises:
        UserError: there is no such fault; names all.
    """
    known = {fault.name.lower().replace("_", "-"): fault for fault in Fault}
    names = [name.strip().lower() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"no fault {name!r}: there are {', '.join(known)}")
    return frozenset(known[name] for name in names) or None


def command(*, duration: float, seed: int, only: str, as_json: bool) -> bool:
    """`kvhold faults`: whether all is right.

    Raises:
        UserError: a fault that there is not.
        Interrupted: a signal came.
    """
    profile = Profile(duration=duration, only=faults_named(only))
    with Stop() as stop:
        return _campaign(seed, profile, as_json=as_json, check=stop.check)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; 0 if all is right, 1 if not."""
    given = _arguments().parse_args(arguments)
    is_right = _campaign(given.seed, _profile(given), as_json=given.json, check=lambda: None)
    return 0 if is_right else 1


def _campaign(seed: int, profile: Profile, *, as_json: bool, check: Callable[[], None]) -> bool:
    console, aside = Console(stderr=as_json), Console(stderr=True)
    with Progress(console=aside, transient=True, disable=not aside.is_terminal) as bar:
        task = bar.add_task("schedules", total=1.0)

        def tell(what: str, part: float) -> None:
            check()
            bar.update(task, description=what, completed=part)

        report = campaign(seed, profile, progress=tell)
    if as_json:
        show_as(as_data(report), "", as_json=True)
    else:
        show(report, console)
    return report.right


if __name__ == "__main__":
    sys.exit(main())
