"""Taking completions from the devices, on the loop or, once that is gone, on any thread."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._fence import CompletionQueue
    from transfer._lane import Lane
    from transfer._ledger import Ledger
    from transfer._loop import Loop

REAP_AT_ONCE: Final = 128
"""Completions of one device taken in one loop callback, so that other callbacks get their turn."""


@final
class Reaper:
    """Moves completions from the devices' queues to the ledger.

    It runs as a loop callback and not as a task, so nothing can cancel it.
    """

    def __init__(self, lanes: list[Lane], ledger: Ledger) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._loop: Loop | None = None

    def attach(self, loop: Loop) -> None:
        """Take completions on `loop` from now on, those that wait included."""
        self._loop = loop
        # Worker threads keep the queue, and must not keep an engine that everyone else forgot.
        ring = weakref.WeakMethod(self._ring)

        def wake() -> None:
            call = ring()
            if call is not None:
                call()

        for lane in self._lanes:
            queue = lane.device.completions
            queue.wake = wake
            queue.open()  # a wake-up that nobody was there to hear is not on its way any more
            if queue.items:
                queue.ring()

    def detach(self) -> None:
        """Leave completions where they are; they are late proofs for `wait_sync`."""
        self._loop = None

    def _ring(self) -> None:
        """Called by any thread when completions are there."""
        loop = self._loop
        if loop is not None:
            loop.post(self._reap_some)

    def _reap_some(self) -> None:
        # The engine may be closed since this was posted, and started again on another thread.
        if self._loop is not None and self._loop.here():
            self.reap(limit=REAP_AT_ONCE)

    def reap(self, *, limit: int | None = None) -> None:
        """Hand what is there to the ledger, at most `limit` of a device, and ring for the rest."""
        try:
            for lane in self._lanes:
                self._take(lane.device.completions, limit)
        finally:
            # Also when an interrupt strikes: nobody else would ring for what is left.
            for lane in self._lanes:
                if lane.device.completions.items:
                    lane.device.completions.ring()

    def _take(self, queue: CompletionQueue, limit: int | None) -> None:
        taken = 0
        queue.open()
        while queue.items and taken != limit:
            # Taken out after it was acted on: an interrupt makes it be seen twice, not never.
            completion = queue.items[0]
            self._ledger.complete(completion)
            if queue.items and queue.items[0] is completion:  # else a signal handler reaped it
                queue.items.popleft()
            taken += 1

    def wait_sync(self, busy: Callable[[], bool], deadline: float) -> None:
        """Reap on this thread until nothing is in flight or `deadline` seconds have passed."""
        rung = threading.Event()
        for lane in self._lanes:
            lane.device.completions.wake = rung.set
        end = time.monotonic() + deadline
        while True:
            rung.clear()
            self.reap()
            left = end - time.monotonic()
            if not busy() or left <= 0:
                return
            rung.wait(left)
