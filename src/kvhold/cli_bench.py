"""`kvhold bench`: what this machine can do, part by part, each against its limit in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvhold._output import as_json_text, check_writable, refuse, show, write
from kvhold.cli_errors import one_line
from kvhold.interrupts import as_ctrl_c

bench = typer.Typer(
    name="bench",
    help=(
        "Measure what this machine can do, each part against its limit in the same run.\n\n"
        "Begin with `kvhold bench ttft`: does restoring a prefix beat computing it again, here? "
        "Figures go to a file with --out; `kvhold bench compare` shows what moved between two.\n\n"
        "Exit 0 when it was measured, 2 when it could not be."
    ),
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Out = Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")]
Folder = Annotated[Path, typer.Option(help="Where files are written.")]


Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds for each pair.")]
Lengths = Annotated[
    str, typer.Option(help="Tokens of the prefixes, multiples of 32 separated by commas.")
]


def _part(name: str, rounds: int, folder: Path, out: Path | None, *, as_json: bool) -> None:
    """Measure one of the parts of `kvhold.bench`."""
    from rich.console import Console  # noqa: PLC0415 - as all of these

    if not folder.is_dir():
        refuse(f"{folder} is no folder")
    with one_line():
        check_writable(folder / "kvhold-bench", out)
        from kvhold.bench import __main__ as parts  # noqa: PLC0415 - seconds of import
        from kvhold.bench.pairs import conditions  # noqa: PLC0415 - as above

        measure = getattr(parts, f"measure_{name}")
        with as_ctrl_c():
            found = measure(Console(stderr=as_json), rounds, folder)
        report = {"conditions": conditions(), "rounds": rounds, name: found}
        if as_json:
            show(report, "", as_json=True)
        if out is not None:
            write(out, as_json_text(report))


@bench.command()
def engine(
    rounds: Rounds = 15, folder: Folder = Path(), out: Out = None, as_json: AsJson = False
) -> None:
    """Time copies, files and small operations of the engine against bare threads."""
    _part("engine", rounds, folder, out, as_json=as_json)


@bench.command()
def codec(
    rounds: Rounds = 15, folder: Folder = Path(), out: Out = None, as_json: AsJson = False
) -> None:
    """Time the casting and packing of pages against LMCache's.

    LMCache gets an environment of its own, .venv-crosscheck in the current folder, made with pip the
    first time and kept.
    """
    _part("codec", rounds, folder, out, as_json=as_json)


@bench.command()
def store(
    rounds: Rounds = 15, folder: Folder = Path(), out: Out = None, as_json: AsJson = False
) -> None:
    """Time putting, finding and fetching of pages against bare threads and LMCache's files.

    LMCache gets an environment of its own, .venv-crosscheck in the current folder, made with pip the
    first time and kept.
    """
    _part("store", rounds, folder, out, as_json=as_json)


@bench.command()
def gpu(
    out: Annotated[Path, typer.Option(help="Folder for the figures; made if missing.")],
    only: Annotated[str, typer.Option(help="Parts to run, separated by commas.")] = "",
    short: Annotated[bool, typer.Option("--short", help="Fewer sizes and rounds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time the link to a GPU: copies of pages, latency, the value cast.

    One JSON file for each part, and gpu.json with all of them, go to the folder. Needs a GPU. Exit 1
    if a part failed.
    """
    with one_line():
        from kvhold.bench import gpu as parts  # noqa: PLC0415 - seconds of import

        parts.require()
        with as_ctrl_c():
            report = parts.main(out, only=only, short=short, is_quiet=as_json)
        if as_json:
            show(report, "", as_json=True)
    if any("problem" in part for part in report.values() if isinstance(part, dict)):
        raise typer.Exit(1)


@bench.command()
def ttft(
    *,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="A random 8B-shaped model on the first GPU.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a model, for the CPU; SmolLM2-135M from PyPI if left out."),
    ] = None,
    lengths: Lengths = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5,
    folder: Folder = Path(),
    out: Out = None,
    picture: Annotated[Path | None, typer.Option(help="Draw them to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time to the first token by prefix length: restore it from the tiers, or compute it again.

    Says from which length on restoring is faster, with pages in host memory, in files of the page
    cache, and in files past it. --lengths 512,2048 gives a first look in a minute.
    """
    with one_line():
        from kvhold import plots  # noqa: PLC0415 - as all of these
        from kvhold.bench.ttft import render  # noqa: PLC0415 - as above
        from kvhold.bench.ttft_command import parse_lengths, run  # noqa: PLC0415 - seconds of import

        try:
            wanted = parse_lengths(lengths, gpu=gpu)
        except ValueError as error:
            refuse(str(error))
        report = run(
            gpu=gpu,
            lengths=wanted,
            rounds=rounds,
            folder=folder,
            model=model,
            out=out,
            picture=picture,
        )
        show(report, render(report), as_json=as_json)
        if picture is not None:
            plots.ttft_picture(report, picture)


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Figures of a run, as JSON.")],
    after: Annotated[Path, typer.Argument(help="Figures of another.")],
    bound: Annotated[float, typer.Option(min=0, help="Share that counts as the same.")] = 0.05,
    everything: Annotated[bool, typer.Option("--all", help="Show what did not move, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which figures moved between two runs, and which lie within their own noise.

    Takes the files that --out wrote. Exit 0 whatever moved; 2 if the files have nothing in common.
    """
    from kvhold.bench import compare as comparison  # noqa: PLC0415 - not needed before

    with one_line():
        reports = [comparison.read(path) for path in (before, after)]
        changes = comparison.compare(*reports, bound=bound)
        if not changes:
            refuse(f"no figure is in both {before} and {after}")
        conditions = comparison.differing(*reports)
        show(
            comparison.as_data(changes, conditions),
            comparison.render(changes, conditions, everything=everything),
            as_json=as_json,
        )
