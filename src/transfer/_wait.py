"""Waiting for something to become true, woken by a callback, without losing a wake-up."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable


def limit(name: str, found: float) -> float:
    """A limit that lets something through.

    Raises:
        ValueError: it is below 1, or not a number.
    """
    if not found >= 1:
        raise ValueError(f"{name}: found {found}, expected at least 1")
    return found


async def wait_woken(waiters: list[Callable[[], None]]) -> None:
    """Wait until the owner of `waiters` calls the callback put there; always a checkpoint."""
    event = anyio.Event()
    callback = event.set
    waiters.append(callback)
    try:
        await event.wait()
    finally:
        waiters.remove(callback)


@final
class Line:
    """First come, first served: wait for one's turn and for room, whichever is later.

    Attributes:
        places: who waits, in order.
    """

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: deque[list[anyio.Event]] = deque()

    def __len__(self) -> int:
        return len(self.places)

    def free(self, fits: Callable[[], bool]) -> bool:
        """Whether a newcomer would not have to wait."""
        return not self.places and fits()

    def wake(self) -> None:
        """Let the first look again whether there is room."""
        if self.places:
            self.places[0][0].set()

    def wake_all(self) -> None:
        """Let everyone look again; used when waiting has become pointless."""
        for place in self.places:
            place[0].set()

    async def wait(self, fits: Callable[[], bool]) -> None:
        """Return once it is one's turn and ``fits()``; take the room before awaiting anything.

        `fits` may raise to end the wait. Leaving, by return, error or cancellation, lets the next
        in line look.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self.free(fits):
            return
        place = [anyio.Event()]
        self.places.append(place)
        try:
            while not fits() or self.places[0] is not place:
                place[0] = anyio.Event()
                await place[0].wait()
        finally:
            self.places.remove(place)
            self.wake()
