"""``python -m kvhold.bench.attention``: correctness and speed of K16/V8 attention on a GPU.

Results go to one JSON file, a list of lines by part; cells that it has are not computed again, so
a sweep can be done in parts. Prints counts, and a short table last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from attention._choice import Backends
from attention._errors import MissingPart, Unsupported
from attention.flashinfer import Library
from kvhold.bench import attention_check, attention_time
from kvhold.bench.attention_builds import Builds
from kvhold.bench.attention_merge import compared, specs
from kvhold.bench.attention_tune import tune

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS: Final = (
    *("tiles", "triton", "build", "controls", "quick", "time", "tune", "sweep", "prefill", "merge"),
)


class Results:
    """A file of results, rewritten whenever there is something new and some time has passed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, list[dict[str, Any]]] = {}
        if path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
        self._written = time.monotonic()

    def add(self, part: str, line: dict[str, Any]) -> None:
        """Keep one line."""
        self.data.setdefault(part, []).append(line)
        if time.monotonic() - self._written > 5:
            self.write()

    def write(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        self._written = time.monotonic()


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def conditions(commit: str) -> dict[str, Any]:
    """What the figures were taken on."""
    device = torch.cuda.get_device_properties(0)
    found = {
        "command": " ".join(["python -m kvhold.bench.attention", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "device": device.name,
        "processors": device.multi_processor_count,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    for name in ("torch", "triton", "flashinfer-python"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def run_part(
    part: str,
    args: argparse.Namespace,
    made: tuple[Backends, Library | None, Builds],
    results: Results,
) -> None:
    """One part of the work; all but those of Triton wait for the modules."""
    backends, library, builds = made
    if part not in {"triton", "tiles"}:
        builds.wait()
    start = time.monotonic()
    if part == "controls":
        for line in attention_check.controls(backends):
            results.add("controls", line)
            say(json.dumps(line))
    elif part in {"quick", "sweep", "triton"}:
        sweep(part, args, backends, results)
    elif part == "time":
        measure(backends, library, results)
    elif part == "prefill":
        measure_prefill(backends, library, builds, results)
    elif part in {"tiles", "tune", "merge"}:
        for line in compare(part, library):
            results.add("merge" if part == "merge" else "tune", line)
            say(json.dumps(line))
    say(f"{part}: {time.monotonic() - start:.1f} s")


def compare(part: str, library: Library | None) -> Iterator[dict[str, Any]]:
    """Variants side by side: of joining splits, or of the shapes of programs."""
    if part == "merge":
        return compared(library)
    return tune(library if part == "tune" else None)


def sweep(part: str, args: argparse.Namespace, backends: Backends, results: Results) -> None:
    """Cells, as far as the time goes; wrong ones are printed."""
    lines = results.data.get("cells", [])
    done = {line["cell"] for line in lines}

    def keep(line: dict[str, Any]) -> None:
        results.add("cells", line)
        if line["verdict"] == "wrong":
            say(json.dumps(line))

    quick = part == "quick"
    limits = {"quick": args.quick_seconds, "triton": args.triton_seconds, "sweep": args.seconds}
    left = attention_check.sweep(
        backends,
        done,
        limits[part],
        keep,
        head_dims=(128,) if quick else None,
        only=("triton",) if part == "triton" else attention_check.BACKENDS,
        every=11 if quick else 1,
    )
    counts: dict[str, int] = {}
    for line in results.data.get("cells", []):
        name = f"{line['cell'].split()[0]} {line['verdict']}"
        counts[name] = counts.get(name, 0) + 1
    say(f"cells {json.dumps(counts)}, left {left}")
    right = [line for line in results.data.get("cells", []) if line["verdict"] == "right"]
    if right:
        out, lse = (max(line[name] for line in right) for name in ("out", "lse"))
        say(f"largest errors: out {out:.2e}, lse {lse:.2e}")


def measure(backends: Backends, library: Library | None, results: Results) -> None:
    """Times of decoding."""
    ceiling = attention_time.copy_rate()
    say(f"copy {ceiling / 1e9:.0f} GB/s")
    results.add("copy", {"GB/s": round(ceiling / 1e9)})
    names = ("auto", "flashinfer", "flashinfer-cores", "triton")
    for figure in attention_time.decode_figures(backends, library, names):
        row = figure.row(ceiling)
        results.add("time", row)
        say(
            f"{row['shape']:>24} {row['what']:<32} {row['us']:>9} us {row['GB/s']:>6} {row['of_copy']}"
        )


def measure_prefill(
    backends: Backends, library: Library | None, builds: Builds, results: Results
) -> None:
    """Times of prefill, beside those of FlashInfer's own that are built by now."""
    fa3 = builds.fa3()
    results.add("fa3", fa3)
    kinds = ("fa2", "fa3") if fa3["state"] == "compared" else ("fa2",)
    for figure in attention_time.prefill_figures(backends, library, kinds):
        row = figure.row(1e12)
        results.add("prefill", row)
        say(f"{row['shape']:>28} {row['what']:<32} {row['us']:>9} us")


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="kvhold.bench.attention", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="in this order; all modules build meanwhile"
    )
    parser.add_argument("--seconds", type=float, default=420.0, help="for the sweep")
    parser.add_argument("--quick-seconds", type=float, default=60.0)
    parser.add_argument("--triton-seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=8, help="compilers side by side")
    parser.add_argument("--modules", type=int, default=0, help="build only so many; 0 for all")
    parser.add_argument(
        "--fa3",
        type=float,
        default=0.0,
        help="time FA3's prefill too; seconds that it may take to build, before everything else",
    )
    parser.add_argument("--commit", default="", help="of the source, for the record")
    args = parser.parse_args()
    results = Results(args.out)
    results.add("conditions", conditions(args.commit))
    backends = Backends()
    library: Library | None
    try:
        library = Library()
        say(f"FlashInfer {library.version}, native K/V types: {library.native}")
    except (MissingPart, Unsupported) as reason:
        library = None
        say(f"without FlashInfer: {reason}")
    if library is not None:
        backends = Backends(library=library)
    parts = args.parts.split(",")
    builds = Builds.of(
        library,
        workers=args.workers,
        first=args.modules,
        more=specs() if "merge" in parts and library is not None else [],
        fa3=args.fa3 if "prefill" in parts else 0,
        tell=say,
    )
    for part in parts:
        if part not in PARTS:
            parser.error(f"{part!r}, expected some of {', '.join(PARTS)}")
        try:
            run_part(part, args, (backends, library, builds), results)
        finally:
            results.write()
    wrong = [line for line in results.data.get("cells", []) if line["verdict"] == "wrong"]
    say(f"wrong cells: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
