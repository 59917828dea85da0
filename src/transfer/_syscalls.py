"""The system calls of file I/O, replaceable for tests, and the loop that short counts need."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import deque
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from transfer._work import FileRead, FileWrite

    Call = Callable[[int, Sequence[memoryview], int], int]

CALL_BYTES_MAX: Final = 1 << 30
"""Bytes asked of one system call; Linux moves at most 2 GiB less one page in one."""

_VECTORS_MAX: Final = os.sysconf("SC_IOV_MAX")


class SystemCalls:
    """The system calls that a `FileDevice` makes; subclass it to make them fail.

    Each raises `OSError` as `os` does.
    """

    def open(self, path: Path, flags: int, mode: int) -> int:
        """A descriptor; O_CLOEXEC is among the flags."""
        return os.open(path, flags, mode)

    def set_direct(self, fd: int, *, on: bool) -> None:
        """Switch direct I/O of an open file; EINVAL where the file system has none.

        Asked of an open file and not of ``open``, which may leave a new file behind when it
        refuses the flag.
        """
        # Our own `open` sets no other flag of those that this call can change.
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT if on else 0)

    def file_system(self, fd: int) -> int:
        """What identifies the file system of an open file."""
        return os.fstat(fd).st_dev

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read; 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """Bring a file's data to the device."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Bring a file or folder and its metadata to the device."""
        os.fsync(fd)

    def link(self, path: Path, name: Path) -> None:
        """Give a file another name; FileExistsError if the name is taken."""
        os.link(path, name)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)


@final
class Transfer:
    """Bytes on their way between an open file and memory; lets go of the memory at the end.

    Attributes:
        fd: the file.
        offset: where in the file the next byte goes.
        left: bytes that have not moved.
    """

    def __init__(self, fd: int, work: FileWrite | FileRead, call: Call) -> None:
        self.fd = fd
        self.offset = work.offset
        self.left = work.nbytes
        self._call = call
        self._views = deque(
            span.block.pool.storage.view(span.address, span.nbytes)
            for span in work.spans
            if span.nbytes
        )

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for view in self._views:
            view.release()

    def step(self) -> None:
        """Make one system call and note how far it came.

        Raises:
            OSError: the system's; ENODATA when it moved nothing, at the end of a file.
        """
        batch = self._batch()
        try:
            moved = self._call(self.fd, batch, self.offset)
        except InterruptedError:
            return
        finally:
            for view in batch:
                view.release()
        if not moved:
            raise OSError(errno.ENODATA, f"no byte moved at {self.offset}, {self.left} are left")
        self.offset += moved
        self.left -= moved
        self._advance(moved)

    def _batch(self) -> list[memoryview]:
        """The memory of the next call: as many spans as one call takes."""
        batch: list[memoryview] = []
        room = CALL_BYTES_MAX
        for view in self._views:
            if not room or len(batch) == _VECTORS_MAX:
                break
            batch.append(view[:room])
            room -= len(batch[-1])
        return batch

    def _advance(self, moved: int) -> None:
        while moved:
            view = self._views.popleft()
            if moved < len(view):
                self._views.appendleft(view[moved:])
            moved -= min(moved, len(view))
            view.release()
