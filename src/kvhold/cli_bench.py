"""`kvhold bench`: what this machine can do, part by part, each against its limit in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvhold._output import refuse, show

bench = typer.Typer(
    name="bench",
    help="Measure this machine, each part against its limit in the same run.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Out = Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")]
Folder = Annotated[Path, typer.Option(help="Where files are written.")]


def _write(report: Any, out: Path | None) -> None:
    """Keep the figures."""
    import msgspec  # noqa: PLC0415 - for this alone

    if out is None:
        return
    try:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        refuse(f"{out}: {error.strerror}")


@bench.command()
def engine(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds for each pair.")] = 15,
    folder: Folder = Path(),
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Copies, files and small operations, each against bare threads."""
    from rich.console import Console  # noqa: PLC0415 - as all of these

    from kvhold.bench.__main__ import measure_engine  # noqa: PLC0415 - seconds of import
    from kvhold.bench.pairs import conditions  # noqa: PLC0415 - as above

    console = Console(stderr=as_json)
    report = {
        "conditions": conditions(),
        "rounds": rounds,
        "engine": measure_engine(console, rounds, folder),
    }
    _write(report, out)
    if as_json:
        show(report, "", as_json=True)
