"""The command line of `kvhold.bench.ttft`: which rig, which placements, and where the figures go."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvhold._errors import UserError
from kvhold._output import as_json_text, check_writable, write
from kvhold.bench.gpu import require
from kvhold.bench.pairs import conditions
from kvhold.bench.ttft import as_data, measure, render
from kvhold.folders import scratch
from kvhold.interrupts import Stop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvhold.bench.ttft import Rig
    from kvhold.model import LanguageModel

CPU_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
PAGE = 32
GPU_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def report_of(rig: Rig, placements: dict[str, Any], *, rounds: int) -> dict[str, Any]:
    """All figures as data; part of the command's contract."""
    return {
        "command": " ".join(["kvhold", *sys.argv[1:]]),
        "conditions": conditions(),
        "model": {"name": rig.name},
        "rounds": rounds,
        "bytes_per_token": rig.bytes_per_token,
        "placements": placements,
    }


async def run_cpu(
    language: LanguageModel,
    lengths: tuple[int, ...],
    *,
    rounds: int,
    folder: Path,
    progress: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """A model on the CPU; all placements one after the other.

    Args:
        language: the model.
        lengths: tokens of the prefixes, whole pages.
        rounds: how many are counted.
        folder: where files go.
        progress: called with the placement's name whenever a length of it is done.
        keep: called with the report so far when a placement is done.

    Raises:
        UserError: the model does not take prefixes of that length.
        TierError, OSError: the folder cannot be used.
    """
    from kvhold.bench.ttft_cpu import PLACES, cpu_rig  # noqa: PLC0415 - transformers comes along

    most = language.geometry.max_tokens
    if max(lengths) > most:
        raise UserError(f"prefixes of {max(lengths)} tokens: {language.name} takes {most}")
    placements: dict[str, Any] = {}
    report: dict[str, Any] = {}
    for where in PLACES:
        async with cpu_rig(language, where, max(lengths), folder / "tier") as rig:
            step = partial(progress, where.name)
            points = await measure(rig, lengths, rounds=rounds, progress=step)
            placements[where.name] = as_data(points)
            report = report_of(rig, placements, rounds=rounds)
        keep(report)
    return report


def run(
    *,
    gpu: bool,
    lengths: tuple[int, ...],
    rounds: int,
    folder: Path,
    model: Path | None,
    out: Path | None,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Measure on the CPU or on a GPU, with a bar for each placement on standard error.

    Args:
        gpu: the 8B-shaped model on the first GPU.
        lengths: tokens of the prefixes.
        rounds: how many are counted.
        folder: where files go for the time being.
        model: folder of a model for the CPU; the packaged one if None.
        out: JSON file for the figures, written whenever a placement is done.
        picture: a file that has to be writable afterwards.

    Raises:
        UserError: there is no such model, or no GPU.
        TierError, OSError: the folder cannot be used, or an output not written.
    """
    check_writable(out, picture)
    if gpu:
        require()

    def keep(report: dict[str, Any]) -> None:
        if out is not None:
            write(out, as_json_text(report))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as show:
        bars: dict[str, Any] = {}

        def step(name: str) -> None:
            if name not in bars:
                bars[name] = show.add_task(name, total=len(lengths))
            show.advance(bars[name])

        on = _on_gpu() if gpu else _on_cpu(model, show)
        with Stop() as stop, scratch(folder, "ttft") as place:
            return stop.run(
                partial(on, lengths, rounds=rounds, folder=place, progress=step, keep=keep)
            )


def _on_cpu(folder: Path | None, show: Progress) -> Callable[..., Awaitable[dict[str, Any]]]:
    from kvhold.model import load  # noqa: PLC0415 - transformers comes along

    loading = show.add_task("loading the model", total=1)
    language = load(folder, dtype=torch.bfloat16)
    show.advance(loading)
    return partial(run_cpu, language)


def _on_gpu() -> Callable[..., Awaitable[dict[str, Any]]]:
    from kvhold.bench.ttft_gpu import run_gpu  # noqa: PLC0415 - only where there is one

    return run_gpu


def parse_lengths(given: str, *, gpu: bool) -> tuple[int, ...]:
    """Lengths as the user gave them, or the default ones.

    Raises:
        ValueError: no numbers, or not whole pages.
    """
    if not given:
        return GPU_LENGTHS if gpu else CPU_LENGTHS
    parts = [part.strip() for part in given.split(",")]
    if any(not part.isdecimal() or int(part) < PAGE or int(part) % PAGE for part in parts):
        raise ValueError(f"lengths {given!r}: expected multiples of {PAGE}, separated by commas")
    return tuple(int(part) for part in parts)


def _command(
    *,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="An 8B-shaped model on the first GPU.")
    ] = False,
    lengths: Annotated[str, typer.Option(help="Prefix lengths, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5,
    folder: Annotated[Path, typer.Option(help="Where files go meanwhile.")] = Path(),
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Time to the first token: restore against recompute, by prefix length."""
    report = run(
        gpu=gpu,
        lengths=parse_lengths(lengths, gpu=gpu),
        rounds=rounds,
        folder=folder,
        model=None,
        out=out,
    )
    Console().print(render(report))


def main() -> None:
    """Run as ``python -m kvhold.bench.ttft``."""
    typer.run(_command)
