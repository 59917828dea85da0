"""What a lane works with: a job on its way, a staging area, a buffer for tables."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple, final

from transfer._errors import CompletionLost, SubmitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transfer._cuda_watch import CudaFence
    from transfer._extent import Int64Array


class Scratch(NamedTuple):
    """A small buffer that exists on both sides, for what kernels read."""

    host: int
    device: int
    words: int

    def fill(self, data: Int64Array) -> int:
        """Write the host side; how many bytes to copy."""
        if len(data) > self.words:
            raise SubmitError(f"{len(data)} words of tables for a scratch of {self.words}")
        ctypes.memmove(self.host, data.ctypes.data, data.nbytes)
        return int(data.nbytes)


@final
class Slot:
    """One staging area: `filled` tells the reader, `free` the next writer."""

    __slots__ = ("address", "filled", "free", "used")

    def __init__(self, address: int, filled: Any, free: Any) -> None:
        self.address = address
        self.filled = filled
        self.free = free
        self.used = False


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
