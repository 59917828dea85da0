"""What the commands print: tables for people, JSON for programs, one line for an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(data: Any, table: RenderableType, *, as_json: bool) -> None:
    """Print `data` as JSON on standard output, or `table` for people.

    Args:
        data: anything that msgspec encodes.
        table: the same for people.
        as_json: which of the two.
    """
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        Console().print(table)


def refuse(message: str, *, code: int = 2) -> NoReturn:
    """Say in one line on standard error what is wrong, and leave.

    Raises:
        typer.Exit: always, with `code`.
    """
    Console(stderr=True, soft_wrap=True).print(f"[red]kvhold:[/red] {message}", highlight=False)
    raise typer.Exit(code)
