"""Whether a tier works: learnt from faults and successes, said in few words.

Health decides what is tried, never what becomes of a buffer.
"""

from __future__ import annotations

import errno
import logging
from typing import Final, NamedTuple, final

_log = logging.getLogger("kvhold.tiers")


class Health(NamedTuple):
    """Whether a tier can be used, and why not.

    Attributes:
        tier: its name.
        degraded: whether it is held off, but for a probe in a while.
        reason: the fault that did it, None if there is none.
        faults: faults since the tier was made.
        recoveries: how often it came back.
    """

    tier: str
    degraded: bool
    reason: str | None
    faults: int
    recoveries: int


PASSING: Final = frozenset(
    {errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EINTR, errno.ESTALE}
)
"""Errors of a read that say nothing about the file: it is kept and may be read later."""

DEGRADING: Final = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ESTALE,
        errno.EFBIG,
        errno.ENODEV,
        errno.ENXIO,
    }
)
"""Errors of a write after which the next one is likely to fail too."""


@final
class Monitor:
    """Decides by faults and successes whether a tier is tried, and says so in few words.

    A fault closes the tier; after a pause one try is let through as a probe, and each
    failed probe doubles the pause. One success opens it again. The first fault of a spell is logged
    in full, later ones as a number at most once in `quiet` seconds, the recovery once.

    Args:
        tier: its name.
        verb: what it takes none of while it is closed, for the log.
        tolerate: faults in a row that do not close it.
        pause: seconds until the first probe.
        longest: seconds between probes at most.
        quiet: seconds between two summaries in the log.
    """

    def __init__(
        self,
        tier: str,
        *,
        verb: str = "puts",
        tolerate: int = 0,
        pause: float = 0.05,
        longest: float = 10.0,
        quiet: float = 10.0,
    ) -> None:
        self.tier = tier
        self._verb = verb
        self._tolerate = tolerate
        self._row = 0
        self.faults = 0
        self.recoveries = 0
        self.reason: str | None = None
        self._first_pause = pause
        self._longest = longest
        self._quiet = quiet
        self._pause = pause
        self._next_try = 0.0
        self._next_word = 0.0
        self._unsaid = 0

    def health(self) -> Health:
        """A snapshot."""
        return Health(self.tier, self.reason is not None, self.reason, self.faults, self.recoveries)

    def allows(self, now: float) -> bool:
        """Whether it may be tried; while degraded, once in a while."""
        if self.reason is None:
            return True
        if now < self._next_try:
            return False
        self._next_try = now + self._pause
        return True

    def fault(self, error: BaseException, now: float) -> None:
        """It did not work."""
        self.faults += 1
        self._row += 1
        if self._row <= self._tolerate:
            return
        if self.reason is None:
            self._pause = self._first_pause
            self._next_word = now + self._quiet
            self._unsaid = 0
            _log.warning("%s: %s; it takes no %s until one succeeds", self.tier, error, self._verb)
        else:
            self._pause = min(2 * self._pause, self._longest)
            self._unsaid += 1
            if now >= self._next_word:
                _log.warning("%s: %d more faults, the last: %s", self.tier, self._unsaid, error)
                self._next_word = now + self._quiet
                self._unsaid = 0
        self.reason = str(error)
        self._next_try = now + self._pause

    def success(self) -> None:
        """It worked."""
        self._row = 0
        if self.reason is not None:
            _log.warning(
                "%s: works again after %d faults (%s)", self.tier, self.faults, self.reason
            )
            self.reason = None
            self.recoveries += 1
