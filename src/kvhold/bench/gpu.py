"""``python -m kvhold.bench.gpu --out DIR``: the GPU, part by part, each in a process of its own.

A part that fails or outlasts its limit costs its own figures only. Every part writes one JSON file;
`gpu.json` joins them with the conditions that they were taken under, and `gpu.png` shows them. The
parts `tune`, `pace`, `bare` and `table` come first, and the others use what those found in the same folder.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from kvhold._errors import UserError
from kvhold._output import check_writable, write
from kvhold.bench import gpu_cast, gpu_copy, gpu_latency, gpu_pace, gpu_plot, gpu_tune
from kvhold.bench.gpu_rig import Settings
from kvhold.bench.pairs import conditions

if TYPE_CHECKING:
    from collections.abc import Callable

    Part = Callable[[bool, Settings], dict[str, Any]]

PARTS: dict[str, tuple[Part, float]] = {
    "tune": (gpu_tune.measure, 60.0),
    "pace": (gpu_pace.measure, 90.0),
    "bare": (gpu_pace.bare, 60.0),
    "table": (gpu_tune.table, 90.0),
    "pages": (gpu_copy.pages, 110.0),
    "two_way": (gpu_copy.two_way, 40.0),
    "latency": (gpu_latency.latency, 60.0),
    "gemm": (gpu_latency.gemm, 70.0),
    "cast": (gpu_cast.measure, 80.0),
    "fragments": (gpu_copy.fragments, 70.0),
}
"""What is measured, and seconds that it may take."""


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import torch  # noqa: PLC0415 - import torch costs a second; the parts of this list do not all need it

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "cuda-bindings", "cuda-core", "uvloop", "anyio", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    found["cuda"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def run_part(name: str, folder: Path, *, short: bool) -> dict[str, Any]:
    """Run one part in a child process; its figures, or how it failed."""
    out = folder / f"{name}.json"
    out.unlink(missing_ok=True)  # what an earlier run left is not this run's
    command = [sys.executable, "-m", "kvhold.bench.gpu", "--out", str(folder), "--part", name]
    if short:
        command.append("--short")
    began = time.perf_counter()
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, our own module
            command, capture_output=True, text=True, timeout=PARTS[name][1], check=False
        )
        problem = "" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]
    except subprocess.TimeoutExpired as error:
        problem = f"stopped after {error.timeout} s"
    result: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
    if problem:
        result["problem"] = problem
    if out.exists():
        result["figures"] = msgspec.json.decode(out.read_bytes())
    return result


def require() -> None:
    """See to it that there is a GPU.

    Raises:
        UserError: there is none.
    """
    import torch  # noqa: PLC0415 - see `versions`

    if not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device; kvhold doctor says more")


def main(
    out: Path, *, only: str = "", short: bool = False, is_quiet: bool = False
) -> dict[str, Any]:
    """Measure, show, and keep the figures with the conditions they were taken under.

    Args:
        out: folder for the figures; made if it is not there.
        only: parts to run, separated by commas; all if empty.
        short: fewer sizes and rounds.
        is_quiet: show on standard error instead of standard output.

    Raises:
        UserError: there is no such part.
        OSError: the folder cannot be made or written.
    """
    wanted = only.split(",") if only else list(PARTS)
    for name in wanted:
        if name not in PARTS:
            raise UserError(f"no part {name!r}: there are {', '.join(PARTS)}")
    out.mkdir(parents=True, exist_ok=True)
    check_writable(out / "gpu.json")
    console = Console(width=160, stderr=is_quiet)
    report: dict[str, Any] = {
        "command": " ".join(["python -m kvhold.bench.gpu", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": versions(),
        "conditions": conditions(),
        "short": short,
    }
    began = time.perf_counter()
    for number, name in enumerate(wanted, 1):
        passed = time.perf_counter() - began
        console.print(f"{number} of {len(wanted)}, {name}, after {passed:.0f} s", style="dim")
        report[name] = found = run_part(name, out, short=short)
        console.print(f"[{name}] {found['seconds']} s {found.get('problem', '')}", markup=False)
        for line in found.get("figures", {}).get("lines", ()):
            console.print("  " + line, markup=False)
        write(out / "gpu.json", msgspec.json.format(msgspec.json.encode(report), indent=1))
    _draw(report, out / "gpu.png", console)
    return report


def _draw(report: dict[str, Any], picture: Path, console: Console) -> None:
    """The picture; figures without one are still figures."""
    try:
        gpu_plot.draw(report, picture)
    except ImportError as error:
        console.print(f"no picture: {error}", markup=False)


def failed(report: dict[str, Any]) -> list[str]:
    """The parts that have a problem."""
    return [name for name, part in report.items() if isinstance(part, dict) and "problem" in part]


def command(
    out: Annotated[Path, typer.Option(help="Folder for the figures.")],
    only: Annotated[str, typer.Option(help="Parts to run, separated by commas.")] = "",
    part: Annotated[str, typer.Option(help="Run this part here, in this process.")] = "",
    short: Annotated[bool, typer.Option(help="Fewer sizes and rounds.")] = False,
) -> None:
    """Measure the GPU part by part, or one part in this process. Exit 1 if a part failed."""
    if not part:
        problems = failed(main(out, only=only, short=short))
        if problems:
            typer.echo(f"failed: {', '.join(problems)}", err=True)
            raise typer.Exit(1)
        return
    out.mkdir(parents=True, exist_ok=True)
    figures = PARTS[part][0](short, Settings.of(out))
    (out / f"{part}.json").write_bytes(msgspec.json.encode(figures))


if __name__ == "__main__":
    typer.run(command)
