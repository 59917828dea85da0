"""The folder of a disk tier: its names, who writes in it, and what a crash left behind.

Everything here blocks and runs on worker threads. Layout of a folder::

    lock                    held shared or exclusive for as long as a tier has the folder open
    writers/<writer>        flock'd by a live writer; a file without a lock is a dead writer's
    data/<xx>/<key>-<put>.<kind>        published; xx are the first two digits of the key
    data/<xx>/<key>-<put>.<kind>.tmp    being written
    aside/<name>            proved damaged, kept for a look; at most `ASIDE_MAX` of them

A put id starts with its writer's id, so every name says who wrote it, and no name is used twice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, final

from tiers._errors import TierError
from tiers._tier import TierBusy

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["whole", "part"]
WRITER_BYTES: Final = 8
SHARDS: Final = tuple(f"{number:02x}" for number in range(256))
ASIDE_MAX: Final = 16
_NAME: Final = re.compile(r"([0-9a-f]{64})-([0-9a-f]{32})\.(whole|part)(\.tmp)?")
_WRITER: Final = re.compile(r"[0-9a-f]{16}")
_TRIES: Final = 16


class Name(NamedTuple):
    """What the name of a file says.

    Attributes:
        key: 32 bytes.
        put: 16 bytes.
        kind: ``"whole"`` stands on its own; ``"part"`` is of no use without its writer's memory.
        temporary: it was not published.
    """

    key: bytes
    put: bytes
    kind: Kind
    temporary: bool = False

    def __str__(self) -> str:
        tail = ".tmp" if self.temporary else ""
        return f"{self.key.hex()}-{self.put.hex()}.{self.kind}{tail}"

    @property
    def writer(self) -> bytes:
        """8 bytes, who wrote it."""
        return self.put[:WRITER_BYTES]

    @property
    def shard(self) -> str:
        """The folder below ``data``."""
        return self.key[:1].hex()

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """What a file's name says, None if it is not one of ours."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        key, put, kind, tail = found.groups()
        return cls(
            bytes.fromhex(key),
            bytes.fromhex(put),
            "whole" if kind == "whole" else "part",
            tail is not None,
        )


class Found(NamedTuple):
    """A published file that a scan found.

    Attributes:
        name: what it is called.
        nbytes: its length.
        allocated: bytes that the file system has set aside for it.
        written: when it was written, in nanoseconds of the file system's clock.
    """

    name: Name
    nbytes: int
    allocated: int
    written: int = 0


class Scan(NamedTuple):
    """What one shard holds, and what was cleared away.

    Attributes:
        whole: published files of dead writers that stand on their own.
        temporaries: leftovers of dead writers that were removed.
        orphans: parts of dead writers that were removed.
        live_bytes: bytes of files that belong to other live writers, or to nobody known.
    """

    whole: tuple[Found, ...] = ()
    temporaries: int = 0
    orphans: int = 0
    live_bytes: int = 0


