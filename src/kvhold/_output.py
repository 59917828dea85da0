"""What the commands print and write: tables for people, JSON for programs, one line for an error."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(data: Any, table: RenderableType, *, as_json: bool) -> None:
    """Print `data` as JSON on standard output, or `table` for people.

    Args:
        data: anything that msgspec encodes.
        table: the same for people.
        as_json: which of the two.

    Raises:
        OSError: standard output takes no more.
    """
    if as_json:
        typer.echo(as_json_text(data).decode(), nl=False)
    else:
        Console().print(table)


def as_json_text(data: Any) -> bytes:
    """Data as JSON for files and for people who look into them."""
    return msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"


def refuse(message: str, *, code: int = 2) -> NoReturn:
    """Say in one line on standard error what is wrong, and leave.

    Raises:
        typer.Exit: always, with `code`.
    """
    line = " ".join(message.split())
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[red]kvhold:[/red] {escape(line)}", highlight=False, emoji=False)
    raise typer.Exit(code)


def reason(error: OSError) -> str:
    """An error of the system in one line: where, and what."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def brief(why: str) -> str:
    """A system's error as others have put it into words, without its number and path."""
    return re.sub(r"^\[Errno \d+\] |: '[^']*'$", "", why)


def write(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all and nothing else either.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)  # a pipe or a device
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask()
        Path(name).chmod(mode)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def check_writable(*paths: Path | None) -> None:
    """See to it that files can be written, before minutes of work that would be lost.

    Args:
        paths: where files will go; None for those that are not wanted.

    Raises:
        OSError: one cannot be; says which and why.
    """
    for path in paths:
        if path is None or (path.exists() and not path.is_dir() and not path.is_file()):
            continue
        try:
            if path.exists():
                path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
