"""Time to the first token by prefix length: bring the prefix's pages back, or compute them again.

Recompute is what the model does fastest: one forward over prefix and suffix with transformers' own
attention (SDPA) and no cache format. Restore is everything that a server does for a prefix that the
tiers have: hash the tokens, look up, fetch into pages, and run the suffix over them. Rounds alternate
the two, so a machine that drifts drifts under both.

``python -m kvhold.bench.ttft`` runs the packaged model on the CPU; with ``--gpu`` a random-weight model of
Llama-3.1-8B's geometry on a GPU.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

SUFFIX: Final = 32
"""Tokens behind the prefix, computed either way."""


@dataclass(frozen=True, slots=True)
class Restored:
    """One restore.

    Attributes:
        fetch: seconds from the call to the last page in place, hashing and lookup included.
        suffix: seconds from there to the first token.
    """

    fetch: float
    suffix: float

    @property
    def seconds(self) -> float:
        """Time to the first token."""
        return self.fetch + self.suffix


class Prompts:
    """Prompts of every length that share their beginnings: one stored prefix serves them all.

    Args:
        vocabulary: tokens that there are.
        most: tokens of the longest prefix.
    """

    def __init__(self, vocabulary: int, most: int) -> None:
        draw = random.Random(0)
        self.prefix = [draw.randrange(vocabulary) for _ in range(most)]
        self._suffix = [draw.randrange(vocabulary) for _ in range(SUFFIX)]

    def prompt(self, length: int) -> list[int]:
        """The first `length` tokens of the prefix, and then others than those that follow there."""
        return self.prefix[:length] + self._suffix


class Rig(Protocol):
    """A machine with a model, and prefixes in its tiers.

    Attributes:
        name: of the model.
        bytes_per_token: of a token's pages, as they are moved.
    """

    name: str
    bytes_per_token: float

    async def recompute(self, length: int) -> float:
        """Seconds to the first token behind a prefix that has to be computed."""
        ...

    async def restore(self, length: int) -> Restored:
        """The same, with the prefix in the tiers."""
        ...


@dataclass(frozen=True, slots=True)
class Point:
    """One prefix length on one placement.

    Attributes:
        length: tokens of the prefix.
        recompute: median seconds to the first token.
        restore: median seconds to the first token.
        fetch: median seconds of that until the pages were in place.
        ratio: median over rounds of recompute / restore.
        spread: smallest and largest of these ratios.
    """

    length: int
    recompute: float
    restore: float
    fetch: float
    ratio: float
    spread: tuple[float, float]


async def measure(
    rig: Rig, lengths: Sequence[int], *, rounds: int, progress: Callable[[], None]
) -> list[Point]:
    """Alternate recompute and restore at every length.

    Args:
        rig: with the prefixes in its tiers.
        lengths: tokens of the prefixes.
        rounds: how many are counted, after one that is not.
        progress: called when a length is done.
    """
    points = []
    for length in lengths:
        pairs = []
        for number in range(rounds + 1):
            pair = await rig.recompute(length), await rig.restore(length)
            if number:
                pairs.append(pair)
        ratios = [before / after.seconds for before, after in pairs]
        points.append(
            Point(
                length,
                statistics.median(before for before, _ in pairs),
                statistics.median(after.seconds for _, after in pairs),
                statistics.median(after.fetch for _, after in pairs),
                statistics.median(ratios),
                (min(ratios), max(ratios)),
            )
        )
        progress()
    return points


def break_even(points: Sequence[Point]) -> float | None:
    """The length from which on restoring is faster, between two measured ones by log-log interpolation.

    Returns:
        The shortest measured length if it is faster there already; None if it never is.
    """
    ranked = sorted(points, key=lambda point: point.length)
    slower = [number for number, point in enumerate(ranked) if point.ratio < 1]
    if not slower:
        return float(ranked[0].length) if ranked else None
    last = slower[-1]
    if last + 1 == len(ranked):
        return None
    below, above = ranked[last], ranked[last + 1]
    low, high = math.log(below.ratio), math.log(above.ratio)
    part = -low / (high - low)
    return math.exp(
        math.log(below.length) + part * (math.log(above.length) - math.log(below.length))
    )


def as_data(points: Sequence[Point]) -> dict[str, Any]:
    """One placement as data."""
    return {"points": [asdict(point) for point in points], "break_even": break_even(points)}


def render(report: dict[str, Any]) -> RenderableType:
    """All placements for people."""
    parts: list[RenderableType] = []
    for name, found in report["placements"].items():
        table = Table(title=f"{report['model']['name']}: {name}")
        for heading in (
            "prefix",
            "recompute",
            "restore",
            "of it fetch",
            "GB/s",
            "faster",
            "spread",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for point in found["points"]:
            rate = point["length"] * report["bytes_per_token"] / point["fetch"] / 1e9
            low, high = point["spread"]
            table.add_row(
                f"{point['length']}",
                f"{1e3 * point['recompute']:.0f} ms",
                f"{1e3 * point['restore']:.0f} ms",
                f"{1e3 * point['fetch']:.1f} ms",
                f"{rate:.2f}",
                f"{point['ratio']:.1f}x",
                f"{low:.1f} to {high:.1f}",
            )
        even = found["break_even"]
        shortest = found["points"][0]["length"]
        said = (
            "restoring is never faster here"
            if even is None
            else f"restoring is faster from {'at most ' if even <= shortest else ''}{even:.0f} tokens on"
        )
        parts += [table, said]
    return Group(*parts)


if __name__ == "__main__":
    from kvhold.bench.ttft_command import main

    main()
