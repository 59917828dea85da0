"""The process, thread and loop that an engine lives in."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from transfer._errors import EngineClosed, ForkDetected, WrongThread
from transfer._loop import current_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transfer._loop import Loop


@final
class Home:
    """Where an engine was started, if it is.

    Attributes:
        loop: the loop, None while the engine is not started.
    """

    __slots__ = ("_closing", "_name", "_pid", "loop")

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._closing = threading.RLock()
        self.loop: Loop | None = None

    @property
    def ours(self) -> bool:
        """Whether the engine is started, and in this process."""
        return self.loop is not None and self._pid == os.getpid()

    def bind(self) -> Loop:
        """Settle on the running loop.

        Raises:
            EngineClosed: the engine is already started.
            ForkDetected: it was started in another process.
            RuntimeError: the caller runs on no loop.
        """
        self.check_process()
        if self.loop is not None:
            raise EngineClosed(f"{self._name} is already started; expected it closed")
        loop = current_loop()
        self._pid = os.getpid()
        self.loop = loop  # last: it says that the engine is started
        return loop

    def check(self) -> Loop:
        """Refuse a call from anywhere else.

        Raises:
            EngineClosed: the engine is not started.
            ForkDetected: it was started in another process.
            WrongThread: it belongs to another thread's loop, or to one that is gone.
        """
        loop = self.loop
        if loop is None:
            raise EngineClosed(f"{self._name} is not started")
        self.check_process()
        if not loop.here():
            raise WrongThread(
                f"{self._name} belongs to another thread's loop, or to a loop that is gone; use "
                f"EngineThread from other threads, close_sync() when the loop is gone"
            )
        return loop

    def check_process(self) -> None:
        """Refuse a started engine in any process but its own.

        Raises:
            ForkDetected: it was started in another process.
        """
        if self.loop is not None and self._pid != os.getpid():
            raise ForkDetected(
                f"{self._name} was started in process {self._pid}, this is {os.getpid()}: its "
                f"threads did not survive the fork; start workers with spawn, or start the engine "
                f"in them"
            )

    @contextmanager
    def after_loop(self) -> Iterator[None]:
        """What happens once the loop is gone: from any thread, one at a time.

        Raises:
            EngineClosed: the loop still runs.
            ForkDetected: the engine was started in another process.
        """
        self.check_process()
        with self._closing:
            if self.loop is not None and not self.loop.gone():
                raise EngineClosed(
                    f"the loop of {self._name} still runs; expected `await aclose()` there"
                )
            yield

    def warn_unclosed(self) -> None:
        """Name the missing close of an engine that is gone, or of one left at exit."""
        if self.ours:
            warnings.warn(
                f"{self._name} was never closed: leave `async with`, or call aclose() or "
                f"close_sync()",
                ResourceWarning,
                stacklevel=1,
            )