def _lock(fd: int, operation: int) -> bool:
    """Take a lock without waiting; False if somebody else has it."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise TierError(f"the file system has no flock: {error}") from error
    return True


def _same_file(fd: int, path: Path) -> bool:
    try:
        here, there = os.fstat(fd), path.stat()
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


@final
class Folder:
    """One writer's view of a folder.

    Args:
        root: the folder; made if it is not there.
        shared: whether other writers may have it open at the same time.

    Attributes:
        writer: 8 bytes, different for every time that a folder was opened.
        block_bytes: bytes in which the file system allocates; set by `open`.
    """

    def __init__(self, root: Path, *, shared: bool) -> None:
        self.root = root
        self.shared = shared
        self._data = str(root / "data")
        self.writer = secrets.token_bytes(WRITER_BYTES)
        self.block_bytes = 4096
        self._fds: list[int] = []
        self._dead: dict[bytes, bool] = {}

    def path(self, name: Name) -> Path:
        """Where a file is."""
        return Path(self.place(name))

    def place(self, name: Name) -> str:
        """The same as text, which costs a tenth: there is one for every read and write."""
        return f"{self._data}/{name.shard}/{name}"

    # Opening and closing

    def open(self) -> None:
        """Make what is missing and take the locks.

        Raises:
            TierBusy: somebody else has the folder, or this view of it is open already.
            TierError: the file system has no flock.
            OSError: the folder cannot be made or opened.
        """
        if self._fds:
            raise TierBusy(
                f"{self.root}: this tier is open already; each store needs one of its own"
            )
        self.make()
        done = False
        try:
            self._take(self.root / "lock", fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX)
            self._announce()
            done = True
        finally:
            if not done:
                self.close()
        stats = os.statvfs(self.root)
        self.block_bytes = max(stats.f_frsize, 512)
        # A lock belongs to the open file: a forked child must not keep a dead writer's alive.
        os.register_at_fork(after_in_child=partial(_forget, weakref.ref(self)))

    def make(self) -> None:
        """Make the folders that are missing, for the owner alone."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in ("writers", "data", "aside"):
            (self.root / part).mkdir(mode=0o700, exist_ok=True)
        for shard in SHARDS:
            (self.root / "data" / shard).mkdir(mode=0o700, exist_ok=True)

    def _take(self, path: Path, operation: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fds.append(fd)
        if not _lock(fd, operation):
            how = "shared" if self.shared else "alone"
            raise TierBusy(f"{self.root}: opened {how}, and another writer has it open")

    def _announce(self) -> None:
        """Lock a file that bears our id; whoever finds it locked knows that we live."""
        for _ in range(_TRIES):
            path = self.root / "writers" / self.writer.hex()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._fds.append(fd)
            # Between the two calls a scan may have taken the file for a dead writer's.
            if _lock(fd, fcntl.LOCK_EX) and _same_file(fd, path):
                return
            self.writer = secrets.token_bytes(WRITER_BYTES)
        raise TierError(f"{self.root}: no file in `writers` could be kept")

    def close(self) -> None:
        """Give the locks back. May be repeated."""
        if self._fds:
            (self.root / "writers" / self.writer.hex()).unlink(missing_ok=True)
        self.drop_locks()

    def drop_locks(self) -> None:
        """Close the locked files of this process; in a forked child the parent keeps its locks."""
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    def repair(self) -> None:
        """Make again what somebody removed under us, our own announcement included."""
        self.make()
        path = self.root / "writers" / self.writer.hex()
        if not any(_same_file(fd, path) for fd in self._fds):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._fds.append(fd)
            _lock(fd, fcntl.LOCK_EX)

    # Looking

    def scan(self, shard: str) -> Scan:
        """Look through one shard and clear away what dead writers left.

        Raises:
            OSError: the folder cannot be read.
        """
        whole: list[Found] = []
        temporaries = orphans = live_bytes = 0
        for path, name, found in self._files(shard):
            if name is None or self.lives(name.writer, other_only=True):
                live_bytes += found.st_blocks * 512
            elif name.writer == self.writer:
                continue  # our own, counted when they were put
            elif name.temporary or name.kind == "part":
                path.unlink(missing_ok=True)
                temporaries += name.temporary
                orphans += not name.temporary
            else:
                nbytes, allocated = found.st_size, found.st_blocks * 512
                whole.append(Found(name, nbytes, allocated, found.st_mtime_ns))
        return Scan(tuple(whole), temporaries, orphans, live_bytes)

    def _files(self, shard: str) -> Iterator[tuple[Path, Name | None, os.stat_result]]:
        folder = self.root / "data" / shard
        for text in sorted(os.listdir(folder)):  # noqa: PTH208 - names, not paths, are parsed
            path = folder / text
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue  # removed by another writer meanwhile
            yield path, Name.parse(text), found

    def lives(self, writer: bytes, *, other_only: bool = False) -> bool:
        """Whether a writer has its lock. What is dead stays dead and is remembered."""
        if writer == self.writer:
            return not other_only
        if self._dead.get(writer):
            return False
        path = self.root / "writers" / writer.hex()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            self._dead[writer] = True
            return False
        try:
            if not _lock(fd, fcntl.LOCK_EX):
                return True
            if _same_file(fd, path):
                path.unlink(missing_ok=True)
            self._dead[writer] = True
            return False
        finally:
            os.close(fd)

    def clear_writers(self) -> int:
        """Remove the announcements of dead writers; how many."""
        names = os.listdir(self.root / "writers")  # noqa: PTH208 - names, not paths, are parsed
        others = [bytes.fromhex(text) for text in names if _WRITER.fullmatch(text)]
        return sum(not self.lives(writer) for writer in others)

    def set_aside(self, name: Name) -> None:
        """Move a damaged file out of the way, and remove the oldest beyond `ASIDE_MAX`."""
        aside = self.root / "aside"
        try:
            self.path(name).rename(aside / str(name))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EMLINK}:
                raise
            self.path(name).unlink(missing_ok=True)
        kept = sorted(aside.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
        for path in kept[:-ASIDE_MAX]:
            path.unlink(missing_ok=True)


def _forget(reference: weakref.ref[Folder]) -> None:
    folder = reference()
    if folder is not None:
        folder.drop_locks()
