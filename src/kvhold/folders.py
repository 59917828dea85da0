"""Folders of a command: what it makes it removes, and what was there before stays."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvhold._errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

TIER: Final = frozenset({"lock", "writers", "data", "aside"})
"""What a disk tier keeps in its folder."""


@contextmanager
def made(folder: Path) -> Iterator[Path]:
    """A folder, made if it is not there; if it is empty at the end, what was made goes again.

    Raises:
        OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty: then it is of use, and so are the others
            for path in missing:
                path.rmdir()


@contextmanager
def scratch(folder: Path, name: str) -> Iterator[Path]:
    """A folder of one's own inside another, for as long as the block lasts.

    Args:
        folder: made if it is not there, and removed again then.
        name: how the new folder's name begins.

    Raises:
        OSError: it cannot be made.
    """
    with made(folder):
        place = Path(tempfile.mkdtemp(prefix=f"kvhold-{name}-", dir=folder))
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def check_own(folder: Path) -> None:
    """See to it that a folder which will be removed has nothing but a disk tier's files.

    Raises:
        UserError: it is somebody's.
        OSError: it cannot be looked into.
    """
    if not folder.exists():
        return
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in TIER)
    if strangers:
        raise UserError(f"{folder} has {strangers[0]}, which is not kvhold's: take another folder")
