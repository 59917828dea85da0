"""``python -m kvhold.bench.attention_record RUN.json ...``: what of the runs is kept in the docs.

Joins runs of `attention`, later ones first in what they measured again, sums the sweep up, and
writes ``attention-h200.json`` and its picture, and the measured part of ``attention.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from kvhold.bench.attention_plot import draw

START: Final = "<!-- measured: written by kvhold.bench.attention_record -->"
END: Final = "<!-- end of what was measured -->"
PARTS: Final = ("copy", "time", "prefill", "fa3", "merge", "tune", "controls")
KERNELS: Final = (
    "FlashInfer BF16 cores",
    "FlashInfer BF16 tensor",
    "FlashInfer FP8 cores",
    "FlashInfer FP8 tensor",
)

app = typer.Typer()
Data = dict[str, list[dict[str, Any]]]


def join(runs: list[Data]) -> dict[str, Any]:
    """One record of several runs: verdicts by cell and parts as a whole, each from the last."""
    cells: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {"conditions": []}
    for run in runs:
        record["conditions"] += [c for c in run["conditions"] if c not in record["conditions"]]
        cells.update({line["cell"]: line for line in run.get("cells", [])})
        record.update({part: run[part] for part in PARTS if part in run})
    combinations: dict[str, bool] = {}
    for name, line in cells.items():
        case = name.split(" ", 1)[1]
        combinations[case] = combinations.get(case, False) or line["verdict"] == "right"
    record["combinations"] = len(combinations)
    record["computed by a backend"] = sum(combinations.values())
    record["sweep"] = summary(cells)
    record["wrong"] = [line for line in cells.values() if line["verdict"] == "wrong"]
    return record


def summary(cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts and largest errors by backend, head_dim, kind and the dtype of the keys."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for name, line in cells.items():
        backend, _, _, head_dim, _, key, _, _, kind, _ = name.split()
        where = {"backend": backend, "head_dim": head_dim[1:], "kind": kind, "key": key}
        start = {**where, "right": 0, "refused": 0, "wrong": 0, "out": 0.0, "lse": 0.0}
        row = rows.setdefault(tuple(where.values()), start)
        row[line["verdict"]] += 1
        if line["verdict"] == "right":
            row |= {what: max(row[what], float(f"{line[what]:.3g}")) for what in ("out", "lse")}
    return [rows[where] for where in sorted(rows)]


def text_of(record: dict[str, Any]) -> str:
    """The record as JSON with one line for each row."""
    parts = []
    for name, value in record.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page_of(record: dict[str, Any]) -> str:
    """The measured part of the page, as Markdown."""
    runs = [
        "- " + ", ".join(f"{name} {value}" for name, value in found.items())
        for found in record["conditions"]
    ]
    parts = (sweep_lines(record), decode_lines(record), prefill_lines(record), merge_lines(record))
    return "\n".join(
        ["Conditions:", "", *runs, *(line for part in parts if part for line in ("", *part))]
    )


def sweep_lines(record: dict[str, Any]) -> list[str]:
    """Counts, largest errors and controls."""
    total: dict[str, dict[str, float]] = {}
    for row in record["sweep"]:
        sums = total.setdefault(row["backend"], dict.fromkeys(("right", "refused", "wrong"), 0))
        sums |= {name: sums[name] + row[name] for name in ("right", "refused", "wrong")}
        sums |= {name: max(sums.get(name, 0.0), row[name]) for name in ("out", "lse")}
    whole, computed = record["combinations"], record["computed by a backend"]
    lines = [
        f"{whole} combinations, {computed} of them right on at least one backend.",
        "",
        "| backend | right | refused at plan | wrong | largest error | of the log-sum-exp |",
        "|---|---|---|---|---|---|",
    ]
    for backend, sums in total.items():
        counts = " | ".join(f"{sums[name]:.0f}" for name in ("right", "refused", "wrong"))
        lines.append(f"| `{backend}` | {counts} | {sums['out']:.2e} | {sums['lse']:.2e} |")
    damaged = [c for c in record["controls"] if c["damage"] != "none"]
    ran = [c for c in damaged if c["verdict"] != "refused"]
    seen = [c for c in ran if c["verdict"] == "wrong"]
    least = min((c["out"] for c in seen), default=0.0)
    text = f"{len(seen)} of {len(ran)} show, the smallest with an error of {least:.2e}."
    return [*lines, "", f"Controls (a page of V, a page of K or the scale damaged): {text}"]


def decode_lines(record: dict[str, Any]) -> list[str]:
    """The table of decode times."""
    rate = record["copy"][-1]["GB/s"]
    lines = [
        f"Decode, microseconds (8 KV heads of 128, pages of 16). Copy in the same run: {rate} GB/s.",
        "",
        "| shape | " + " | ".join(KERNELS) + " | K16/V8 `auto` | backend | of copy |",
        "|---" * (len(KERNELS) + 4) + "|",
    ]
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["time"]:
        shapes.setdefault(row["shape"], {})[row["what"]] = row
    for shape, rows in shapes.items():
        others = " | ".join(str(rows[name]["us"]) if name in rows else "" for name in KERNELS)
        auto, row = next((n, r) for n, r in rows.items() if n.startswith("K16/V8 auto"))
        backend = auto.rpartition(": ")[2]
        lines.append(f"| {shape} | {others} | {row['us']} | `{backend}` | {row['of_copy']:.2f} |")
    return lines


def prefill_lines(record: dict[str, Any]) -> list[str]:
    """The table of prefill times, with the ratio to FlashInfer's BF16 in the same run."""
    stock: dict[str, float] = {}
    for row in record["prefill"]:
        if row["what"].startswith("FlashInfer"):
            stock[row["shape"]] = min(row["us"], stock.get(row["shape"], row["us"]))
    lines = [
        "Prefill of new tokens over a restored prefix, one request, causal.",
        "",
        "| new tokens over prefix | kernel | microseconds | fastest FlashInfer BF16 / this |",
        "|---|---|---|---|",
    ]
    for row in record["prefill"]:
        other = stock.get(row["shape"])
        ratio = f"{other / row['us']:.2f}" if other else ""
        lines.append(f"| {row['shape']} | {row['what']} | {row['us']} | {ratio} |")
    return [*lines, "", fa3_line(record)]


