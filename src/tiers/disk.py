"""DiskTier: one file for each item, published whole by one step, in a folder."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, final

from tiers._folder import SHARDS, Folder, Found, Kind, Name, Scan
from tiers._residency import Change
from tiers._tier import Account, Item, Slot, TierCounts
from transfer._work import FileRead, FileRemove, FileWrite, Launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transfer._handle import Block
    from transfer._work import Sync, Work

    Durability = Literal["none", "data", "full"]


STEP_SHARDS: Final = 32
STEP_FILES: Final = 512
"""What one step of a recovery looks through at most, but for one large shard."""


@final
class DiskSlot(Slot):
    """A file name of the tier, for one item.

    Attributes:
        name: what the published file is called.
    """

    __slots__ = ("name",)

    def __init__(self, item: Item, charged: int, name: Name) -> None:
        super().__init__(item, charged)
        self.name = name


@final
class DiskTier:
    """Files in a folder; folders are 0700 and files 0600.

    `open` and `close` block: a store runs them on a worker thread. One writer has the folder, unless
    every one of them opens it shared.

    Args:
        path: the folder; made if it is not there.
        quota: bytes of files that may be there, by what the file system allocates; None for no bound.
        durability: how far a file must have come when its write completes: ``"none"``, ``"data"``
            (its bytes are on the device) or ``"full"`` (its name too).
        shared: whether other writers may have the folder open at the same time.
        name: for messages and statistics.

    Raises:
        ValueError: an unknown durability, or a quota below one byte.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        quota: int | None = None,
        durability: Durability = "none",
        shared: bool = False,
        name: str = "disk",
    ) -> None:
        if durability not in ("none", "data", "full") or (quota is not None and quota < 1):
            raise ValueError(f"{name}: found durability {durability!r}, quota {quota}")
        self.name = name
        self.capacity = quota
        self.sync: Sync = durability
        self.folder = Folder(Path(path), shared=shared)
        self.temporaries_removed = 0
        self.orphans_removed = 0
        self._account = Account(name, quota)
        self._puts = 0

    def __repr__(self) -> str:
        return f"<{self.name} at {self.folder.root}>"

    # Opening: blocking calls for worker threads

    def open(self) -> None:
        """Take the folder.

        Raises:
            TierBusy: another writer has it.
            TierError: the file system has no flock.
            OSError: it cannot be made or opened.
        """
        self.folder.open()
        self.folder.clear_writers()

    def close(self) -> None:
        """Let others have the folder. May be repeated."""
        self.folder.close()

    def scan(self) -> Iterator[Launch]:
        """Recovery in steps: run each on an engine, then hand its findings to `adopt`.

        A step looks through a few shards, or through one that is large; steps may run side by side.
        Take the next one only when there is room to run it: what it looks through is then decided.
        """
        todo = deque(SHARDS)
        while todo:
            yield Launch(_Step(self, todo))

    def scan_all(self) -> Iterator[Scan]:
        """The same, blocking, shard by shard."""
        for shard in SHARDS:
            yield self._scanned(self.folder.scan(shard))

    def _scanned(self, scan: Scan) -> Scan:
        self.temporaries_removed += scan.temporaries
        self.orphans_removed += scan.orphans
        self._account.other += scan.live_bytes
        return scan

    def add_other(self, nbytes: int) -> None:
        """Count bytes that are in the folder and not ours to give back."""
        self._account.other += nbytes

    def adopt(self, found: Found, item: Item) -> DiskSlot:
        """Take over a published file that a scan found; it counts even beyond the quota."""
        slot = DiskSlot(item, max(found.allocated, 0), found.name)
        self._account.begin(slot)
        self._account.apply(slot, Change.PUBLISH)
        return slot

    # Items

    def new_put(self) -> bytes:
        """An id that no put ever had: the writer's, then a number."""
        self._puts += 1
        return self.folder.writer + self._puts.to_bytes(8, "big")

    def charge(self, nbytes: int) -> int:
        """What a file of `nbytes` bytes counts for: whole blocks of the file system."""
        unit = self.folder.block_bytes
        return -(-nbytes // unit) * unit

    def fits(self, nbytes: int) -> int:
        """See `Tier.fits`."""
        room = self._account.room()
        return 1 << 40 if room is None else room // self.charge(nbytes)

    def reserve(self, item: Item, *, kind: Kind = "whole") -> DiskSlot:
        """See `Tier.reserve`.

        Args:
            item: what it is for.
            kind: whether the file stands on its own, or is of no use without this process' memory.
        """
        charged = self.charge(item.nbytes)
        self._account.check(charged)
        slot = DiskSlot(item, charged, Name(item.key, item.put, kind))
        self._account.begin(slot)
        return slot

    def write(self, slot: Slot, source: Block) -> Work:
        """See `Tier.write`."""
        name = _ours(slot).name
        return FileWrite(
            self.folder.place(name._replace(temporary=True)),
            [source.span(0, slot.item.nbytes)],
            publish=self.folder.place(name),
            sync=self.sync,
        )

    def publish(self, slot: Slot) -> None:
        """See `Tier.publish`."""
        self._account.apply(slot, Change.PUBLISH)

    def read(self, slot: Slot, into: Block) -> Work:
        """See `Tier.read`."""
        return FileRead(self.folder.place(_ours(slot).name), [into.span(0, slot.item.nbytes)])

    def path(self, slot: Slot) -> Path:
        """Where the published file of an item is."""
        return self.folder.path(_ours(slot).name)

    def withdraw(self, slot: Slot) -> Sequence[Work]:
        """See `Tier.withdraw`. A write that failed may have left either name."""
        self._account.withdraw(slot)
        name = _ours(slot).name
        paths = (self.folder.place(name._replace(temporary=True)), self.folder.place(name))
        return [FileRemove(path, missing_ok=True) for path in paths]

    def evict(self, slot: Slot) -> Sequence[Work]:
        """See `Tier.evict`."""
        self._account.apply(slot, Change.EVICT)
        return [FileRemove(self.folder.place(_ours(slot).name), missing_ok=True)]

    def set_aside(self, slot: Slot) -> Sequence[Work]:
        """As `evict`, for a file that proved damaged: it is kept for a look, a few at most."""
        self._account.apply(slot, Change.EVICT)
        name = _ours(slot).name
        return [Launch(lambda: self.folder.set_aside(name))]

    def freed(self, slot: Slot) -> None:
        """See `Tier.freed`."""
        self._account.apply(slot, Change.FREED)

    def counts(self) -> TierCounts:
        """See `Tier.counts`."""
        return self._account.counts()


@final
class _Step:
    """A look through some shards, for a `Launch`; keeps what it found."""

    def __init__(self, tier: DiskTier, todo: deque[str]) -> None:
        self._tier = tier
        self._todo = todo
        self.found: list[Scan] = []

    def __call__(self) -> None:
        files = 0
        while self._todo and len(self.found) < STEP_SHARDS and files < STEP_FILES:
            try:
                shard = self._todo.popleft()  # atomic: no two steps get the same shard
            except IndexError:
                return
            self.found.append(self._tier.folder.scan(shard))
            files += len(self.found[-1].whole)


def findings(tier: DiskTier, step: Launch) -> list[Scan]:
    """What a completed step of `DiskTier.scan` found, by shard; its leftovers are counted once."""
    assert isinstance(step.fn, _Step)  # noqa: S101 - only our own steps are asked for
    return [tier._scanned(found) for found in step.fn.found]


def _ours(slot: Slot) -> DiskSlot:
    assert isinstance(slot, DiskSlot)  # noqa: S101 - a place of another tier is a bug of ours
    return slot
