"""Crash campaign: children of one folder are killed at random points and started again.

Each child opens a store over the folder that the killed ones left, checks every page that is there,
and works until SIGKILL strikes: while it opens, recovers, writes, publishes or removes. In some rounds
two children share the folder. At the end one more child looks at everything. Run it as
``python -m kvhold.campaigns.crash``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from tiers import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

LONGEST: Final = 0.06
"""Seconds that a child works at most before it is killed."""
BORN: Final = 0.03
"""Seconds after its birth within which a child is killed that may not even have opened."""


@dataclass
class CrashReport:
    """What a crash campaign found.

    Attributes:
        kills: children that were killed.
        pairs: rounds in which two children shared the folder.
        early: children that were killed before they had checked the folder.
        checked: pages that children found, read and compared.
        wrong: wrong bytes, and split hits after a restart.
        unreadable: published pages that could not be read.
        leftovers: temporaries that kills left behind, as later children found them.
        orphans: value files without keys that were reclaimed.
        most: most unfinished files that were there after a kill.
        left: unfinished files at the end.
        files: files at the end.
        adopted: of these, pages that the last child took over.
        verified: of these, pages of which every byte was checked.
        damaged: of these, pages that were not right.
        aside: files that any child set aside.
        odd: children that ended by themselves.
        seconds: how long it took.
    """

    kills: int = 0
    pairs: int = 0
    early: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    leftovers: int = 0
    orphans: int = 0
    most: int = 0
    left: int = -1
    files: int = 0
    adopted: int = 0
    verified: int = 0
    damaged: int = 0
    aside: int = 0
    odd: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether no byte was wrong, every page readable and nothing left behind."""
        faults = (self.wrong, self.unreadable, self.odd, self.left, self.damaged, self.aside)
        return not any(faults) and self.files == self.adopted == self.verified


class Server:
    """The process that forks children, and what they say."""

    def __init__(self) -> None:
        source = Path(__file__).parent.parent.parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvhold.campaigns.crash_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        self.said: Counter[str] = Counter()
        self.lines: list[tuple[str, list[str]]] = []

    def __enter__(self) -> Self:
        self.until("serving")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.close()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.wait()

    def tell(self, line: str) -> None:
        """Give the server a line."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def until(self, word: str) -> list[str]:
        """Read lines until one begins with `word`; its other words. All others are kept."""
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        for line in self._process.stdout:
            first, *rest = line.split()
            if first == word:
                return rest
            self.lines.append((first, rest))
        assert self._process.stderr is not None  # noqa: S101 - it is a pipe
        raise RuntimeError(f"the server ended: {self._process.stderr.read()[-2000:]}")

    def begin(self, root: Path, seed: int, placement: Placement, **how: bool) -> int:
        """Fork a child; its process id."""
        order = {"root": str(root), "seed": seed, "placement": placement.value, **how}
        self.tell(json.dumps(order))
        return int(self.until("begun")[0])

    def kill(self, pid: int) -> int:
        """Kill a child and wait until it is gone; how it ended."""
        os.kill(pid, signal.SIGKILL)
        self.tell(f"reap {pid}")
        return int(self.until("reaped")[0])


def campaign(
    seed: int,
    *,
    kills: int = 500,
    progress: Callable[[str, float], None] | None = None,
) -> CrashReport:
    """Kill children until `kills` of them are dead, then look.

    Args:
        seed: decides what children do, and when they are killed.
        kills: how many.
        progress: called with what is being done, and how far that is.
    """
    report, dice = CrashReport(), random.Random(seed)
    tell = progress or (lambda _what, _part: None)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvhold-crash-") as name, Server() as server:
        root = Path(name) / "tier"
        while report.kills < kills:
            tell("kills", report.kills / kills)
            _round(server, root, dice, report)
        pid = server.begin(root, 0, Placement.WHOLE_DISK, alone=True, final=True)
        server.until("done")
        server.tell(f"reap {pid}")
        server.until("reaped")
        _gather(server, report)
    report.seconds = time.monotonic() - begun
    return report


def _round(server: Server, root: Path, dice: random.Random, report: CrashReport) -> None:
    """One or two children live and die."""
    paired = dice.random() < 0.2
    report.pairs += paired
    children = []
    for _ in range(1 + paired):
        placement = dice.choice([Placement.WHOLE_DISK, Placement.SPLIT])
        seed = dice.randrange(1 << 30)
        pid = server.begin(root, seed, placement, alone=not paired, final=False)
        if dice.random() < 0.7:
            server.until("working")
            time.sleep(dice.random() * LONGEST)
        else:
            report.early += 1
            time.sleep(dice.random() * BORN)
        children.append(pid)
    dice.shuffle(children)
    for pid in children:
        code = server.kill(pid)
        if code != -signal.SIGKILL:
            report.odd.append(f"child {pid} ended with {code}")
        report.kills += 1
    report.most = max(report.most, sum(1 for _ in root.glob("data/*/*.tmp")))
    _gather(server, report)


def _gather(server: Server, report: CrashReport) -> None:
    """Take in what children said."""
    for word, rest in server.lines:
        if word in {"wrong", "unreadable"}:
            getattr(report, word).append(" ".join(rest))
        elif word == "checked":
            report.checked += int(rest[0])
        elif word == "reclaimed":
            report.leftovers += int(rest[0])
            report.orphans += int(rest[1])
        elif word == "left":
            report.left = int(rest[0])
        elif word == "final":
            report.files, report.adopted, report.verified, report.damaged = map(int, rest)
        elif word == "aside":
            report.aside = int(rest[0])
    server.lines.clear()


def show(report: CrashReport, console: Console) -> None:
    """Print the report as a table."""
    table = Table(title="crash campaign: SIGKILL at random points over one folder")
    table.add_column("what")
    table.add_column("count", justify="right")
    rows: dict[str, object] = {
        "kills": report.kills,
        "rounds in which two writers shared the folder": report.pairs,
        "killed while opening or recovering": report.early,
        "pages found after a crash, read and compared": report.checked,
        "wrong bytes, or split hits after a restart": len(report.wrong),
        "published pages that could not be read": len(report.unreadable),
        "unfinished files that kills left": report.leftovers,
        "most of them at a time": report.most,
        "value files without keys, reclaimed": report.orphans,
        "unfinished files at the end": report.left,
        "files at the end, taken over, checked, damaged": (
            f"{report.files}, {report.adopted}, {report.verified}, {report.damaged}"
        ),
        "files set aside": report.aside,
        "children that ended by themselves": len(report.odd),
        "seconds": f"{report.seconds:.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    for what in (*report.wrong, *report.unreadable, *report.odd):
        console.print(what)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; 0 if all is right, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m kvhold.campaigns.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    report = campaign(given.seed, kills=given.kills)
    show(report, Console())
    return 0 if report.right else 1


if __name__ == "__main__":
    sys.exit(main())
