"""``python -m kvhold.bench.attention``: correctness and speed of K16/V8 attention on a GPU.

Results go to one JSON file, a list of lines by part; cells that it has are not computed again, so
a sweep can be done in parts. Prints counts, and a short table last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from attention._choice import Backends
from attention._errors import MissingPart, Unsupported
from attention.flashinfer import CORES_HEAD_DIMS, HEAD_DIMS, Library, ModuleKey
from kvhold.bench import attention_check, attention_time
from kvhold.bench.attention_tune import tune

PARTS: Final = ("build", "controls", "quick", "time", "tune", "sweep")


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


def conditions() -> dict[str, Any]:
    """What the figures were taken on."""
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "processors": device.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def keys() -> list[ModuleKey]:
    """The modules that the sweep needs, those of head_dim 128 first."""
    made = []
    for head_dim in sorted(HEAD_DIMS, key=lambda dim: dim != 128):
        for value in (torch.float8_e4m3fn, torch.float8_e5m2):
            for key in (torch.bfloat16, torch.float16):
                made += [
                    ModuleKey(
                        cores=False, key=key, value=value, head_dim=head_dim, by_token=by_token
                    )
                    for by_token in (False, True)
                ]
                if head_dim in CORES_HEAD_DIMS:
                    made.append(
                        ModuleKey(
                            cores=True, key=key, value=value, head_dim=head_dim, by_token=False
                        )
                    )
    return made


def build(library: Library, workers: int, first: int) -> None:
    """Build modules side by side; the first `first` of ours (all when 0), and the stock ones."""
    wanted = keys()[:first] if first else keys()
    # Sources are written by one thread, compilers run in several.
    specs = [library.spec(key) for key in wanted] + attention_time.stock_specs(library)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda spec: spec.build(verbose=False), specs))
    say(f"{len(specs)} modules built")


def run_part(
    part: str, args: argparse.Namespace, made: tuple[Backends, Library | None], results: Results
) -> None:
    """One part of the work."""
    backends, library = made
    start = time.monotonic()
    if part == "build" and library is not None:
        build(library, args.workers, args.modules)
    elif part == "controls":
        for line in attention_check.controls(backends):
            results.add("controls", line)
            say(json.dumps(line))
    elif part in {"quick", "sweep"}:
        sweep(part, args, backends, results)
    elif part == "time":
        measure(args, backends, library, results)
    elif part == "tune":
        for line in tune(library):
            results.add("tune", line)
            say(json.dumps(line))
    say(f"{part}: {time.monotonic() - start:.1f} s")


def sweep(part: str, args: argparse.Namespace, backends: Backends, results: Results) -> None:
    """Cells, as far as the time goes; wrong ones are printed."""
    lines = results.data.get("cells", [])
    done = {line["cell"] for line in lines}

    def keep(line: dict[str, Any]) -> None:
        results.add("cells", line)
        if line["verdict"] == "wrong":
            say(json.dumps(line))

    quick = part == "quick"
    seconds = args.quick_seconds if quick else args.seconds
    left = attention_check.sweep(
        backends, done, seconds, keep, head_dims=(128,) if quick else None, every=11 if quick else 1
    )
    counts: dict[str, int] = {}
    for line in results.data.get("cells", []):
        name = f"{line['cell'].split()[0]} {line['verdict']}"
        counts[name] = counts.get(name, 0) + 1
    say(f"cells {json.dumps(counts)}, left {left}")
    right = [line for line in results.data.get("cells", []) if line["verdict"] == "right"]
    if right:
        say(
            f"largest errors: out {max(r['out'] for r in right):.2e}, lse {max(r['lse'] for r in right):.2e}"
        )


def measure(
    args: argparse.Namespace, backends: Backends, library: Library | None, results: Results
) -> None:
    """Times, and a table."""
    ceiling = attention_time.copy_rate()
    say(f"copy {ceiling / 1e9:.0f} GB/s")
    results.add("copy", {"GB/s": round(ceiling / 1e9)})
    names = ("auto", "flashinfer", "flashinfer-cores", "triton")
    figures = attention_time.decode_figures(backends, library, names)
    for figure in figures:
        row = figure.row(ceiling)
        results.add("time", row)
        say(
            f"{row['shape']:>24} {row['what']:<32} {row['us']:>9} us {row['GB/s']:>6} {row['of_copy']}"
        )
    kinds = ("fa2", "fa3") if args.fa3 else ("fa2",)
    for figure in attention_time.prefill_figures(backends, library, kinds):
        row = figure.row(ceiling)
        results.add("prefill", row)
        say(f"{row['shape']:>28} {row['what']:<32} {row['us']:>9} us")


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="kvhold.bench.attention", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order")
    parser.add_argument("--seconds", type=float, default=420.0, help="for the sweep")
    parser.add_argument("--quick-seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=8, help="compilers side by side")
    parser.add_argument("--modules", type=int, default=0, help="build only so many; 0 for all")
    parser.add_argument("--fa3", action="store_true", help="time FlashInfer's FA3 prefill too")
    args = parser.parse_args()
    results = Results(args.out)
    results.add("conditions", conditions())
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
    for part in args.parts.split(","):
        if part not in PARTS:
            parser.error(f"{part!r}, expected some of {', '.join(PARTS)}")
        try:
            run_part(part, args, (backends, library), results)
        finally:
            results.write()
    wrong = [line for line in results.data.get("cells", []) if line["verdict"] == "wrong"]
    say(f"wrong cells: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
