"""FileDevice: block bytes to and from files, on its own worker threads.

``preadv`` and ``pwritev`` move bytes between a file and the blocks themselves. Where address, length
and offset allow and the file system agrees, direct I/O (O_DIRECT) bypasses the page cache. A file
appears under its final name whole or not at all, and never replaces another.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from transfer._errors import AlignmentError, WrongDevice
from transfer._fence import Fence
from transfer._storage import PAGE
from transfer._syscalls import SystemCalls, Transfer
from transfer._work import FileRead, FileRemove, FileWrite
from transfer._workers import Job, WorkerDevice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from transfer._syscalls import Call
    from transfer._work import Route, Work

__all__ = ["FileDevice", "FileStatistics", "SystemCalls"]

_log = logging.getLogger("kvhold.files")


class FileStatistics(NamedTuple):
    """How files were moved; a snapshot.

    Attributes:
        direct: files moved by direct I/O alone.
        buffered: files moved through the page cache, wholly or in part.
        refused: how many file systems refused direct I/O of aligned bytes.
    """

    direct: int
    buffered: int
    refused: int

    @property
    def mode(self) -> str:
        """``"direct"``, ``"buffered"``, ``"mixed"``, or ``"unused"`` before the first file."""
        if self.direct and self.buffered:
            return "mixed"
        if self.direct or self.buffered:
            return "direct" if self.direct else "buffered"
        return "unused"


@final
class FileDevice(WorkerDevice):
    """Writes, reads and removes files.

    Args:
        threads: worker threads, each doing one file at a time.
        direct: None takes direct I/O where it can be had and the page cache elsewhere; True
            refuses what cannot be direct; False never tries.
        name: for messages, statistics and thread names.
        calls: the system calls.

    Raises:
        ValueError: fewer than one thread.
    """

    routes: frozenset[Route] = frozenset({(FileRead,), (FileWrite,), (FileRemove,)})

    def __init__(
        self,
        *,
        threads: int = 8,
        direct: bool | None = None,
        name: str = "files",
        calls: SystemCalls | None = None,
    ) -> None:
        super().__init__(name, threads)
        self.direct = direct
        self._calls = calls or SystemCalls()
        self._lock = threading.Lock()
        self._direct = 0
        self._buffered = 0
        self._refused: set[int] = set()

    def statistics(self) -> FileStatistics:
        """How files were moved so far."""
        with self._lock:
            return FileStatistics(self._direct, self._buffered, len(self._refused))

    def check(self, work: Work) -> None:
        """Refuse other devices' work, memory that is not the host's, and misaligned direct I/O.

        Raises:
            WrongDevice: the work or its memory belongs elsewhere.
            AlignmentError: ``direct=True``, and an address, length or offset is not a multiple of
                4096 bytes.
        """
        self.check_route(work)
        if isinstance(work, (FileRead, FileWrite)):
            for span in work.spans:
                kind = span.block.pool.kind
                if kind != "host":
                    raise WrongDevice(f"{self.name} moves host memory; {span!r} is {kind} memory")
            found = misaligned(work) if self.direct else None
            if found is not None:
                raise AlignmentError(
                    f"{self.name}: direct I/O of {work.path} expects multiples of {PAGE} bytes; "
                    f"found {found}"
                )

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Post work; never blocks.

        Raises:
            SubmitError: the device is not started; nothing was posted.
            ForkDetected: it was started in another process; nothing was posted.
        """
        del waits  # `can_wait` is never true
        workers = self.ready()
        fence = Fence()
        assert isinstance(work, (FileWrite, FileRead, FileRemove))  # noqa: S101 - `check` did
        workers.put(Job(fence, work, (partial(self._run, work),)))
        return fence

    # On the worker threads

    def _run(self, work: FileWrite | FileRead | FileRemove) -> None:
        """Do one operation; errors name its file."""
        try:
            if isinstance(work, FileWrite):
                self._write(work)
            elif isinstance(work, FileRead):
                self._read(work)
            else:
                self._remove(work)
        except OSError as error:
            if error.filename is None:
                error.filename = str(work.path)
            raise

    def _write(self, work: FileWrite) -> None:
        """Write, sync, publish; when any step fails, no name of ours is left."""
        calls = self._calls
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = calls.open(work.path, flags, 0o600)
        with _Names(calls) as ours:
            ours.paths.append(work.path)
            try:
                self._move(fd, work, calls.pwritev)
                if work.sync == "full":
                    calls.fsync(fd)
                elif work.sync == "data":
                    calls.fdatasync(fd)
            finally:
                calls.close(fd)
            name = work.path
            if work.publish is not None:
                name = work.publish
                calls.link(work.path, name)
                ours.paths.append(name)
                calls.unlink(work.path)
            if work.sync == "full":
                self._sync_folder(name.parent)

    def _sync_folder(self, folder: Path) -> None:
        calls = self._calls
        fd = calls.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
        try:
            calls.fsync(fd)
        finally:
            calls.close(fd)

    def _read(self, work: FileRead) -> None:
        if not work.nbytes:
            return
        fd = self._calls.open(work.path, os.O_RDONLY | os.O_CLOEXEC, 0)
        try:
            self._move(fd, work, self._calls.preadv)
        finally:
            self._calls.close(fd)

    def _remove(self, work: FileRemove) -> None:
        try:
            self._calls.unlink(work.path)
        except FileNotFoundError:
            if not work.missing_ok:
                raise

    def _move(self, fd: int, work: FileWrite | FileRead, call: Call) -> None:
        """Move every byte of every span, by direct I/O as far as it goes."""
        refusal = None
        with Transfer(fd, work, call) as transfer:
            whole = may_direct = self._may_direct(fd, work)
            if may_direct:
                refusal = self._move_direct(transfer)
                whole = not transfer.left
            while transfer.left:
                transfer.step()
        if refusal is not None:
            self._note_refusal(fd, work, refusal)
        with self._lock:
            if whole:
                self._direct += 1
            else:
                self._buffered += 1

    def _may_direct(self, fd: int, work: FileWrite | FileRead) -> bool:
        if self.direct is False or not work.nbytes or misaligned(work) is not None:
            return False
        return not self._refused or self._calls.file_system(fd) not in self._refused

    def _move_direct(self, transfer: Transfer) -> OSError | None:
        """Move bytes directly, until the end or a count that ends between two pages.

        Returns:
            The refusal of the file system, if it has no direct I/O; the rest is for the page cache.
        """
        refusal = None
        try:
            self._calls.set_direct(transfer.fd, on=True)
        except OSError as error:
            return self._refusal(error)
        try:
            while transfer.left and transfer.offset % PAGE == 0:
                transfer.step()
        except OSError as error:
            refusal = self._refusal(error)
        if transfer.left:
            self._calls.set_direct(transfer.fd, on=False)
        return refusal

    def _refusal(self, error: OSError) -> OSError:
        """The error again if it may mean that direct I/O is refused; raises any other."""
        if error.errno != errno.EINVAL or self.direct:
            raise error
        return error

    def _note_refusal(self, fd: int, work: FileWrite | FileRead, error: OSError) -> None:
        """Remember, and say once, what the page cache did and direct I/O would not."""
        system = self._calls.file_system(fd)
        with self._lock:
            is_new = system not in self._refused
            self._refused.add(system)
        if is_new:
            _log.warning(
                "%s: its file system refuses direct I/O (%s); it is used buffered from now on",
                work.path,
                error,
            )


def misaligned(work: FileWrite | FileRead) -> str | None:
    """The first address, length or offset that direct I/O cannot take, in words."""
    if work.offset % PAGE:
        return f"file offset {work.offset}"
    for number, span in enumerate(work.spans):
        if span.address % PAGE or span.nbytes % PAGE:
            return f"span {number} of {span.nbytes} bytes at address {span.address:#x}"
    return None


@final
class _Names:
    """Names made by a write, taken back when it fails.

    Attributes:
        paths: the names, in order.
    """

    def __init__(self, calls: SystemCalls) -> None:
        self.paths: list[Path] = []
        self._calls = calls

    def __enter__(self) -> _Names:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        for path in reversed(self.paths):
            try:
                self._calls.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as second:
                # What went wrong first is the error; the caller has to know of the rest as well.
                error.add_note(f"{path} could not be removed: {second}")
