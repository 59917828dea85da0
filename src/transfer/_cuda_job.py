"""What a lane works with: a job on its way, a staging area, a buffer for tables."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from transfer._errors import CompletionLost, SubmitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transfer._cuda_watch import CudaFence
    from transfer._extent import Int64Array
    from transfer._staging import Pipeline


@final
@dataclass(frozen=True, slots=True)
class Pace:
    """How a device posts copies. Each of these can be measured against its default.

    Attributes:
        ahead: bytes that are queued of a copy before the call returns; the rest is posted by a
            thread as the GPU gets ahead, and another direction need not wait for it. None for all
            of them: a chain of copies is then one chain on the GPU.
        urgent: whether kernels go on streams of the highest priority, to get their multiprocessors
            at the next boundary of whatever else computes.
        ramp: bytes of the chunk that nothing overlaps, the first one out and the last one in; chunks
            double from there to a whole staging area. Kernels that have to wait for their turn
            beside a model are better few and large.
        movers: streams of DMA copies for each direction, 1 or 2; with two, one chunk's copy need
            not wait for the end of the one before it to be noted.
        pitched: whether slots at even distances are moved by one strided copy.
        bare: whether batches go to the driver's own entry point as arrays, instead of through the
            bindings as lists of objects.
    """

    ahead: int | None = None
    urgent: bool = False
    ramp: int = 2 << 20
    movers: int = 1
    pitched: bool = False
    bare: bool = False

    def __post_init__(self) -> None:
        if self.movers not in {1, 2} or self.ramp < 1 or (self.ahead or 1) < 1 or self.ahead == 0:
            raise ValueError(f"{self!r}: expected 1 or 2 movers, and bytes ahead and to begin with")


class Scratch(NamedTuple):
    """A small buffer that exists on both sides, for what kernels read.

    Attributes:
        host: its address on the host.
        device: its address on the GPU.
        data: the host side, int64.
    """

    host: int
    device: int
    data: Int64Array

    @classmethod
    def at(cls, host: int, device: int, words: int) -> Scratch:
        """A buffer of so many words at two addresses."""
        raw = (ctypes.c_int64 * words).from_address(host)
        return cls(host, device, np.ctypeslib.as_array(raw))

    def fill(self, pipe: Pipeline, first: int, count: int, *, staged: bool) -> int:
        """Write the tables of some blocks to the host side; how many bytes to copy."""
        words = pipe.words(count)
        if words > len(self.data):
            raise SubmitError(f"{words} words of tables for a scratch of {len(self.data)}")
        pipe.fill(self.data, first, count, staged=staged)
        return 8 * words


@final
class Slot:
    """One staging area: `filled` tells the reader, `free` the next writer.

    Attributes:
        used: its reader may still be at work, as far as is known.
        turns: how often it was given to a writer.
    """

    __slots__ = ("address", "filled", "free", "turns", "used")

    def __init__(self, address: int, filled: Any, free: Any) -> None:
        self.address = address
        self.filled = filled
        self.free = free
        self.used = False
        self.turns = 0


@final
class Job:
    """One piece of work on its way onto a lane.

    Attributes:
        fence: signals when it is quiet.
        waits: fences it waits for on the GPU.
        steps: posts a part each time it is asked; gives the number of commands.
        touched: something that touches blocks was posted.
        whole: `steps` came to its end; an interrupt can end a generator early.
        inline: `submit` has not returned yet, so it raises what becomes of the job.
        raised: what a callable raised that was part of it.
        refused, lost: what `submit` raises.
    """

    __slots__ = (
        "fence",
        "inline",
        "lost",
        "raised",
        "refused",
        "steps",
        "touched",
        "waits",
        "whole",
    )

    def __init__(self, fence: CudaFence, waits: Sequence[CudaFence]) -> None:
        self.fence = fence
        self.waits = waits
        self.steps: Iterator[int] = iter(())
        self.touched = False
        self.whole = False
        self.raised: Exception | None = None
        self.inline = True
        self.refused: SubmitError | None = None
        self.lost: CompletionLost | None = None
