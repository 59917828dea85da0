"""Write-behind: pages that are staged and wait for their turn to be written, bounded in number."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, final

from tiers._residency import Residency
from tiers._store_removals import cause_of, note_fault
from transfer._errors import CompletionLost, LeaseError, TransferError, WouldBlock
from transfer._state import State
from transfer._work import Launch

if TYPE_CHECKING:
    from tiers._form import Stage
    from tiers._index import Entry
    from tiers._store_core import Core
    from transfer._operation import Operation


@final
class Fill:
    """The bytes of one page on their way to a file.

    Attributes:
        entry: whose they are.
        stage: where they are staged; None where nothing is.
        number: place of the page in its put.
        error: why the page could not be encoded.
        lost: whether the end of its write could not be learnt.
    """

    __slots__ = ("entry", "error", "lost", "number", "stage")

    def __init__(self, entry: Entry, stage: Stage | None, number: int) -> None:
        self.entry = entry
        self.stage = stage
        self.number = number
        self.error: BaseException | None = None
        self.lost = False


@final
class Writes:
    """The writes of a store.

    Args:
        core: the store's state.
        at_once: writes that the engine is given at a time.

    Attributes:
        writing: writes that it has.
    """

    def __init__(self, core: Core, *, at_once: int) -> None:
        self.writing = 0
        self._repairing = False
        self._core = core
        self._at_once = at_once
        self._queue: deque[Fill] = deque()

    @property
    def queued(self) -> int:
        """Pages that wait to be written."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Bytes that are staged for files and have not been written."""
        return (len(self._queue) + self.writing) * self._core.form.file_bytes

    def add(self, fill: Fill) -> None:
        """A page is encoded and staged: write it when its turn comes."""
        self._queue.append(fill)
        self._core.runner.ring()

    def pump(self) -> None:
        """Post what there is room for."""
        while self._queue and self.writing < self._at_once:
            fill = self._queue.popleft()
            if not self._start_write(fill):
                self._queue.appendleft(fill)
                self._core.runner.wait_room()
                break

    def _repair(self, op: Operation) -> None:
        """Make the folders again if one of them vanished; once at a time."""
        cause, disk = cause_of(op), self._core.disk
        if disk is None or self._repairing or not isinstance(cause, FileNotFoundError):
            return
        try:
            work = Launch(disk.folder.repair)
            self._core.runner.submit(work, self._repaired, name="repair")
        except (TransferError, LeaseError):
            return  # the next fault tries again
        self._repairing = True

    def _repaired(self, op: Operation) -> None:
        if op.settled:
            self._repairing = False
            if op.state is not State.COMPLETED:
                core = self._core
                note_fault(op, core.faults, core.monitor, core.runner.now)

    def drop(self, error: BaseException) -> None:
        """Give up what waits to be written."""
        while self._queue:
            self.end_fill(self._queue.popleft(), error)

    def end_fill(self, fill: Fill, error: BaseException | None = None) -> None:
        """The way of a page to its file is over."""
        if fill.stage is not None:
            fill.stage.release()
        if error is not None:
            self._core.fail(fill.entry, error)
        self._core.end_part(fill.entry)

    def _start_write(self, fill: Fill) -> bool:
        """Post one write; False if the engine has no room."""
        entry, stage = fill.entry, fill.stage
        if entry.residency is not Residency.FILLING:
            self.end_fill(fill)
            return True
        assert self._core.disk is not None  # noqa: S101 - only files are queued
        assert entry.disk is not None  # noqa: S101
        assert stage is not None  # noqa: S101
        assert stage.blob is not None  # noqa: S101
        try:
            work = self._core.disk.write(entry.disk, stage.blob)
            self._core.runner.submit(work, partial(self._written, fill), name="write behind")
        except WouldBlock:
            return False
        except CompletionLost as error:
            self._core.fail(entry, error)  # its part never ends, so its bytes are never reused
            stage.release()
        except (TransferError, LeaseError) as error:
            self.end_fill(fill, error)
        else:
            self.writing += 1
        return True

    def _written(self, fill: Fill, op: Operation) -> None:
        if not op.settled:
            fill.lost = True
            self.writing -= 1
            self._core.fail(fill.entry, _lost(op))
            return
        self.writing -= not fill.lost
        if op.state is State.COMPLETED:
            self._core.counts["bytes written"] += self._core.form.file_bytes
            self._core.monitor.success()
            self.end_fill(fill)
        else:
            core = self._core
            self._repair(op)
            self.end_fill(fill, note_fault(op, core.faults, core.monitor, core.runner.now))


def _lost(op: Operation) -> CompletionLost:
    return CompletionLost(f"the end of {op!r} cannot be learnt: {op.error}")
