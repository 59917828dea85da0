"""What the store is measured against: threads that do nothing but move files, and the codec alone.

The threads make as many new files as the store does, of the same size, by the same direct I/O; they
check nothing, name nothing and publish nothing. Nobody is timed while files are removed, and nobody
pays for it later: see `Retired`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, final

from tiers._form import dense, memory
from tiers._index import Entry
from transfer import BlockLayout, HostPool, Launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from tiers._form import Form
    from transfer import Blocks, Engine

THREADS: Final = 8
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT


@final
class Retired:
    """Files that are of no use any more, empty, until the measurement is over.

    A file system may look at every inode that was deleted in the last seconds when it makes a file
    (ext4 without a journal does, for minutes). Whoever writes next would pay for another's removals;
    here nothing is deleted while anybody is timed.

    Args:
        folder: on the file system of the files; made here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = itertools.count()
        folder.mkdir()

    def keep(self, path: Path) -> None:
        """Give a file another name, under which it outlives its own, and no bytes."""
        name = self._folder / str(next(self._names))
        name.hardlink_to(path)
        os.truncate(name, 0)

    def close(self) -> None:
        """Delete them."""
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()


@final
class Bare:
    """Files of the same number and size, moved by threads that do nothing else.

    Args:
        folder: where.
        nbytes: of each file.
        pages: how many.
        retired: takes the files that were written over with new ones.
    """

    def __init__(self, folder: Path, nbytes: int, pages: int, retired: Retired) -> None:
        self._folder = folder
        self._nbytes = nbytes
        self._pages = pages
        self._retired = retired
        self._run = 0
        self._map = mmap.mmap(-1, nbytes * pages)
        self._bytes = memoryview(self._map)
        self._bytes[:] = b"\x5a" * len(self._bytes)

    def _path(self, number: int) -> Path:
        return self._folder / f"bare-{self._run}-{number}"

    def write(self) -> float:
        """Write as many new files by O_DIRECT; seconds. The last ones go before, untimed."""
        self._retire()
        self._run += 1
        return self._timed(_NEW, os.pwritev)

    def read(self) -> float:
        """Read the files of the last `write` by O_DIRECT; seconds."""
        return self._timed(os.O_RDONLY | os.O_DIRECT, os.preadv)

    def _timed(self, flags: int, call: Callable[[int, Any, int], int]) -> float:
        numbers = itertools.count()
        whole: list[int] = []

        def work() -> None:
            while (number := next(numbers)) < self._pages:
                fd = os.open(self._path(number), flags, 0o600)
                view = self._bytes[number * self._nbytes : (number + 1) * self._nbytes]
                if call(fd, [view], 0) == self._nbytes:
                    whole.append(number)
                os.close(fd)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
        if len(whole) != self._pages:
            raise RuntimeError(f"{len(whole)} of {self._pages} files were moved whole")
        return seconds

    def _retire(self) -> None:
        for path in self._folder.glob("bare-*"):
            self._retired.keep(path)
            path.unlink()

    def close(self) -> None:
        """Give memory and files back."""
        self._bytes.release()
        self._map.close()
        for path in self._folder.glob("bare-*"):
            path.unlink()


@final
class CodecAlone:
    """The codec on the engine's workers, a page at a time, in memory that is kept from run to run.

    Args:
        engine: runs it.
        form: how pages are stored.
        pages: what is encoded, and decoded into.
    """

    def __init__(self, engine: Engine, form: Form, pages: Blocks) -> None:
        self._engine = engine
        self._form = form
        self._entry = Entry(bytes(32), bytes(32), bytes(16), tenant="", depth=0, used=0)
        self._pool = HostPool(BlockLayout.raw(form.file_bytes), len(pages))
        self._lease = self._pool.lease(len(pages))
        places = dense(pages.pool.layout, form.layout, form.inputs) or {}
        self._jobs = [
            (memory(pages.pool, block.id, places, form.layout), form.outputs(blob))
            for block, blob in zip(pages, self._lease.handle, strict=True)
        ]

    async def encode(self) -> float:
        """Encode every page; seconds."""
        return await self._timed(
            [partial(self._form.encode, self._entry, s, i) for s, i in self._jobs]
        )

    async def decode(self) -> float:
        """Check and decode every page that was encoded; seconds."""
        return await self._timed(
            [partial(self._form.decode, self._entry, i, s) for s, i in self._jobs]
        )

    async def _timed(self, steps: list[Callable[[], object]]) -> float:
        begun = time.perf_counter()
        ops = [await self._engine.submit(Launch(step)) for step in steps]
        for op in ops:
            await op.wait()
        return time.perf_counter() - begun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._jobs = []
        self._lease.release()
        self._pool.close()
