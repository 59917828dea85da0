"""`kvhold store ls|verify|stats DIR`: what lies in a folder of a disk tier. Nothing is changed.

The folder may be in use: writers publish whole files and remove whole files, so a file that vanishes
under the look is skipped.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvhold._output import refuse, show
from kvhold.cli_errors import one_line
from tiers._errors import FormatError, ProvenanceMismatch
from tiers._folder import SHARDS, Name
from tiers._team import Team
from tiers.format import HEADER_BYTES, parse_v3

if TYPE_CHECKING:
    from collections.abc import Iterator

store = typer.Typer(
    name="store",
    help="Look into a folder in which a store keeps pages, in use or not; nothing is changed.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path,
    typer.Argument(help="The folder of a disk tier, as .kvhold/whole.", show_default=False),
]
Limit = Annotated[int, typer.Option(min=1, help="Files that are shown; --json has all of them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class Found:
    """One file.

    Attributes:
        path: where it is.
        name: what its name says; None if it is not one of ours.
        nbytes: its length.
        allocated: bytes that the file system has set aside for it.
        live: whether its writer lives.
    """

    path: Path
    name: Name | None
    nbytes: int
    allocated: int
    live: bool

    @property
    def state(self) -> str:
        """What it is, in a word or two."""
        if self.name is None:
            return "unknown"
        if self.name.temporary:
            return "being written" if self.live else "leftover"
        if self.name.kind == "part":
            return "values" if self.live else "orphan"
        return "page"


def live_writers(root: Path) -> set[bytes]:
    """Ids of writers that hold their lock."""
    found = set()
    for path in root.joinpath("writers").glob("*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found.add(bytes.fromhex(path.name))
        finally:
            os.close(fd)
    return found


def _listed(shard: Path) -> list[Path]:
    """Files of a shard, none if it was never made.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return sorted(shard.iterdir())
    except FileNotFoundError:
        return []


def find(root: Path) -> Iterator[Found]:
    """Every file of the tier, shard by shard.

    Raises:
        OSError: the folder cannot be read.
    """
    live = live_writers(root)
    for shard in SHARDS:
        for path in _listed(root / "data" / shard):
            try:
                stats = path.lstat()
            except FileNotFoundError:
                continue
            name = Name.parse(path.name)
            lives = name is not None and name.writer in live
            yield Found(path, name, stats.st_size, stats.st_blocks * 512, lives)


def check(path: Path, name: Name) -> None:
    """Check every byte of a published file, and that it is the one that its name says.

    Raises:
        FormatError: it is not.
        OSError: it cannot be read.
    """
    data = memoryview(path.read_bytes())
    header = parse_v3(data)
    said = header.identity
    if (said.key, said.put) != (name.key, name.put):
        raise ProvenanceMismatch(
            "key and put", found=said.key + said.put, expected=name.key + name.put
        )
    for section in header.plan.sections:
        header.verify(data, section.part.name, Team())


def describe(path: Path) -> str:
    """What a file's header says about its pages, or why it says nothing."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = parse_v3(memoryview(file.read(HEADER_BYTES)), total=size)
    except FormatError as error:
        return f"{error.cause}: {error}"
    except OSError as error:
        return error.strerror or str(error)
    plan = header.plan
    layout = plan.layout
    parts = "+".join(section.part.name for section in plan.sections)
    return (
        f"{parts}, {layout.layers} layers, {layout.page_size} tokens, {layout.kv_heads} heads of "
        f"{layout.head_dim}, {layout.key}/{layout.value or 'no values'}"
    )


def _open(root: Path) -> Path:
    if not root.joinpath("data").is_dir():
        refuse(f"{root} is no folder of a disk tier")
    return root


@store.command()
def ls(folder: Folder, *, limit: Limit = SHOWN, as_json: AsJson = False) -> None:
    """List what is there: one line for each file, with what its header says.

    Exit 0, or 2 if the folder cannot be read.
    """
    with one_line():
        found = list(find(_open(folder)))
    shown = found if as_json else found[:limit]
    table = Table(title=f"{folder}: {len(found)} files")
    for heading in ("key", "put", "what", "bytes", "holds"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left")
    rows: list[dict[str, Any]] = []
    for item in shown:
        says = describe(item.path) if item.name and not item.name.temporary else ""
        key = item.name.key.hex() if item.name else item.path.name
        put = item.name.put.hex() if item.name else ""
        table.add_row(key[:16], put, item.state, f"{item.allocated:,}", says)
        rows.append(
            {
                "key": key,
                "put": put,
                "state": item.state,
                "bytes": item.nbytes,
                "allocated": item.allocated,
                "holds": says,
            }
        )
    if len(shown) < len(found):
        table.caption = f"{len(found) - len(shown)} more; --limit shows them"
    show(rows, table, as_json=as_json)


@store.command()
def verify(folder: Folder, *, as_json: AsJson = False) -> None:
    """Read every published file and check every byte.

    Exit 0 if all are right, 1 if one is damaged, 2 if the folder cannot be read.
    """
    with one_line():
        published = [f for f in find(_open(folder)) if f.name and not f.name.temporary]
    damaged: dict[str, str] = {}
    nbytes = 0
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for item in bar.track(published, description="checking"):
            assert item.name is not None  # noqa: S101 - chosen above
            try:
                check(item.path, item.name)
            except FileNotFoundError:
                continue
            except (FormatError, OSError, ValueError) as error:
                damaged[item.path.name] = str(error)
            nbytes += item.nbytes
    table = Table(title=f"{folder}: {len(published)} files, {nbytes:,} bytes checked")
    table.add_column("damaged file" if damaged else "nothing is damaged")
    table.add_column("why" if damaged else "")
    for name, why in damaged.items():
        table.add_row(name, why)
    data = {"checked": len(published), "bytes": nbytes, "damaged": damaged}
    show(data, table, as_json=as_json)
    if damaged:
        raise typer.Exit(1)


@store.command()
def stats(folder: Folder, *, as_json: AsJson = False) -> None:
    """Count files and bytes by what they are: pages, values, leftovers of a crash.

    Exit 0, or 2 if the folder cannot be read.
    """
    root = _open(folder)
    with one_line():
        found = list(find(root))
    files: Counter[str] = Counter()
    allocated: Counter[str] = Counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for item in bar.track(found, description="counting"):
            files[item.state] += 1
            allocated[item.state] += item.allocated
    aside = [path.lstat().st_blocks * 512 for path in root.joinpath("aside").glob("*")]
    files["set aside"], allocated["set aside"] = len(aside), sum(aside)
    writers = len(live_writers(root))
    table = Table(title=f"{folder}: {writers} live writers")
    for heading in ("what", "files", "bytes"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, count in sorted(files.items()):
        table.add_row(what, f"{count:,}", f"{allocated[what]:,}")
    data = {"writers": writers, "files": dict(files), "allocated": dict(allocated)}
    show(data, table, as_json=as_json)
