"""Two ways side by side: interleaved rounds, ratios pair by pair, and the noise between equals.

Machines drift. A ratio of two times taken one after the other, repeated, drifts far less than the
times; and a round that measures the first way twice (A B A) shows what the same thing against
itself would have given, which is the error bar of the ratio.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvhold.interrupts import check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Pair:
    """What interleaved rounds of two ways gave.

    Attributes:
        name: what was measured.
        ours: median of our figure.
        theirs: median of the other way's.
        unit: of both; more is better.
        ratio: median over rounds of ours / theirs.
        spread: 10th and 90th percentile of ours against ours.
        target: what the ratio is meant to reach, if anything.
        rounds: how many.
    """

    name: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    spread: tuple[float, float]
    target: float | None
    rounds: int

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.target is None or self.ratio >= self.target


def percentile(values: Sequence[float], q: float) -> float:
    """The `q`-th percentile, 0 to 100, by the nearest rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, round(q / 100 * (len(ranked) - 1))))]


def compare(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    amount: float,
    unit: str,
    target: float | None = None,
    rounds: int = 15,
) -> Pair:
    """Run A B A rounds of two callables that return seconds.

    Args:
        name: what is measured.
        ours: our way, in seconds.
        theirs: the other way, in seconds.
        amount: what one call does, in the numerator of `unit`.
        unit: e.g. ``"GB/s"``.
        target: what ours / theirs is meant to reach.
        rounds: how many rounds are counted, after one that is not.
    """
    first, second, other = [], [], []
    for number in range(rounds + 1):
        check()
        gc.collect()
        times = ours(), theirs(), ours()
        if number:
            first.append(times[0])
            other.append(times[1])
            second.append(times[2])
    ratios = [b / ((a + c) / 2) for a, b, c in zip(first, other, second, strict=True)]
    same = [c / a for a, c in zip(first, second, strict=True)]
    return Pair(
        name,
        amount / statistics.median(first + second),
        amount / statistics.median(other),
        unit,
        statistics.median(ratios),
        (percentile(same, 10), percentile(same, 90)),
        target,
        rounds,
    )


def table_of(title: str, pairs: Sequence[Pair]) -> Table:
    """Pairs as a table for people."""
    table = Table(title=title)
    for heading in ("what", "kvhold", "other", "unit", "ratio", "target", "same against same"):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for pair in pairs:
        table.add_row(
            pair.name,
            f"{pair.ours:,.2f}",
            f"{pair.theirs:,.2f}",
            pair.unit,
            f"{pair.ratio:.3f}",
            "" if pair.target is None else f"≥ {pair.target} {'✓' if pair.met else '✗'}",
            f"{pair.spread[0]:.2f} to {pair.spread[1]:.2f}",
        )
    return table


def conditions() -> dict[str, Any]:
    """What the figures were taken on: software, processor, date."""
    import torch  # noqa: PLC0415 - only its version is wanted, at the end of a run

    with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - a kernel file
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "kernel": platform.release(),
        "processor": models[0] if models else platform.processor(),
        "cores": len(models),
    }


def plain(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Pairs as data."""
    return [asdict(pair) | {"met": pair.met} for pair in pairs]
