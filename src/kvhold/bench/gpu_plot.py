"""``python -m kvhold.bench.gpu_plot gpu.json gpu.png``: the picture of what `gpu` measured."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f6db5", "#2a9d5c", "#e0a030", "#c8372d", "#9aa3ab")


def rows_of(report: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The rows of one part; none where it failed or was not run."""
    rows: list[dict[str, Any]] = report.get(part, {}).get("figures", {}).get("rows", [])
    return rows


def _pages(axes: Axes, report: dict[str, Any], direction: str) -> None:
    """Bars by way at 32 layers, the link above them as a line."""
    rows = [
        row
        for row in rows_of(report, "pages")
        if row["layers"] == 32 and row["direction"] == direction
    ]
    names = ("ours", "STAGED", "MAPPED", "BATCH", "DMA")
    width = 0.8 / len(names)
    for number, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        heights = [row["ours"] if name == "ours" else row["ways"].get(name, 0.0) for row in rows]
        places = [at + (number - 2) * width for at in range(len(rows))]
        axes.bar(places, heights, width, color=colour, label="chosen" if name == "ours" else name)
    for at, row in enumerate(rows):
        label = "contiguous" if at == 0 else "_more of it"
        axes.hlines(row["link"], at - 0.45, at + 0.45, color="black", lw=1.5, label=label)
    axes.set_xticks(range(len(rows)), [f"{row['MiB']} MiB" for row in rows])
    axes.set_title(f"32 layers, {'GPU to host' if direction == 'out' else 'host to GPU'}")
    axes.set_ylabel("GB/s")
    axes.legend(fontsize=7, loc="lower right")


def _fragments(axes: Axes, report: dict[str, Any]) -> None:
    rows = rows_of(report, "fragments")
    for number, (slots, direction) in enumerate(
        (slots, direction) for slots in ("row", "apart") for direction in ("out", "in")
    ):
        some = [
            row
            for row in rows
            if row["slots"] == slots and row["direction"] == direction and row["MiB"] == 64
        ]
        sizes = [row["KiB"] for row in some]
        rates = [row["chosen"] for row in some]
        label = f"{direction}, slots {'in a row' if slots == 'row' else 'apart'}"
        axes.plot(sizes, rates, "o-", color=COLOURS[number], label=label, ms=3)
    if rows:
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KiB of a piece, 64 MiB in all")
    axes.set_title("small pages")
    axes.legend(fontsize=7)


def _cast(axes: Axes, report: dict[str, Any]) -> None:
    rows = [row for row in rows_of(report, "cast") if row["scope"] == "page_head"]
    for number, direction in enumerate(("out", "in")):
        some = [row for row in rows if row["direction"] == direction]
        sizes = [row["MiB"] for row in some]
        axes.plot(sizes, [row["over_link"] for row in some], "o-", color=COLOURS[number], ms=3)
        axes.annotate(direction, (sizes[-1], some[-1]["over_link"]), fontsize=7) if some else None
    axes.axhline(4 / 3, color=COLOURS[4], lw=1, ls=":")
    if rows:
        axes.set_xscale("log", base=2)
    axes.set_xlabel("MiB of BF16 cache")
    axes.set_title("K16/V8 over the link's rate")


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture.

    Args:
        report: of ``python -m kvhold.bench.gpu``.
        path: where to; the suffix chooses the format.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _pages(axes[0][0], report, "out")
    _pages(axes[0][1], report, "in")
    _fragments(axes[1][0], report)
    _cast(axes[1][1], report)
    versions = report.get("versions", {})
    figure.suptitle(f"{versions.get('gpu', 'GPU')}, {report.get('date', '')}", fontsize=10)
    figure.savefig(path, dpi=110)


def main(
    figures: Annotated[Path, typer.Argument(help="The gpu.json of a run.")],
    picture: Annotated[Path, typer.Argument(help="The picture to write.")],
) -> None:
    """Draw what was measured."""
    draw(msgspec.json.decode(figures.read_bytes()), picture)


if __name__ == "__main__":
    typer.run(main)
