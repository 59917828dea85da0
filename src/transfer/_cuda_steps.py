"""How each way of a copy is posted on a lane, step by step.

A step queues a bounded number of commands and gives that number. Steps of one job are never mixed
with those of another one of the same lane, so the staging areas are used in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from transfer._cuda_api import CudaError
from transfer._cuda_lane import FEW
from transfer._staging import CopyPipeline, Uploaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transfer._cuda_job import Job
    from transfer._cuda_lane import Lane
    from transfer._pieces import Moves, Pieces
    from transfer._staging import Pipeline

SHORT: Final = 64 << 20
"""Bytes up to which kernels read their tables in host memory: a copy of them costs more."""
SINGLES: Final = 64
"""Pieces that a step copies one by one."""
FRAGMENTS: Final = 2048
"""Fragments that are worked out at once."""
BATCH: Final = 512
"""Pieces of one batched call."""


class Launcher(Protocol):
    """Starts a kernel on a stream."""

    def __call__(self, stream: Any, units: int, program: Any, items: int, *args: int) -> None:
        """See `kernels.Programs.launch`; raises `CudaError`."""
        ...


class Tools(NamedTuple):
    """What the steps need of the device.

    Attributes:
        launch: starts a kernel.
        units: multiprocessors that a kernel may use.
        burst: as many for the chunk that nothing overlaps.
        mapped: whether kernels reach page-locked memory.
    """

    launch: Launcher
    units: int
    burst: int
    mapped: bool


def whole(job: Job, steps: Iterator[int]) -> Iterator[int]:
    """`steps`, and a word when they have really come to their end."""
    yield from steps
    job.whole = True


def chunks(blocks: int, step: int, area: int, ramp: int, *, outward: bool) -> list[int]:
    """Blocks of each chunk: small where nothing overlaps, doubling to what a staging area holds."""
    most = max(1, area // step)
    size = max(1, min(most, ramp // step))
    sizes = []
    left = blocks
    while left:
        sizes.append(min(size, left))
        left -= sizes[-1]
        size = min(most, size * 2)
    return sizes if outward else sizes[::-1]


def portion(pipe: Pipeline, lane: Lane) -> int:
    """Blocks whose tables fit a scratch buffer; below 1 when kernels cannot be used."""
    return (lane.scratch_words - pipe.fixed_words) // pipe.block_words


def _starter(tools: Tools, job: Job, stream: Any, units: int) -> Callable[..., None]:
    def run(program: Any, items: int, *args: int) -> None:
        try:
            tools.launch(stream, units, program, items, *args)
        except RuntimeError as error:
            # Triton's launcher has no class and no number for what the driver answered.
            raise CudaError(1, "cuLaunchKernelEx", str(error)) from error
        job.touched = True

    return run


def singles(lane: Lane, job: Job, pipe: CopyPipeline) -> Iterator[int]:
    """One driver copy for each fragment."""
    entered = lane.enter(job, lane.moves)
    if pipe.blocks * pipe.runs <= SINGLES:
        few = pipe.single_pieces()
        for target, source, size in few:
            lane.driver.copy(target, source, size, lane.moves)
            job.touched = True
        yield entered + len(few)
        yield from _end_on_kernels(lane)
        return
    for pieces in _fragments(pipe):
        for start in range(0, len(pieces.nbytes), SINGLES):
            part = slice(start, start + SINGLES)
            dst, src, nbytes = (column[part].tolist() for column in pieces)
            for target, source, size in zip(dst, src, nbytes, strict=True):
                lane.driver.copy(target, source, size, lane.moves)
                job.touched = True
            yield entered + len(nbytes)
            entered = 0
    yield from _end_on_kernels(lane)


def move(lane: Lane, job: Job, moves: Moves, stream: Any) -> int:
    """Queue moves on a stream of moves; how many commands that took."""
    driver = lane.driver
    for piece in moves.few:
        driver.copy(*piece, stream)
        job.touched = True
    for rows in moves.rows:
        driver.copy_rows(rows, stream)
        job.touched = True
    taken = len(moves.few) + len(moves.rows)
    return taken if moves.many is None else taken + _many(lane, job, moves.many, stream)


def _many(lane: Lane, job: Job, pieces: Pieces, stream: Any) -> int:
    dst, src, nbytes = pieces
    count = len(nbytes)
    if count <= FEW:
        for piece in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            lane.driver.copy(*piece, stream)
            job.touched = True
        return count
    for start in range(0, count, BATCH):
        part = slice(start, start + BATCH)
        # Said before: what a failing batch has posted is not known.
        job.touched = True
        lane.driver.copy_batch(dst[part], src[part], nbytes[part], stream)
    return -(-count // 8)


def batches(lane: Lane, job: Job, pipe: CopyPipeline) -> Iterator[int]:
    """Batched driver copies of fragments."""
    entered = lane.enter(job, lane.moves)
    for pieces in _fragments(pipe):
        yield entered + _many(lane, job, pieces, lane.moves)
        entered = 0
    yield from _end_on_kernels(lane)


def _fragments(pipe: CopyPipeline) -> Iterator[Pieces]:
    count = max(1, FRAGMENTS // max(1, pipe.runs))
    for first in range(0, pipe.blocks, count):
        yield pipe.fragments(first, min(count, pipe.blocks - first))


def _end_on_kernels(lane: Lane) -> Iterator[int]:
    """Where jobs end on the stream of kernels, put it behind the moves."""
    if not lane.ends_with_moves:
        yield lane.join_moves()


def staged_out(lane: Lane, job: Job, pipe: Pipeline, tools: Tools) -> Iterator[int]:
    """Kernels gather chunks into staging; the DMA engine moves the one before meanwhile.

    On a lane at rest, the first chunk is written by a kernel to the slots themselves, from the
    stream of moves: the link works while the second one is gathered.
    """
    entered = lane.enter(job, lane.kernels)
    most = portion(pipe, lane)
    sizes = chunks(pipe.blocks, pipe.step, lane.area, lane.pace.ramp, outward=True)
    first = 0
    loaded = Uploaded(0, 0, 0)
    units = tools.burst
    if tools.mapped and pipe.direct and lane.resting and len(sizes) > 1 and sizes[0] <= most:
        first = sizes.pop(0)
        entered += lane.enter(job, lane.moves)
        tables = Uploaded(lane.show(pipe, 0, first), 0, first)
        pipe.launch(_starter(tools, job, lane.moves, tools.units), tables, 0, 0, first)
        lane.count(first * pipe.step)
        yield entered + 1
        entered, units = 0, tools.units
    pitched, number = lane.pace.pitched, 0
    for count in sizes:
        for part in _parts(first, count, most):
            if part[0] + part[1] > loaded.first + loaded.blocks:
                loaded = _upload(lane, pipe, part[0], min(most, pipe.blocks - part[0]), staged=True)
            slot = lane.next_slot(lane.kernels)
            run = _starter(tools, job, lane.kernels, units)
            pipe.launch(run, loaded, slot.address, *part)
            stream, number = lane.mover(number), number + 1
            lane.driver.record(slot.filled, lane.kernels)
            lane.driver.wait(stream, slot.filled)
            moved = move(lane, job, pipe.moves(slot.address, *part, pitched=pitched), stream)
            lane.release(slot, stream)
            lane.count(part[1] * pipe.step)
            yield entered + moved + 6
            entered, units = 0, tools.units
        first += count


def staged_in(lane: Lane, job: Job, pipe: Pipeline, tools: Tools) -> Iterator[int]:
    """The DMA engine fills staging; kernels scatter the chunk before meanwhile."""
    most = portion(pipe, lane)
    first = entered = 0
    loaded = Uploaded(0, 0, 0)
    pitched, number = lane.pace.pitched, 0
    for count in chunks(pipe.blocks, pipe.step, lane.area, lane.pace.ramp, outward=False):
        for part in _parts(first, count, most):
            stream = lane.mover(number)
            if number < lane.pace.movers:
                entered += lane.enter(job, stream)
            number += 1
            slot = lane.next_slot(stream)
            moved = move(lane, job, pipe.moves(slot.address, *part, pitched=pitched), stream)
            # Behind the first move: the link works while the tables are made.
            if part[0] + part[1] > loaded.first + loaded.blocks:
                loaded = _upload(lane, pipe, part[0], min(most, pipe.blocks - part[0]), staged=True)
            lane.driver.record(slot.filled, stream)
            lane.driver.wait(lane.kernels, slot.filled)
            last = part[0] + part[1] == pipe.blocks
            units = tools.burst if last else tools.units
            pipe.launch(_starter(tools, job, lane.kernels, units), loaded, slot.address, *part)
            lane.release(slot, lane.kernels)
            lane.count(part[1] * pipe.step)
            yield entered + moved + 6
            entered = 0
        first += count


def direct(lane: Lane, job: Job, pipe: Pipeline, tools: Tools) -> Iterator[int]:
    """Kernels that read and write the blocks themselves, page-locked memory among them."""
    entered = lane.enter(job, lane.kernels)
    # A lane with no staging areas works inside the GPU, where host memory would be the slowest part.
    shown = tools.mapped and lane.area > 0 and pipe.nbytes <= SHORT
    for first, count in _parts(0, pipe.blocks, portion(pipe, lane)):
        if shown:
            loaded = Uploaded(lane.show(pipe, first, count), first, count)
        else:
            loaded = _upload(lane, pipe, first, count, staged=False)
        run = _starter(tools, job, lane.kernels, tools.units)
        pipe.launch(run, loaded, 0, first, count)
        # After each part: a mark in between has to cover the tables that it gives back.
        joined = lane.join_kernels() if lane.ends_with_moves else 0
        yield entered + 2 + joined
        entered = 0


def _parts(first: int, count: int, most: int) -> list[tuple[int, int]]:
    return [(at, min(most, first + count - at)) for at in range(first, first + count, most)]


def _upload(lane: Lane, pipe: Pipeline, first: int, count: int, *, staged: bool) -> Uploaded:
    return Uploaded(lane.borrow(pipe, first, count, staged=staged), first, count)
