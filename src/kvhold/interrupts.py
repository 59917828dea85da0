"""What Ctrl-C and SIGTERM do to a command.

Before a command has made anything, a signal ends the process at once (`leave_at_once`). While it has
files, threads and locks, a signal must not strike between two steps of their bookkeeping: `Stop` notes
it, cancels what runs on the loop, and reports it as `Interrupted` when all of that is closed. Further
signals do not cut the closing short. Measurements that block run under `as_ctrl_c`, where both signals
are Python's own KeyboardInterrupt, as the async frameworks know it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeVar, final

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from types import FrameType, TracebackType
    from typing import Self

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR: Final = "\x1b[?25h"
_noted: Final[ContextVar[Sequence[int]]] = ContextVar("noted", default=())


class Interrupted(KeyboardInterrupt):
    """A signal ended the work, and everything that it had is closed.

    Args:
        signum: which.
    """

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__()
        self.signum = signum

    def __str__(self) -> str:
        word = "terminated" if self.signum == signal.SIGTERM else "interrupted"
        return f"{word}; nothing is left behind"

    @property
    def code(self) -> int:
        """The exit code that shells know: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let a function handle both signals; not those that whoever started us has us ignore."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = [(number, signal.signal(number, handler)) for number in mine]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, signal.SIG_DFL if old is None else old)


def leave_at_once() -> None:
    """From here on a signal ends the process: for as long as there is nothing to close."""
    _handle(_leave)


def ended(code: int) -> None:
    """From here on a signal changes nothing: the process ends with that code, sooner if one comes."""
    _handle(lambda _signum, _frame: os._exit(code))


def _handle(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    del frame
    error = Interrupted(signum)
    start = f"\r{_SHOW_CURSOR}" if os.isatty(2) else ""  # progress bars hide it
    os.write(2, f"{start}kvhold: {error}\n".encode())
    os._exit(error.code)


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """For measurements that block: a signal raises KeyboardInterrupt where no loop is running.

    On a loop the first one is only noted, since it could strike inside the engine's bookkeeping, and
    a cancelled task may be in the middle of closing and not say so. `check` behind the loop raises
    it, and so does the end of this block. A second one raises at once.

    Raises:
        Interrupted: a signal came.
    """
    seen: list[int] = []

    def arrived(signum: int, frame: FrameType | None) -> None:
        del frame
        seen.append(signum)
        if len(seen) > 1 or not _is_looping():
            raise KeyboardInterrupt

    token = _noted.set(seen)
    try:
        with _handled(arrived):
            yield
    except KeyboardInterrupt as error:
        raise Interrupted(seen[0] if seen else signal.SIGINT) from error
    finally:
        _noted.reset(token)
    if seen:
        raise Interrupted(seen[0])


def check() -> None:
    """Give way to a signal that `as_ctrl_c` has noted; does nothing elsewhere.

    Raises:
        Interrupted: one came.
    """
    seen = _noted.get()
    if seen:
        raise Interrupted(seen[0])


def _is_looping() -> bool:
    """Whether an event loop runs in this thread."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@final
class Stop:
    """From here on there is something to close: a signal asks for that, and waits for it.

    Attributes:
        signum: the signal that came, None if none did.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._cancel: Callable[[], object] | None = None
        self._handling = _handled(self._arrived)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handling.__exit__(None, None, None)
        if self.signum is not None and not isinstance(error, Interrupted):
            raise Interrupted(self.signum) from error

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.signum is not None:
            os.write(2, b"kvhold: stopping: waiting for what is under way\n")
            return
        self.signum = signum
        if self._cancel is not None:
            self._cancel()

    def check(self) -> None:
        """Give way to a signal that came: for work that is done in small steps.

        Raises:
            Interrupted: one did.
        """
        if self.signum is not None:
            raise Interrupted(self.signum)

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function on a loop; a signal cancels it.

        Raises:
            Interrupted: a signal came.
        """

        async def main() -> T:
            with anyio.CancelScope() as scope:
                loop = asyncio.get_running_loop()
                self._cancel = lambda: loop.call_soon_threadsafe(scope.cancel)
                try:
                    self.check()
                    return await function()
                finally:
                    self._cancel = None
            raise Interrupted(self.signum or signal.SIGINT)

        return anyio.run(main)
