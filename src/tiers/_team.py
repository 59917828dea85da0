"""Threads that share one job, and the memory they work in.

The caller of `Team.run` works too, and returns only when every thread has: nothing of the job is
left running behind it, whichever task failed.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

S = TypeVar("S")
T = TypeVar("T")


@final
class Workspace:
    """One thread's memory, kept from job to job."""

    def __init__(self) -> None:
        self._kept: dict[type, object] = {}

    def of(self, kind: type[S]) -> S:
        """The workspace's only instance of `kind`, made without arguments when first asked for."""
        known = self._kept.get(kind)
        if not isinstance(known, kind):
            known = self._kept[kind] = kind()
        return known


@final
class Borrowed:
    """A workspace taken from those that are idle, and put back at the end of the block."""

    __slots__ = ("_idle", "_space")

    def __init__(self, idle: list[Workspace]) -> None:
        self._idle = idle
        try:
            self._space = idle.pop()
        except IndexError:  # asked for, not looked at first: another thread may take the last one
            self._space = Workspace()

    def __enter__(self) -> Workspace:
        return self._space

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._idle.append(self._space)


@final
class Team:
    """Up to `threads` threads, the caller's among them.

    Args:
        threads: how many work on one job; with 1 no thread is started.

    Raises:
        ValueError: fewer than 1.
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads: found {threads}, expected at least 1")
        self.threads = threads
        self._idle: list[Workspace] = []
        self._helpers: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def workspace(self) -> Borrowed:
        """A workspace that no other thread has, for the length of a ``with`` block."""
        return Borrowed(self._idle)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run every task and give their results in order.

        Raises:
            Exception: that of the first task that failed, once all have ended.
        """
        if self.threads == 1 or len(tasks) < 2:
            return [task() for task in tasks]
        futures: list[Future[T]] = []
        try:
            futures += [self._executor().submit(task) for task in tasks[1:]]
            first = tasks[0]()
        finally:
            try:
                wait(futures)
            finally:
                wait(futures)  # an interrupt of the first wait does not leave work behind either
        return [first, *(future.result() for future in futures)]

    def _executor(self) -> ThreadPoolExecutor:
        """The helpers; new ones in a forked child, where the parent's do not exist."""
        with self._lock:
            if self._helpers is None or self._process != os.getpid():
                self._process = os.getpid()
                self._helpers = ThreadPoolExecutor(self.threads - 1, "kvhold-codec")
            return self._helpers

    def close(self) -> None:
        """End the helpers; the team can be used again."""
        helpers, self._helpers = self._helpers, None
        if helpers is not None and self._process == os.getpid():
            helpers.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
