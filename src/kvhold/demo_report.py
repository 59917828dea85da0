"""What the demonstration found: as data, and as a table."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from kvhold.serving import Answer


@dataclass(frozen=True, slots=True)
class Phase:
    """One round of all requests.

    Attributes:
        name: what was special about it.
        requests: how many were answered.
        restored: answered with all pages of the prompt from the tiers.
        in_part: answered with some of them.
        computed: answered without.
        pages: pages from the tiers.
        tokens: prompt tokens computed.
        first_ms: median milliseconds until the first token.
        seconds: how long the round took.
        wrong: answers with other tokens than the never-offloaded run gave.
        bits: answers whose logits differ from that run's in any bit.
    """

    name: str
    requests: int
    restored: int
    in_part: int
    computed: int
    pages: int
    tokens: int
    first_ms: float
    seconds: float
    wrong: int
    bits: int


def phase_of(
    name: str, answers: Sequence[Answer], expected: Mapping[str, Answer], seconds: float
) -> Phase:
    """Compare the answers of a round with the never-offloaded run's."""
    hows = [answer.how for answer in answers]
    return Phase(
        name=name,
        requests=len(answers),
        restored=hows.count("restored"),
        in_part=hows.count("in part"),
        computed=hows.count("computed"),
        pages=sum(answer.restored for answer in answers),
        tokens=sum(answer.computed for answer in answers),
        first_ms=1e3 * statistics.median(answer.first for answer in answers),
        seconds=seconds,
        wrong=sum(answer.tokens != expected[answer.name].tokens for answer in answers),
        bits=sum(answer.bits != expected[answer.name].bits for answer in answers),
    )


@dataclass(slots=True)
class Report:
    """What `kvhold demo` found.

    Attributes:
        model: name, layers, heads.
        settings: of the run.
        engine: ``"kvhold"``, or the control ``"naive"``.
        phases: rounds in order; the first is the never-offloaded one.
        faults: injected faults of the last round, by name.
        kept: what was found of an earlier run, in words and numbers.
        notes: what else should be known.
        sample: a question, and the beginning of its answer.
        leftover: pages that cancelled fetches still held when they were given back.
        page_bytes: of one page in the cache: keys, values with their scales, and both in 16 bits.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    engine: str
    phases: list[Phase] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sample: tuple[str, str] = ("", "")
    leftover: int = 0
    page_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def wrong(self) -> int:
        """Wrong answers of all rounds."""
        return sum(phase.wrong for phase in self.phases)

    @property
    def right(self) -> bool:
        """Whether every answer is right to the last bit."""
        return bool(self.phases) and not any(phase.wrong or phase.bits for phase in self.phases)

    def as_json(self) -> dict[str, Any]:
        """For `--json`; part of the command's contract."""
        return asdict(self) | {"wrong": self.wrong, "right": self.right}


LEGEND: Final = """\
answers: with all of the prompt's pages from the tiers + some + none;
pages: from the tiers; tokens: of prompts, computed; first: median milliseconds
to the first token; all: seconds; wrong: other tokens than never offloaded;
bits: other logits than never offloaded"""


def render(report: Report) -> RenderableType:
    """One table for people, with what it needs to be understood."""
    title = f"kvhold demo: {report.model['name']}, engine: {report.engine}"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("round", no_wrap=True)
    for heading in (
        "answers",
        "pages",
        "tokens",
        "first",
        "all",
        "wrong",
        "bits",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for phase in report.phases:
        bad = phase.wrong or phase.bits
        style = "red" if bad else "green"
        table.add_row(
            phase.name,
            f"{phase.restored}+{phase.in_part}+{phase.computed}",
            f"{phase.pages}",
            f"{phase.tokens}",
            f"{phase.first_ms:.0f}",
            f"{phase.seconds:.1f}",
            f"[{style}]{phase.wrong}[/]",
            f"[{style}]{phase.bits}[/]",
        )
    lines: list[RenderableType] = [table, LEGEND]
    if report.faults:
        found = ", ".join(f"{count} {name}" for name, count in report.faults.items())
        lines.append(f"faults injected: {found}")
    if report.leftover:
        lines.append(
            f"{report.leftover} pages were still being written when a cancelled fetch gave them "
            + ("back: held until quiet" if report.engine == "kvhold" else "back, and were reused")
        )
    lines += report.notes
    lines.append(_verdict(report))
    return Group(*lines)


def _verdict(report: Report) -> str:
    total = sum(phase.requests for phase in report.phases)
    if report.right:
        return f"[green]✓ {total} answers, 0 wrong: equal to the never-offloaded run bit for bit[/]"
    bits = sum(phase.bits for phase in report.phases)
    return f"[red]✗ {total} answers, {report.wrong} wrong, {bits} with other bits[/]"
