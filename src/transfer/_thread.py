"""The engine for programs without an event loop: a loop of its own, on a thread of its own."""

from __future__ import annotations

import threading
from inspect import isawaitable
from typing import TYPE_CHECKING, TypeVar, final, overload

import anyio
import anyio.from_thread

from transfer._errors import EngineClosed, TransferError, WrongThread
from transfer._loop import current_loop
from transfer._routing import UNSET

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Any, Self

    from transfer._engine import Engine
    from transfer._handle import Block, Blocks, Lease
    from transfer._memory import Pool
    from transfer._operation import Operation
    from transfer._work import HandleLike, Work

T = TypeVar("T")


@final
class EngineThread:
    """Runs an `Engine` on a daemon thread; every method may be called from any other thread.

    Use it as ``with EngineThread(engine) as thread``. Leaving drains as the engine does.

    Args:
        engine: an engine that is not started.
        uvloop: run on uvloop where it is installed.
    """

    def __init__(self, engine: Engine, *, uvloop: bool = True) -> None:
        self.engine = engine
        self._uvloop = uvloop
        self._portal: anyio.from_thread.BlockingPortal | None = None
        self._thread: threading.Thread | None = None
        self._leave: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._posting = 0
        self._none_posting: Callable[[], None] = _nothing
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, the loop and the engine.

        Raises:
            EngineClosed: it is already started.
        """
        ready = threading.Event()
        with self._lock:
            if self._thread is not None:
                raise EngineClosed(f"the thread of {self.engine!r} is already started")
            self._error = None
            name = f"kvhold-{self.engine.name}-loop"
            self._thread = threading.Thread(
                target=self._main, args=(ready,), name=name, daemon=True
            )
        self._thread.start()
        ready.wait()
        if self._portal is None:
            self._join()

    def close(self) -> None:
        """Drain and stop; may be repeated. What still runs through `run` after that is cancelled.

        Raises:
            CompletionLost: as `Engine.aclose`.
            ForkDetected: it was started in another process.
        """
        self._check_caller()
        self._leave()
        self._join()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()
            if self._thread is thread:
                self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _main(self, ready: threading.Event) -> None:
        try:
            anyio.run(
                self._serve,
                ready,
                backend="asyncio",
                backend_options={"use_uvloop": self._uvloop},
            )
        except BaseException as error:  # noqa: BLE001 - carried to whoever started or closes it
            self._error = error
        finally:
            self._portal = None
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        self.engine.start()
        leave, quiet, loop = anyio.Event(), anyio.Event(), current_loop()
        self._leave = lambda: loop.post(leave.set)
        self._none_posting = lambda: loop.post(quiet.set)
        async with anyio.from_thread.BlockingPortal() as portal:
            self._portal = portal
            ready.set()
            try:
                try:
                    await leave.wait()
                finally:
                    await self._close_engine()
            finally:
                # The portal outlives the engine: who waits for an operation is told how it ended.
                with self._lock:
                    self._portal = None
                    posting = self._posting
            if posting:
                await quiet.wait()  # who came before gets an answer
            await portal.stop(cancel_remaining=True)

    async def _close_engine(self) -> None:
        try:
            await self.engine.aclose()
        except TransferError as error:
            self._error = error  # out of the portal's task group, which would wrap it

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a plain function on the engine's thread and return what it returns.

        Raises:
            EngineClosed: the thread is not started.
            ForkDetected: it was started in another process.
            WrongThread: called on the engine's own thread, which would wait for itself.
        """
        answer: T = self._answer(function, args)
        return answer

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the engine's loop, e.g. one that drives a store.

        Raises:
            EngineClosed: the thread is not started.
            WrongThread: called on the engine's own thread, which would wait for itself.
            concurrent.futures.CancelledError: the thread was closed meanwhile.
        """
        answer: T = self._answer(function, args)
        return answer

    def _answer(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        answer = self._post(function, args).result()
        if isinstance(answer, _Exit):
            raise answer.error
        return answer

    def _check_caller(self) -> None:
        self.engine._home.check_process()
        if threading.current_thread() is self._thread:
            raise WrongThread(
                f"called on the thread of {self.engine!r} itself; expected another thread, or the "
                f"engine's own methods"
            )

    def _post(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        self._check_caller()
        with self._lock:
            portal = self._portal
            if portal is None:
                raise EngineClosed(f"the thread of {self.engine!r} is not started")
            self._posting += 1
        try:
            return portal.start_task_soon(_call, function, args)  # waits for the loop's next turn
        finally:
            with self._lock:
                self._posting -= 1
                last = self._portal is None and not self._posting
            if last:
                self._none_posting()

    # The engine's verbs

    @overload
    def lease(self, pool: Pool) -> Lease[Block]: ...
    @overload
    def lease(self, pool: Pool, count: int) -> Lease[Blocks]: ...
    def lease(self, pool: Pool, count: int | None = None) -> Lease[Block] | Lease[Blocks]:
        """As `Pool.lease`."""
        return self.call(pool.lease) if count is None else self.call(pool.lease, count)

    def release(self, lease: Lease[Block] | Lease[Blocks]) -> None:
        """As `Lease.release`."""
        self.call(lease.release)

    def submit_nowait(self, work: Work, *, after: object = UNSET, name: str = "") -> Operation:
        """As `Engine.submit_nowait`; what `after` names is recorded before this returns.

        Returns once the operation is posted, or prepared behind a predecessor, or refused: the
        calling thread may queue more work on its stream afterwards, and it will not be waited for.
        """
        return self.call(lambda: self.engine.submit_nowait(work, after=after, name=name))

    def wait(self, op: Operation) -> None:
        """As `Operation.wait`, blocking the calling thread."""
        self.run(self._wait, op)

    @staticmethod
    async def _wait(op: Operation) -> None:
        # Closing cancels what still runs, after it has decided every operation: this ends by itself.
        with anyio.CancelScope(shield=True):
            await op.wait()

    def poll(self, ops: Sequence[Operation]) -> list[Operation]:
        """Those of `ops` that are settled or lost; never blocks on a device."""
        return [op for op in ops if op.decided]

    def cancel(self, op: Operation) -> None:
        """As `Operation.cancel`."""
        self.call(op.cancel)

    def holders(self, handle: HandleLike | None = None) -> list[Operation]:
        """As `Engine.holders`."""
        return self.call(self.engine.holders, handle)


@final
class _Exit:
    """An exit or interrupt that a caller's function raised: it is the caller's, not the loop's."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        answer = function(*args)
        return await answer if isawaitable(answer) else answer
    except (SystemExit, KeyboardInterrupt) as error:
        return _Exit(error)


def _nothing() -> None:
    """Stands for a wake-up before there is a loop."""
