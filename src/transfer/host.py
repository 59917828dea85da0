"""HostDevice: copies between blocks of host memory, and callables, on its own worker threads."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Final, final

import numpy as np

from transfer._errors import WrongDevice
from transfer._fence import Fence
from transfer._handle import Block
from transfer._work import Copy, External, Launch
from transfer._workers import Job, WorkerDevice

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from transfer._extent import Int64Array
    from transfer._handle import Handle
    from transfer._memory import Pool
    from transfer._work import Route, Work
    from transfer._workers import Part

    Row = tuple[int, int, int]

INLINE_BYTES_MAX: Final = 16 << 10
"""Bytes up to which a copy is done on the calling thread by default: below what a thread costs."""

SPLIT_BYTES: Final = 1 << 20
"""Bytes that a part of a split copy has at least by default."""

_INLINE_ROWS_MAX: Final = 64
_PART_BYTES_MAX: Final = 4 << 20  # more would leave one worker alone at the end of a large copy
_BRIEF_BYTES: Final = 4 << 20  # copied within about a millisecond
_GRID_BLOCKS_MIN: Final = 8
_GRID_RUN_MAX: Final = 64 << 10
_GRID_BYTES: Final = 1 << 20  # scattered blocks pass through a buffer of this size, kept in cache
_RELEASE_BYTES: Final = 16 << 10

_release_lock = ctypes.memmove
# Gives up the interpreter lock during the copy. Getting it back from a busy loop takes up to the
# switch interval of 5 ms, so short runs are copied without letting go of it.
_keep_lock = ctypes.PyDLL(None).memmove
_keep_lock.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_keep_lock.restype = None

_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE: Final = 0x200  # PyBUF_WRITE


@final
class HostDevice(WorkerDevice):
    """Copies host memory and runs `Launch` callables.

    Args:
        threads: worker threads; as many as there are processors for us, at most 4, when None.
        inline_bytes_max: copies of at most so many bytes are done at once by `enqueue`, since
            handing them to a thread takes longer; 0 for none but those of no bytes.
        split_bytes: a large copy is divided among idle workers in parts of at least so many bytes.
        name: for messages, statistics and thread names.

    Raises:
        ValueError: a number that is not positive.
    """

    routes: frozenset[Route] = frozenset(
        {(Copy, "host", "host"), (Launch, "host"), (External, "host")}
    )

    def __init__(
        self,
        *,
        threads: int | None = None,
        inline_bytes_max: int = INLINE_BYTES_MAX,
        split_bytes: int = SPLIT_BYTES,
        name: str = "host",
    ) -> None:
        super().__init__(name, min(4, len(os.sched_getaffinity(0))) if threads is None else threads)
        if inline_bytes_max < 0 or split_bytes < 1:
            raise ValueError(
                f"{name}: inline_bytes_max {inline_bytes_max}, expected not < 0; "
                f"split_bytes {split_bytes}, expected at least 1"
            )
        self.inline_bytes_max = inline_bytes_max
        self.split_bytes = split_bytes

    def check(self, work: Work) -> None:
        """Refuse other devices' work, and streams, which the host has not.

        Raises:
            WrongDevice: says what was found and what is expected.
        """
        self.check_route(work)
        if isinstance(work, Launch) and work.stream is not None:
            raise WrongDevice(f"{self.name} has no streams, expected None; found {work.stream!r}")

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Post work; never blocks.

        Raises:
            SubmitError: the device is not started; nothing was posted.
            ForkDetected: it was started in another process; nothing was posted.
        """
        del waits  # `can_wait` is never true
        workers = self.ready()
        fence = Fence()
        if isinstance(work, Launch):
            workers.put(Job(fence, work, (work.fn,)))
        elif isinstance(work, Copy):
            nbytes = work.nbytes
            if self._inline(work, nbytes):
                _copy_inline(work)
                self.completions.post(fence)
            else:
                hands = max(min(workers.idle, nbytes // self.split_bytes), 1)
                parts = _parts(work, nbytes, hands, self.split_bytes)
                workers.put(Job(fence, work, parts, brief=nbytes <= _BRIEF_BYTES), hands=hands)
        return fence

    def instant(self, work: Work) -> bool:
        """Do a small copy now, on the calling thread."""
        if not isinstance(work, Copy) or not self._inline(work, work.nbytes):
            return False
        _copy_inline(work)
        return True

    def _inline(self, work: Copy, nbytes: int) -> bool:
        rows = len(work.runs.rows) * len(work.src)
        return nbytes <= self.inline_bytes_max and rows <= _INLINE_ROWS_MAX

    def finish(self, fence: Fence, stream: object | None) -> None:
        """Signal the fence of an `External`: the host program says that it is done.

        Raises:
            TypeError: a stream was given; the host has none.
        """
        if stream is not None:
            raise TypeError(f"{self!r} has no streams, got {stream!r}")
        self.completions.post(fence)


def _parts(work: Copy, nbytes: int, hands: int, least: int) -> list[Part]:
    """Divide a copy so that `hands` workers end at about the same time."""
    blocks = len(work.src)
    if hands == 1:
        return [functools.partial(_copy_blocks, work, 0, blocks)]
    grain = max(least, min(_PART_BYTES_MAX, nbytes // (4 * hands)))
    step = grain // (nbytes // blocks)
    if step:
        return [
            functools.partial(_copy_blocks, work, start, min(start + step, blocks))
            for start in range(0, blocks, step)
        ]
    return [functools.partial(_copy_rows, rows) for rows in _grouped(_rows(work), grain)]


def _rows(work: Copy) -> Iterator[Row]:
    """Absolute (destination, source, bytes) of every run of every block."""
    src, dst = work.src.pool, work.dst.pool
    for source, target in zip(work.src.ids, work.dst.ids, strict=True):
        for src_plane, src_offset, dst_plane, dst_offset, run in work.runs.rows:
            yield (
                dst.address(dst_plane, int(target)) + dst_offset,
                src.address(src_plane, int(source)) + src_offset,
                run,
            )


def _copy_inline(work: Copy) -> None:
    """A small copy on the calling thread; the commonest kind, one run of one block, in one call."""
    source, target, rows = work.src, work.dst, work.runs.rows
    if len(rows) == 1 and isinstance(source, Block) and isinstance(target, Block):
        src_plane, src_offset, dst_plane, dst_offset, run = rows[0]
        _keep_lock(
            target.pool.address(dst_plane, target.id) + dst_offset,
            source.pool.address(src_plane, source.id) + src_offset,
            run,
        )
        return
    for dst, src, run in _rows(work):
        _keep_lock(dst, src, run)


def _grouped(rows: Iterable[Row], grain: int) -> Iterator[list[Row]]:
    """Rows in groups of at most `grain` bytes; longer rows are cut."""
    group: list[Row] = []
    room = grain
    for row in rows:
        dst, src, left = row
        while left:
            run = min(left, room)
            group.append((dst, src, run))
            dst, src, left, room = dst + run, src + run, left - run, room - run
            if not room:
                yield group
                group, room = [], grain
    if group:
        yield group


def _copy_rows(rows: Iterable[Row]) -> None:
    for dst, src, run in rows:
        (_release_lock if run >= _RELEASE_BYTES else _keep_lock)(dst, src, run)


def _copy_blocks(work: Copy, start: int, stop: int) -> None:
    """Copy blocks `start` to `stop` of a batch, run by run."""
    sources, targets = _ids(work.src, start, stop), _ids(work.dst, start, stop)
    src, dst = work.src.pool, work.dst.pool
    for src_plane, src_offset, dst_plane, dst_offset, run in work.runs.rows:
        if len(sources) >= _GRID_BLOCKS_MIN and run < _GRID_RUN_MAX:
            grids = _grid(dst, dst_plane, dst_offset, run), _grid(src, src_plane, src_offset, run)
            _copy_grid(*grids, targets, sources, _GRID_BYTES // run)
        else:
            ends = (dst.addresses(dst_plane, targets) + dst_offset).tolist()
            starts = (src.addresses(src_plane, sources) + src_offset).tolist()
            _copy_rows((a, b, run) for a, b in zip(ends, starts, strict=True))


def _ids(handle: Handle, start: int, stop: int) -> Int64Array:
    if isinstance(handle, Block):
        return np.array(handle.ids, dtype=np.int64)
    return handle.ids[start:stop]


def _grid(pool: Pool, plane: int, offset: int, run: int) -> npt.NDArray[np.uint8]:
    """One run of every block of a pool, without a copy; uint8, shape (blocks, run)."""
    where = pool.storage.planes[plane]
    size = (pool.blocks - 1) * where.stride + run
    memory = _memory_at(where.address + offset, size, _WRITABLE)
    return np.ndarray((pool.blocks, run), np.uint8, buffer=memory, strides=(where.stride, 1))


def _copy_grid(
    dst: npt.NDArray[np.uint8],
    src: npt.NDArray[np.uint8],
    targets: Int64Array,
    sources: Int64Array,
    step: int,
) -> None:
    """Copy rows of one grid to rows of another; numpy gives up the interpreter lock meanwhile."""
    target, source = _range(targets), _range(sources)
    if target is not None and source is not None:
        dst[target] = src[source]
        return
    for start in range(0, len(targets), step):
        part = slice(start, start + step)
        dst[targets[part]] = src[sources[part]]


def _range(ids: Int64Array) -> slice | None:
    """The slice that selects `ids`, if they are consecutive."""
    first, last = int(ids[0]), int(ids[-1])
    if last - first != len(ids) - 1 or bool((np.diff(ids) != 1).any()):
        return None
    return slice(first, last + 1)
