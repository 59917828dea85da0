"""What goes wrong in the demonstration's second half: a bad disk, a slow link, files that vanish."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, final

import anyio

from transfer import HostDevice
from transfer._syscalls import SystemCalls
from transfer.testing import Fault, FaultPlan, FaultyDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from tiers import DiskTier, KVStore
    from transfer._work import Work

FAILED_WRITE: Final = "write failed: no space"
SLOW_READ: Final = "read slowed down"
SLOW_COPY: Final = "copy started late"
LOST_FILE: Final = "value file removed"
DAMAGED_FILE: Final = "value file damaged"
CANCELLED: Final = "fetch cancelled under way"
_TICK: Final = 0.05
_IDLE_TICKS: Final = 10


@final
class ShakyCalls(SystemCalls):
    """A disk of which some writes fail and some reads take long.

    Args:
        failing: numbers of the writes, from 0, that find no space.
        slow_every: each n-th read is slow; 0 for none. May be changed at any time.
        seconds: how long such a read takes.

    Attributes:
        injected: how often each fault struck.
    """

    def __init__(self, failing: Sequence[int], *, slow_every: int, seconds: float) -> None:
        self.failing = frozenset(failing)
        self.slow_every = slow_every
        self.seconds = seconds
        self.injected: Counter[str] = Counter()
        self._writes = itertools.count()
        self._reads = itertools.count(1)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write, unless it is this one's turn to fail."""
        if next(self._writes) in self.failing:
            self.injected[FAILED_WRITE] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, after a while where it is this one's turn to be slow."""
        if self.slow_every and next(self._reads) % self.slow_every == 0:
            self.injected[SLOW_READ] += 1
            time.sleep(self.seconds)
        return super().preadv(fd, buffers, offset)


@final
class SlowLink:
    """Host copies of which some begin late, as those of a link do that others keep busy.

    Late is counted in steps of the model, so that a fast machine sees what a slow one does. While the
    model does nothing, the oldest copy begins after half a second.

    Args:
        seed: which ones.
        rate: how many of them.
        steps: how many steps late they begin.
        clock: steps of the model so far.

    Attributes:
        device: for an engine.
    """

    def __init__(self, seed: int, *, rate: float, steps: int, clock: Callable[[], int]) -> None:
        self._plan = FaultPlan(seed)
        self._rate = rate
        self._steps = steps
        self._clock = clock
        self._due: deque[int] = deque()
        self.device = FaultyDevice(HostDevice(), self._plan, watch=self._struck)

    @property
    def delayed(self) -> int:
        """Copies that were held up."""
        return self.device.injected[Fault.DELAY]

    def _struck(self, fault: Fault, work: Work) -> None:
        del fault, work
        self._due.append(self._clock() + self._steps)

    @asynccontextmanager
    async def slow(self) -> AsyncIterator[None]:
        """Be slow until the end of the block; what is held up by then begins there."""
        self._plan.rates[Fault.DELAY] = self._rate
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._release)
                yield
                group.cancel_scope.cancel()
        finally:
            self._plan.rates.clear()
            self.device.release()

    async def _release(self) -> None:
        last, idle = self._clock(), 0
        while True:
            await anyio.sleep(_TICK)
            now = self._clock()
            idle = idle + 1 if now == last else 0
            last = now
            while self._due and (self._due[0] <= now or idle >= _IDLE_TICKS):
                self._due.popleft()
                self.device.release(1)
                idle = 0


def value_files(store: KVStore, disk: DiskTier) -> list[Path]:
    """The files of all pages of a store, in the order of its index."""
    return [disk.path(entry.disk) for entry in store.entries() if entry.disk is not None]


def lose(path: Path) -> None:
    """Remove a file behind the store's back."""
    path.unlink()


def damage(path: Path) -> None:
    """Turn one bit in the middle of a file behind the store's back."""
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 0x10]))
