"""The event loop an engine runs on: how any thread gets a callback onto it.

The reaper is such a callback and not a task, so nothing can cancel it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Protocol, final

from anyio.lowlevel import current_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.lowlevel import TrioToken


class Loop(Protocol):
    """A loop that is running, was running, or is gone."""

    def post(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop soon; from any thread; does nothing when the loop is gone."""
        ...

    def here(self) -> bool:
        """Whether the caller runs on this loop."""
        ...

    def gone(self) -> bool:
        """Whether no callback will ever run on it again, as far as can be known."""
        ...

    def time(self) -> float:
        """The loop's clock, in seconds."""
        ...


@final
class AsyncioLoop:
    """A running asyncio or uvloop loop."""

    __slots__ = ("_loop", "_thread")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def post(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop soon."""
        try:
            if threading.get_ident() == self._thread:
                self._loop.call_soon(callback)
            else:
                self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop is closed. What was to be reported stays in its queue for `close_sync`.
            return

    def here(self) -> bool:
        """Whether the caller runs on this loop."""
        return threading.get_ident() == self._thread and asyncio._get_running_loop() is self._loop

    def gone(self) -> bool:
        """Whether the loop is closed or stopped."""
        return self._loop.is_closed() or not self._loop.is_running()

    def time(self) -> float:
        """The loop's clock."""
        return self._loop.time()


@final
class TrioLoop:
    """A running trio loop."""

    __slots__ = ("_clock", "_thread", "_token")

    def __init__(self) -> None:
        import trio  # noqa: PLC0415 - only there when the program runs on trio

        self._token: TrioToken = trio.lowlevel.current_trio_token()
        self._clock = trio.lowlevel.current_clock()
        self._thread = threading.get_ident()

    def post(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop soon."""
        trio = sys.modules["trio"]
        try:
            self._token.run_sync_soon(callback)
        except trio.RunFinishedError:
            # As for a closed asyncio loop.
            return

    def here(self) -> bool:
        """Whether the caller runs on this loop."""
        trio = sys.modules["trio"]
        if threading.get_ident() != self._thread:
            return False
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    def gone(self) -> bool:
        """Whether the run is over."""
        trio = sys.modules["trio"]
        try:
            self._token.run_sync_soon(_nothing)
        except trio.RunFinishedError:
            return True
        return False

    def time(self) -> float:
        """The run's clock, which a test may let jump."""
        return self._clock.current_time()


def _nothing() -> None:
    """Posted to learn whether a loop still takes callbacks."""


def current_loop() -> Loop:
    """The loop that the caller runs on.

    Raises:
        RuntimeError: the caller runs on no loop.
    """
    native = current_token().native_token
    return AsyncioLoop() if isinstance(native, asyncio.AbstractEventLoop) else TrioLoop()
