"""What the store hears of its operations: one call when each has ended, on the loop, in no task.

A callback that the engine runs while it settles an operation must not submit another. So ends are
collected and handled in one loop callback for many; nothing can cancel that.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, final

from transfer._loop import Loop, current_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._engine import Engine
    from transfer._operation import Operation
    from transfer._work import Work

    End = Callable[[Operation], None]

ENDS_AT_ONCE: Final = 256
"""Ends handled in one loop callback, so that other callbacks get their turn."""


@final
class _Watch:
    """Notes that an operation was lost, and that it has settled; each once."""

    __slots__ = ("_end", "_op", "_runner", "lost")

    def __init__(self, runner: Runner, op: Operation, end: End) -> None:
        self._runner = runner
        self._op = op
        self._end: End | None = end
        self.lost = False

    def __call__(self) -> None:
        op, end = self._op, self._end
        if end is None:
            return
        if op.settled:
            self._end = None
            self._runner.ended(op, end, lost=self.lost)
        elif op.decided and not self.lost:
            self.lost = True
            self._runner.lost(op, end)


@final
class Runner:
    """Submits work and hands its end to a function.

    Args:
        engine: runs it.
        idle: called after a batch of ends was handled, to start what they made room for.

    Attributes:
        live: operations that have neither settled nor been lost, as far as was handled.
        stuck: operations whose end cannot be learnt.
    """

    def __init__(self, engine: Engine, idle: Callable[[], None]) -> None:
        self.engine = engine
        self.live = 0
        self.stuck = 0
        self._idle = idle
        self._loop: Loop | None = None
        self._rung = False
        self._watched: set[Operation] = set()
        self._ends: deque[tuple[Operation, End, int, int]] = deque()

    def bind(self) -> None:
        """Settle on the running loop."""
        self._loop = current_loop()

    @property
    def now(self) -> float:
        """The loop's clock in seconds; 0 before `bind`."""
        return 0.0 if self._loop is None else self._loop.time()

    def submit(self, work: Work, end: End, *, after: object = (), name: str = "") -> Operation:
        """Post work without waiting; `end` is called when it settles, and before that if it is lost.

        Raises:
            WouldBlock: the engine has no room.
            TransferError, LeaseError: refused; `end` is not called.
        """
        op = self.engine.submit_nowait(work, after=after, name=name)
        self.watch(op, end)
        return op

    def watch(self, op: Operation, end: End) -> None:
        """Call `end` when an operation settles, and before that if it is lost."""
        self.live += 1
        watch = _Watch(self, op, end)
        op.append(watch)
        watch()

    def ended(self, op: Operation, end: End, *, lost: bool) -> None:
        """An operation has settled."""
        self._ends.append((op, end, 0 if lost else -1, -1 if lost else 0))
        self.ring()

    def lost(self, op: Operation, end: End) -> None:
        """The end of an operation cannot be learnt for now."""
        self._ends.append((op, end, -1, 1))
        self.ring()

    def ring(self) -> None:
        """Handle ends, and call `idle`, soon."""
        if not self._rung and self._loop is not None:
            self._rung = True
            self._loop.post(self._run)

    def wait_room(self) -> None:
        """The engine had no room: look again when one of its operations has ended.

        Room comes back with any of them, whosever it is and whether it holds blocks or not.
        """
        live = [op for lane in self.engine._lanes for op in lane.live]
        for op in live:
            if op not in self._watched:
                self._watched.add(op)
                op.append(partial(self._room, op))
        if not live:
            self.ring()

    def _room(self, op: Operation) -> None:
        """An operation that was in the way has ended, or never will."""
        if op.decided and op in self._watched:
            self._watched.discard(op)
            self.ring()

    def _run(self) -> None:
        self._rung = False
        try:
            for _ in range(min(len(self._ends), ENDS_AT_ONCE)):
                op, end, live, stuck = self._ends.popleft()
                self.live += live
                self.stuck += stuck
                end(op)
            self._idle()
        finally:
            if self._ends:
                self.ring()
