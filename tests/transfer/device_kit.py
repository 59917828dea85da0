"""What tests of single devices share: waiting for completions without an engine or a loop."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transfer._extent import BlockLayout
from transfer._fence import Completion
from transfer._handle import Blocks
from transfer._memory import HostPool
from transfer._workers import WorkerDevice

PATIENCE = 60.0
"""Seconds after which a test that waits for an event gives up; nothing is timed by it."""


class Ends:
    """Collects a device's completions and counts the wake-ups it makes."""

    def __init__(self, device: WorkerDevice) -> None:
        self.rings = 0
        self.seen: list[Completion] = []
        self._queue = device.completions
        self._event = threading.Event()
        self._queue.wake = self._wake

    def _wake(self) -> None:
        self.rings += 1
        self._event.set()

    def look(self) -> list[Completion]:
        """Take what is there, as a loop does when it was woken."""
        self._event.clear()
        self._queue.open()
        while self._queue.items:
            self.seen.append(self._queue.items.popleft())
        return self.seen

    def wait(self, count: int) -> list[Completion]:
        """Wait until `count` completions have arrived; only a wake-up makes it look again."""
        while len(self.look()) < count:
            assert self._event.wait(PATIENCE), f"{len(self.seen)} of {count} arrived"
        return self.seen


@contextmanager
def started(device: WorkerDevice) -> Iterator[Ends]:
    """Start a device and close it at the end."""
    ends = Ends(device)
    device.start()
    try:
        yield ends
    finally:
        device.close()


class Gate:
    """A callable that waits until it is opened, and says when it was entered."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE)

    def wait_entered(self) -> None:
        """Wait until a thread is inside."""
        assert self.entered.wait(PATIENCE)

    def open(self) -> None:
        """Let it through."""
        self._open.set()


def filled(pool: HostPool, count: int, *, seed: int = 0) -> Blocks:
    """Lease blocks and fill each with bytes of its own."""
    blocks = pool.lease(count).handle
    for block in blocks:
        view = block.view(write=True)
        pattern = bytes((block.id * 31 + seed + i) % 251 for i in range(257))
        view[:] = (pattern * (len(view) // len(pattern) + 1))[: len(view)]
    return blocks


def raw_pool(nbytes: int, blocks: int) -> HostPool:
    """A pool of blocks of plain bytes."""
    return HostPool(BlockLayout.raw(nbytes), blocks)
