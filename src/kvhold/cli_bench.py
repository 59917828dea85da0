"""`kvhold bench`: what this machine can do, part by part, each against its limit in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvhold._output import refuse, show
from kvhold.cli_errors import one_line

bench = typer.Typer(
    name="bench",
    help="Measure this machine, each part against its limit in the same run.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Out = Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")]
Folder = Annotated[Path, typer.Option(help="Where files are written.")]


Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds for each pair.")]
Lengths = Annotated[str, typer.Option(help="Prefix lengths, separated by commas.")]


def _write(report: Any, out: Path | None) -> None:
    """Keep the figures.

    Raises:
        OSError: the file cannot be written.
    """
    import msgspec  # noqa: PLC0415 - for this alone

    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def _part(name: str, rounds: int, folder: Path, out: Path | None, *, as_json: bool) -> None:
    """Measure one of the parts of `kvhold.bench`."""
    from rich.console import Console  # noqa: PLC0415 - as all of these

    from kvhold.bench import __main__ as parts  # noqa: PLC0415 - seconds of import
    from kvhold.bench.pairs import conditions  # noqa: PLC0415 - as above

    measure = getattr(parts, f"measure_{name}")
    with one_line():
        if not folder.is_dir():
            refuse(f"{folder} is no folder")
        found = measure(Console(stderr=as_json), rounds, folder)
        report = {"conditions": conditions(), "rounds": rounds, name: found}
        _write(report, out)
    if as_json:
        show(report, "", as_json=True)


@bench.command()
def engine(
    rounds: Rounds = 15, folder: Folder = Path(), out: Out = None, as_json: AsJson = False
) -> None:
    """Copies, files and small operations, each against bare threads."""
    _part("engine", rounds, folder, out, as_json=as_json)


@bench.command()
def codec(
    rounds: Rounds = 15, folder: Folder = Path(), out: Out = None, as_json: AsJson = False
) -> None:
    """Encoding and decoding of pages, against another engine's; makes its environment first."""
    _part("codec", rounds, folder, out, as_json=as_json)


@bench.command()
def store(
    rounds: Rounds = 15, folder: Folder = Path(), out: Out = None, as_json: AsJson = False
) -> None:
    """Putting, finding and fetching of pages, against bare threads."""
    _part("store", rounds, folder, out, as_json=as_json)


@bench.command()
def gpu(
    out: Annotated[Path, typer.Option(help="Folder for the figures.")],
    only: Annotated[str, typer.Option(help="Parts to run, separated by commas.")] = "",
    short: Annotated[bool, typer.Option("--short", help="Fewer sizes and rounds.")] = False,
) -> None:
    """The link to a GPU: copies of pages, latency, the value cast; JSON files go to a folder."""
    from kvhold.bench.gpu import main as measure  # noqa: PLC0415 - seconds of import

    with one_line():
        measure(out, only=only, short=short)


@bench.command()
def ttft(
    *,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="An 8B-shaped model on the first GPU.")
    ] = False,
    model: Annotated[Path | None, typer.Option(help="Folder of a model, for the CPU.")] = None,
    lengths: Lengths = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5,
    folder: Folder = Path(),
    out: Out = None,
    picture: Annotated[Path | None, typer.Option(help="Draw them to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time to the first token by prefix length: restore it from the tiers, or compute it again."""
    from kvhold import plots  # noqa: PLC0415 - as all of these
    from kvhold.bench.ttft import render  # noqa: PLC0415 - as above
    from kvhold.bench.ttft_command import parse_lengths, run  # noqa: PLC0415 - seconds of import

    try:
        wanted = parse_lengths(lengths, gpu=gpu)
    except ValueError as error:
        refuse(str(error))
    with one_line():
        report = run(gpu=gpu, lengths=wanted, rounds=rounds, folder=folder, model=model, out=out)
        if picture is not None:
            plots.ttft_picture(report, picture)
    show(report, render(report), as_json=as_json)


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Figures of a run, as JSON.")],
    after: Annotated[Path, typer.Argument(help="Figures of another.")],
    bound: Annotated[float, typer.Option(min=0, help="Share that counts as the same.")] = 0.05,
    everything: Annotated[bool, typer.Option("--all", help="Show what did not move, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which figures moved between two runs, and which lie within their own noise."""
    import msgspec  # noqa: PLC0415 - for this alone

    from kvhold.bench import compare as comparison  # noqa: PLC0415 - as above

    reports = []
    for path in (before, after):
        try:
            reports.append(msgspec.json.decode(path.read_bytes()))
        except OSError as error:
            refuse(f"{path}: {error.strerror}")
        except msgspec.DecodeError as error:
            refuse(f"{path} is no JSON: {error}")
    changes = comparison.compare(*reports, bound=bound)
    conditions = comparison.differing(*reports)
    show(
        comparison.as_data(changes, conditions),
        comparison.render(changes, conditions, everything=everything),
        as_json=as_json,
    )
