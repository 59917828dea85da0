"""The command line. Every command has ``--json``; exit codes are 0 fine, 1 not, 2 wrong usage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvhold import doctor as _doctor
from kvhold._output import refuse, show

app = typer.Typer(
    name="kvhold",
    help=(
        "Moves a language model's KV cache between GPU pages, page-locked memory and files, and "
        "never lets a buffer be reused while anything may still touch it."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.callback()
def start() -> None:
    """Refuse an environment in which another distribution owns our import packages."""
    found = _doctor.strangers()
    if found:
        refuse("; ".join(f"{f.what} {f.found}: {f.use}" for f in found))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where files would be kept.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, what will be used and what is off. Exit 1 if something is."""
    if not folder.is_dir():
        refuse(f"{folder} is no folder")
    findings = _doctor.examine(folder)
    show(_doctor.plain(findings), _doctor.table_of(findings), as_json=as_json)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    app()