def fa3_line(record: dict[str, Any]) -> str:
    """Whether FlashInfer's FA3 prefill is in the table, and why not."""
    found = record.get("fa3", [])[-1:]
    if not found:
        return "FA3 is missing: these runs did not ask for it."
    (line,) = found
    if line["state"] == "compared":
        return f"FA3 was built in {line['build_s']:.0f} s as `{line['module']}`."
    return f"FA3 is missing: {line['reason']}."


def merge_lines(record: dict[str, Any]) -> list[str]:
    """The table of ways to join splits; nothing if they were not measured."""
    if not record.get("merge"):
        return []
    lines = [
        "Decode with few requests, by how splits are joined.",
        "",
        "| shape | kernel | microseconds | of copy | largest difference from the first |",
        "|---|---|---|---|---|",
    ]
    for row in record["merge"]:
        shown = (row["shape"], row["what"], row["us"], f"{row['of_copy']:.3f}", row["apart"])
        lines.append("| " + " | ".join(str(value) for value in shown) + " |")
    return lines


def place(page: str, text: str) -> str:
    """The page with its measured part replaced.

    Raises:
        ValueError: the page has no place for it.
    """
    before, middle, rest = page.partition(START)
    _, last, after = rest.partition(END)
    if not (middle and last):
        raise ValueError(f"no {START} ... {END} in the page")
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


@app.command()
def main(
    runs: Annotated[list[Path], typer.Argument(help="Results of attention, the oldest first.")],
    docs: Annotated[Path, typer.Option(help="Folder of the documentation.")] = Path("docs"),
) -> None:
    """Write the record, its picture and the measured part of the page."""
    record = join([msgspec.json.decode(path.read_bytes()) for path in runs])
    folder, page = docs / "benchmarks", docs / "attention.md"
    (folder / "attention-h200.json").write_text(text_of(record), encoding="utf-8")
    draw(record, folder / "attention-h200.png")
    page.write_text(place(page.read_text(encoding="utf-8"), page_of(record)), encoding="utf-8")


if __name__ == "__main__":
    app()
