"""`kvhold bench compare A.json B.json`: which figures moved between two runs, and which are noise.

A figure is any number in the files; its name is the way to it. Where a pair says how the same thing
compared with itself (A B A rounds), that is its noise; for others it is unknown and a bound is asked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from kvhold._errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    Verdict = Literal["same", "moved", "noise"]

SKIPPED: Final = ("conditions", "settings", "rounds", "model", "seed")
NAMED_BY: Final = ("name", "what", "length")
"""Fields that name an entry of a list."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both files.

    Attributes:
        name: the way to it.
        before: in the first file.
        after: in the second.
        ratio: after / before; None where before is 0.
        noise: lowest and highest ratio that the same thing gave against itself, if known.
        verdict: ``"noise"`` within that, ``"same"`` within the bound, else ``"moved"``.
    """

    name: str
    before: float
    after: float
    ratio: float | None
    noise: tuple[float, float] | None
    verdict: Verdict


def read(path: Path) -> Any:
    """The figures in a file.

    Raises:
        UserError: it is no JSON, or nests deeper than any figures do.
        OSError: it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} is no file of figures: it nests too deep") from error


def leaves(found: Any, way: str = "") -> Iterator[tuple[str, float, tuple[float, float] | None]]:
    """Every number of a report with its name and its noise.

    Args:
        found: decoded JSON.
        way: name of what it is in.
    """
    if isinstance(found, dict):
        noise = _noise(found.get("spread"))
        for key, value in found.items():
            if key in SKIPPED or key == "spread":
                continue
            for name, number, own in leaves(value, f"{way} / {key}" if way else key):
                yield name, number, own or noise
    elif isinstance(found, list):
        seen: Counter[str] = Counter()
        for number, value in enumerate(found):
            title = _title(value, number)
            seen[title] += 1
            again = f" #{seen[title]}" if seen[title] > 1 else ""
            yield from leaves(value, f"{way} / {title}{again}")
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        yield way, float(found), None


def _noise(spread: Any) -> tuple[float, float] | None:
    """What an interleaved pair gave against itself, which lies around 1; other spreads are none."""
    if not isinstance(spread, list) or not all(isinstance(end, (int, float)) for end in spread):
        return None
    if len(spread) == 2 and spread[0] <= 1 <= spread[1]:
        return float(spread[0]), float(spread[1])
    return None


def _title(value: Any, number: int) -> str:
    if isinstance(value, dict):
        for field in NAMED_BY:
            if field in value:
                return str(value[field])
    return str(number)


def compare(before: Any, after: Any, *, bound: float) -> list[Change]:
    """All figures that are in both reports, those that moved first.

    Args:
        before: decoded JSON of a run.
        after: of another.
        bound: share by which a figure without known noise may differ and count as the same.
    """
    known = {name: number for name, number, _ in leaves(before)}
    changes = []
    for name, number, noise in leaves(after):
        if name in known:
            changes.append(_change(name, known[name], number, noise, bound))
    return sorted(changes, key=lambda change: (change.verdict != "moved", change.name))


def _change(
    name: str, before: float, after: float, noise: tuple[float, float] | None, bound: float
) -> Change:
    ratio = after / before if before else None
    verdict: Verdict
    if before == after or (ratio is not None and abs(ratio - 1) <= bound):
        verdict = "same"
    elif noise is not None and ratio is not None and noise[0] <= ratio <= noise[1]:
        verdict = "noise"
    else:
        verdict = "moved"
    return Change(name, before, after, ratio, noise, verdict)


def differing(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """What of the conditions differs: figures of two machines say little about two versions."""
    ours, theirs = _conditions(before), _conditions(after)
    return {
        key: (ours.get(key), theirs.get(key))
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    }


def _conditions(report: Any) -> dict[str, Any]:
    found = report.get("conditions") if isinstance(report, dict) else None
    return found if isinstance(found, dict) else {}


def as_data(changes: Sequence[Change], conditions: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """For `--json`; part of the command's contract."""
    return {
        "conditions": {key: list(pair) for key, pair in conditions.items()},
        "figures": [asdict(change) for change in changes],
    }


def render(
    changes: Sequence[Change], conditions: dict[str, tuple[Any, Any]], *, everything: bool
) -> RenderableType:
    """For people: what moved, or everything."""
    table = Table(title="figures that moved" if not everything else "all figures")
    for heading in ("figure", "before", "after", "ratio", "same against same", ""):
        table.add_column(heading, justify="left" if heading in ("figure", "") else "right")
    for change in changes:
        if everything or change.verdict == "moved":
            noise = (
                "" if change.noise is None else f"{change.noise[0]:.2f} to {change.noise[1]:.2f}"
            )
            table.add_row(
                escape(change.name),
                f"{change.before:,.4g}",
                f"{change.after:,.4g}",
                "" if change.ratio is None else f"{change.ratio:.3f}",
                noise,
                change.verdict,
            )
    counts = {v: sum(c.verdict == v for c in changes) for v in ("moved", "noise", "same")}
    lines: list[RenderableType] = [
        escape(f"taken under other conditions: {key}: {was} / {now}")
        for key, (was, now) in conditions.items()
    ]
    lines += [table, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
    return Group(*lines)
