"""Fences and completions: how a device says, once, that work has ended.

A `Fence` is a one-use token. What matches it is its identity: a completion for a fence that is
unknown or was used before is counted and dropped, and never moves an operation.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Fence:
    """The end of one piece of posted work. Devices subclass it to keep what they need."""

    __slots__ = ()


class Completion(NamedTuple):
    """What a device learnt about one fence.

    Attributes:
        fence: the token.
        error: None when the work is done; the device's error when it is quiet but failed.
        lost: the end can no longer be learnt; `error` says why.
        poisoned: the whole device is lost with it.
    """

    fence: Fence
    error: BaseException | None = None
    lost: bool = False
    poisoned: bool = False


class CompletionQueue:
    """Completions on their way from any thread to the loop; one wake-up for many.

    The engine sets `wake`; until then, and after the loop has gone, completions are only kept.
    """

    __slots__ = ("_armed", "items", "wake")

    def __init__(self) -> None:
        self.items: deque[Completion] = deque()
        self.wake: Callable[[], None] | None = None
        self._armed = False

    def post(
        self,
        fence: Fence,
        error: BaseException | None = None,
        *,
        lost: bool = False,
        poisoned: bool = False,
        wake: bool = True,
    ) -> None:
        """Report a completion; safe from any thread.

        Args:
            fence: the token.
            error: the device's error, if any.
            lost: the end can no longer be learnt.
            poisoned: the whole device is lost.
            wake: False to leave the wake-up to a later call, which must follow.
        """
        self.items.append(Completion(fence, error, lost, poisoned))
        if wake:
            self.ring()

    def ring(self) -> None:
        """Wake the loop unless a wake-up is already on its way."""
        if not self._armed and self.wake is not None:
            self._armed = True
            self.wake()

    def open(self) -> None:
        """Accept wake-ups again; called by the loop *before* it looks at `items`.

        In this order a completion is seen by the look, or wakes again; never neither.
        """
        self._armed = False
