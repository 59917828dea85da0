"""Pictures of what the commands measured, as PNG files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from kvhold._output import write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, AMBER, GREY, RED, BLUE = "#2a9d5c", "#e0a030", "#9aa3ab", "#c8372d", "#2f6db5"


def _figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure without any global state of the plotting library."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    figure = Figure(figsize=(5.2 * columns, 3.9), layout="constrained")
    return figure, [figure.add_subplot(1, columns, n + 1) for n in range(columns)]


def _save(figure: Figure, path: Path) -> None:
    """Write a picture whole, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    write(path, drawn.getvalue())


def available() -> bool:
    """Whether pictures can be drawn here."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an optional dependency
    except ImportError:
        return False
    return True


def demo_picture(report: Mapping[str, Any], path: Path) -> None:
    """Time to the first token, and where the answers of each round came from.

    Args:
        report: of `kvhold demo --json`.
        path: the PNG file.

    Raises:
        OSError: it cannot be written.
    """
    figure, (left, right) = _figure(2)
    phases = report["phases"]
    names = [phase["name"] for phase in phases]
    rows = range(len(phases))
    times = [phase["first_ms"] for phase in phases]
    left.barh(rows, times, color=[GREY if n == 0 else BLUE for n in rows])
    for row, value in zip(rows, times, strict=True):
        left.text(value, row, f" {value:.0f} ms", va="center", fontsize=8)
    left.set_yticks(rows, names, fontsize=8)
    left.set_xlabel("median time to the first token (ms)")
    left.margins(x=0.2)
    ends = [0] * len(phases)
    for key, colour in (("restored", GREEN), ("in_part", AMBER), ("computed", GREY)):
        counts = [phase[key] for phase in phases]
        right.barh(rows, counts, left=ends, color=colour, label=key.replace("_", " "))
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
    for row, phase in zip(rows, phases, strict=True):
        wrong = phase["wrong"]
        right.text(
            ends[row],
            row,
            f" {wrong} wrong",
            va="center",
            fontsize=8,
            color=RED if wrong else GREEN,
        )
    right.set_yticks(rows, [])
    right.set_xlabel("answers, by where their prompt's pages came from")
    right.margins(x=0.2)
    right.legend(fontsize=8, loc="lower right")
    for axes in (left, right):
        axes.invert_yaxis()
    figure.suptitle(f"{report['model']['name']}, engine: {report['engine']}", fontsize=10)
    _save(figure, path)


def quality_picture(report: Mapping[str, Any], path: Path) -> None:
    """KL and disagreement of each format with their intervals, and attention errors by layer.

    Args:
        report: of `kvhold quality --json`.
        path: the PNG file.

    Raises:
        OSError: it cannot be written.
    """
    figure, (left, middle, right) = _figure(3)
    formats = report["formats"]
    colours = dict(zip(formats, (GREEN, RED, AMBER), strict=False))
    for row, (name, figures) in enumerate(formats.items()):
        for axes, key in ((left, "kl"), (middle, "agreement")):
            mean, low, high = _drawn(figures[key], flipped=key == "agreement")
            error = [[mean - low], [high - mean]]
            axes.barh(row, mean, xerr=error, color=colours[name], capsize=3)
            axes.text(high, row, f" {mean:.2g}", va="center", fontsize=8)
        right.plot(figures["attention"], color=colours[name], label=name, marker=".", lw=1)
    for axes, title in ((left, "KL from 16 bits (nats)"), (middle, "other top token (share)")):
        axes.set_yticks(range(len(formats)), list(formats), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(title)
        axes.margins(x=0.2)
    right.set_xlabel("layer")
    right.set_ylabel("relative error of attention")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    figure.suptitle(
        f"{report['model']['name']}, {report['predictions']} predictions, 95 % intervals over "
        f"{report['documents']} documents",
        fontsize=10,
    )
    _save(figure, path)


def ttft_picture(report: Mapping[str, Any], path: Path) -> None:
    """Recompute and restore by prefix length, and how many times faster restoring is.

    Args:
        report: of `kvhold bench ttft --json`.
        path: the PNG file.

    Raises:
        OSError: it cannot be written.
    """
    figure, (left, right) = _figure(2)
    colours = (GREEN, BLUE, AMBER, RED)
    lengths: list[int] = []
    slowest: list[float] = []
    for colour, (name, found) in zip(colours, report["placements"].items(), strict=False):
        points = found["points"]
        lengths = [point["length"] for point in points]
        slowest = [point["recompute"] for point in points]
        restore = [point["restore"] for point in points]
        left.plot(lengths, restore, color=colour, marker="o", ms=3, label=f"restore: {name}")
        ratios = [point["ratio"] for point in points]
        right.plot(lengths, ratios, color=colour, marker="o", ms=3)
        low, high = zip(*(point["spread"] for point in points), strict=True)
        right.fill_between(lengths, low, high, color=colour, alpha=0.15, lw=0)
    left.plot(lengths, slowest, color=GREY, marker="s", ms=3, label="recompute")
    right.axhline(1, color=GREY, lw=1)
    for axes, title in ((left, "seconds to the first token"), (right, "times faster by restoring")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
        axes.set_xlabel("tokens of the prefix")
        axes.set_ylabel(title)
        axes.grid(visible=True, alpha=0.3)
    left.legend(fontsize=7)
    figure.suptitle(report["model"]["name"], fontsize=10)
    _save(figure, path)


def _drawn(figure: Mapping[str, float], *, flipped: bool) -> tuple[float, float, float]:
    """Mean and ends of an interval; of what is missing to 1 where a share is `flipped`."""
    mean, low, high = figure["mean"], figure["low"], figure["high"]
    return (1 - mean, 1 - high, 1 - low) if flipped else (mean, low, high)
