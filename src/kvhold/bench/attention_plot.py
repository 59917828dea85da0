"""``python -m kvhold.bench.attention_plot attention-h200.json FILE``: the picture of a record."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES: Final = (
    ("FlashInfer BF16", "#9aa3ab"),
    ("FlashInfer FP8", "#e0a030"),
    ("K16/V8 auto", "#2f6db5"),
)


def best(rows: list[dict[str, Any]], shape: str, series: str) -> float:
    """Least time of a series at a shape, microseconds; 0 where it was not measured."""
    found = [r["us"] for r in rows if r["shape"] == shape and r["what"].startswith(series)]
    return min(found, default=0.0)


def _decode(axes: Axes, rows: list[dict[str, Any]], batch: str) -> None:
    """Bars by group, the faster of FlashInfer's two kernels for each type."""
    shapes = [s for s in dict.fromkeys(r["shape"] for r in rows) if s.startswith(f"{batch},")]
    for number, (series, colour) in enumerate(SERIES):
        heights = [best(rows, shape, series) for shape in shapes]
        places = [at + (number - 1) * 0.27 for at in range(len(shapes))]
        bars = axes.bar(places, heights, 0.25, color=colour, label=series)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(shapes)), [shape.split(", ")[1] for shape in shapes])
    axes.set_title(f"decode, {batch} tokens")
    axes.set_ylabel("microseconds")
    axes.margins(y=0.2)
    axes.legend(fontsize=7, ncols=len(SERIES), loc="upper center")


def _prefill(axes: Axes, rows: list[dict[str, Any]]) -> None:
    names = [f"{row['shape']}\n{row['what']}" for row in rows]
    ours = [row["what"].startswith("K16/V8") for row in rows]
    colours = [SERIES[2][1] if own else SERIES[0][1] for own in ours]
    bars = axes.barh(range(len(rows)), [row["us"] / 1e3 for row in rows], color=colours)
    axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title("prefill of new tokens over a prefix")


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the picture.

    Args:
        record: of ``python -m kvhold.bench.attention_record``.
        path: where to; the suffix chooses the format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2).flatten().tolist()
    batches = dict.fromkeys(row["shape"].split(",")[0] for row in record["time"])
    for place, batch in zip(axes, batches, strict=False):
        _decode(place, record["time"], batch)
    _prefill(axes[3], record["prefill"])
    last = record["conditions"][-1]
    figure.suptitle(f"{last.get('device', 'GPU')}, {last.get('date', '')}", fontsize=10)
    figure.savefig(path, dpi=110)


def main(
    record: Annotated[Path, typer.Argument(help="The attention-h200.json of the docs.")],
    picture: Annotated[Path, typer.Argument(help="The picture to write.")],
) -> None:
    """Draw what was measured."""
    draw(msgspec.json.decode(record.read_bytes()), picture)


if __name__ == "__main__":
    typer.run(main)
