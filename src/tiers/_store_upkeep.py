"""Opening and closing a store's folder, and taking over what an earlier process left there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tiers._errors import TierError
from tiers._folder import SHARDS, WRITER_BYTES
from tiers._form import Placement
from tiers._index import Entry
from tiers._residency import Change
from tiers._tier import Item
from tiers.disk import findings
from transfer._drain import wait_decided
from transfer._errors import CompletionLost, LeaseError, TransferError, WouldBlock
from transfer._state import State
from transfer._wait import wait_woken
from transfer._work import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiers._folder import Found
    from tiers._store_core import Core
    from tiers.disk import DiskTier
    from transfer._operation import Operation

    Progress = Callable[[int, int], None]

AT_ONCE: Final = 2
TOGETHER: Final = 10_000_000_000
"""Nanoseconds in which files count as written together."""


@final
class Recovery:
    """Looks through a folder step by step while the store works already.

    Args:
        core: the store's state.
        disk: the tier.
        progress: called with shards done and shards in all.

    Attributes:
        adopted: pages taken over.
        ended: whether every step was taken.
    """

    def __init__(self, core: Core, disk: DiskTier, progress: Progress | None) -> None:
        self.adopted = 0
        self.ended = False
        self.error: BaseException | None = None
        self._core = core
        self._disk = disk
        self._progress = progress
        self._steps: Iterator[Launch] = disk.scan()
        self._next: Launch | None = None
        self._active = 0
        self._done = 0

    async def wait(self) -> int:
        """Wait until every step was taken; how many pages were taken over.

        Raises:
            TierError: a part of the folder could not be read.
        """
        while not self.ended:
            await wait_woken(self._core.waiters)
        if self.error is not None:
            raise TierError(f"{self._disk!r} was read in part: {self.error}")
        return self.adopted

    def pump(self) -> None:
        """Post the next steps."""
        while self._active < AT_ONCE and not self.ended:
            step = self._next or next(self._steps, None)
            self._next = None
            if step is None or self._core.closing:
                if not self._active:
                    self._end()
                return
            try:
                self._core.runner.submit(step, self._looked, name="recover")
            except WouldBlock:
                self._next = step
                self._core.runner.wait_room()
                return
            except (TransferError, LeaseError) as error:
                self.error = error
                self._end()
            else:
                self._active += 1

    def _looked(self, op: Operation) -> None:
        if not op.settled:
            return
        self._active -= 1
        if op.state is State.COMPLETED:
            assert isinstance(op.work, Launch)  # noqa: S101 - it is one of our steps
            for shard in findings(self._disk, op.work):
                self._done += 1
                for found in shard.whole:
                    self._adopt(found)
        else:
            self.error = self.error or op.error
        if self._progress is not None:
            self._progress(self._done, len(SHARDS))

    def _adopt(self, found: Found) -> None:
        """Take over one file; of two of one key the second goes."""
        core = self._core
        if core.form.placement is not Placement.WHOLE_DISK:
            self._disk.add_other(found.allocated)
            return
        name = found.name
        # Used before anything of this process. Of files written together the last ones go first:
        # a put takes its pages in their order, and the deeper ones need those before them.
        used = found.written // TOGETHER - (1 << 62)
        depth = int.from_bytes(name.put[WRITER_BYTES:], "big")
        entry = Entry(name.key, b"", name.put, tenant="", depth=depth, used=used)
        item = Item(name.key, name.put, core.form.disk_parts, core.form.file_bytes)
        entry.disk = self._disk.adopt(found, item)
        entry.nbytes = entry.disk.charged
        entry.apply(Change.RESERVE)
        core.shares.charge(entry.tenant, entry.nbytes)
        entry.apply(Change.PUBLISH)
        if core.index.get(name.key) is None:
            core.index.add(entry)
            core.shares.add(entry)
            self.adopted += 1
            core.counts["adopted"] += 1
        else:
            core.remove(entry)

    def _end(self) -> None:
        self.ended = True
        core = self._core
        if self.pump in core.pumps:
            core.pumps.remove(self.pump)
        core.trim()
        core.wake()


async def open_tier(core: Core, disk: DiskTier) -> None:
    """Take the folder on a worker thread; a cancelled call does not keep it.

    Raises:
        TierError, OSError: as `DiskTier.open`.
    """
    op = await core.runner.engine.submit(Launch(disk.open), name="open")
    try:
        await wait_decided(op)
    finally:
        if not op.settled:
            core.runner.watch(op, lambda op: _give_back(core, disk, op))
    _raise(op)


def _give_back(core: Core, disk: DiskTier, op: Operation) -> None:
    if op.settled:
        release_tier(core, disk)


def release_tier(core: Core, disk: DiskTier) -> None:
    """Let others have the folder. Not an awaited call, which a cancellation would skip."""
    try:
        core.runner.submit(Launch(disk.close), _nothing, name="close")
    except TransferError:
        disk.close()  # the engine takes no work: a few system calls here


def _nothing(op: Operation) -> None:
    """Nothing follows from its end."""
    del op


def _raise(op: Operation) -> None:
    """Raise what a `Launch` raised, as it did."""
    if op.state is State.COMPLETED:
        return
    if op.error is None or op.error.__cause__ is None or isinstance(op.error, CompletionLost):
        op.raise_outcome()
        return
    raise op.error.__cause__
