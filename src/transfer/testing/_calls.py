"""FaultyCalls: the system calls of a `FileDevice`, with the faults of a plan and a gate."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

from transfer._syscalls import SystemCalls
from transfer.testing._plan import Fault, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_ERRORS = {Fault.EINTR: errno.EINTR, Fault.ENOSPC: errno.ENOSPC, Fault.EIO: errno.EIO}


class Gate:
    """Something that worker threads pass only while it is open; open at first."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        """Hold whoever comes from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let everyone through."""
        self._open.set()

    def wait(self) -> None:
        """Pass, once it is open."""
        self._open.wait()


class FaultyCalls(SystemCalls):
    """System calls that fail as a plan says; give it to ``FileDevice(calls=...)``.

    Every call but ``close`` has a number, from 0. A count that is cut short is 1 byte, half, or
    all but 1. A call that the fault does not fit (a short ``fsync``) passes.

    Args:
        plan: which call meets which fault.
        gate: what reads and writes pass through.

    Attributes:
        injected: how often each fault struck.
        calls: how many numbered calls were made.
    """

    def __init__(self, plan: FaultPlan, *, gate: Gate | None = None) -> None:
        self.plan = plan
        self.gate = gate or Gate()
        self.injected: Counter[Fault] = Counter()
        self.calls = 0
        self._numbers = itertools.count()

    def _pass(self, what: str, *, counted: bool = False) -> tuple[Fault | None, int]:
        """Take a number and raise what the plan says; a fault of a count is given back."""
        number = next(self._numbers)
        self.calls = number + 1
        fault = self.plan.draw(number)
        if fault in _ERRORS and (fault is not Fault.EINTR or counted):
            self.injected[fault] += 1
            code = _ERRORS[fault]
            raise OSError(code, f"{os.strerror(code)} (injected into {what}, call {number})")
        if counted and fault in (Fault.SHORT, Fault.NOTHING):
            self.injected[fault] += 1
            return fault, number
        return None, number

    def _cut(self, what: str, buffers: Sequence[memoryview]) -> list[memoryview] | None:
        """The buffers that the call may use; None to move nothing."""
        self.gate.wait()
        fault, number = self._pass(what, counted=True)
        total = sum(map(len, buffers))
        if fault is Fault.NOTHING:
            return None
        if fault is Fault.SHORT and total > 1:
            room = self.plan.random(number).choice((1, total // 2, total - 1))
            return _first(buffers, room)
        return list(buffers)

    def open(self, path: Path, flags: int, mode: int) -> int:
        """See `SystemCalls`."""
        self._pass("open")
        return super().open(path, flags, mode)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`."""
        chosen = self._cut("preadv", buffers)
        return 0 if chosen is None else super().preadv(fd, chosen, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`."""
        chosen = self._cut("pwritev", buffers)
        return 0 if chosen is None else super().pwritev(fd, chosen, offset)

    def fdatasync(self, fd: int) -> None:
        """See `SystemCalls`."""
        self._pass("fdatasync")
        super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """See `SystemCalls`."""
        self._pass("fsync")
        super().fsync(fd)

    def link(self, path: Path, name: Path) -> None:
        """See `SystemCalls`."""
        self._pass("link")
        super().link(path, name)

    def unlink(self, path: Path) -> None:
        """See `SystemCalls`."""
        self._pass("unlink")
        super().unlink(path)


def _first(buffers: Sequence[memoryview], room: int) -> list[memoryview]:
    chosen = []
    for buffer in buffers:
        if room:
            chosen.append(buffer[:room])
            room -= len(chosen[-1])
    return chosen
