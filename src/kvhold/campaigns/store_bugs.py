"""Faults that a store could have, put in on purpose: a campaign has to find each of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tiers._index import Entry, Index
from tiers._residency import Residency
from tiers._store_core import Core
from tiers._store_fetch import Hit, Load
from tiers._store_writes import Writes
from tiers.disk import DiskSlot, DiskTier
from transfer._work import FileRemove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiers._policy import Record
    from tiers._store_writes import Fill
    from tiers._tier import Slot
    from transfer._operation import Operation
    from transfer._work import Work


@contextmanager
def _replaced(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    kept = vars(owner)[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _publish_early() -> Any:
    def end_part(self: Core, entry: Entry) -> None:
        entry.pending -= 1
        if entry.residency is Residency.FILLING:
            self._publish(entry)
        else:
            self.settle(entry)

    return _replaced(Core, "end_part", end_part)


def _unlink_by_key() -> Any:
    kept = DiskTier.evict

    def evict(self: DiskTier, slot: Slot) -> Sequence[Work]:
        kept(self, slot)
        assert isinstance(slot, DiskSlot)  # noqa: S101 - files have names
        folder = self.path(slot).parent
        same = folder.glob(f"{slot.item.key.hex()}-*")
        return [FileRemove(path, missing_ok=True) for path in (self.path(slot), *same)]

    return _replaced(DiskTier, "evict", evict)


def _key_only_hit() -> Any:
    def leading(self: Index, digests: Sequence[bytes]) -> list[Entry]:
        found = []
        for digest in digests:
            entry = self.get(digest)
            if entry is None or entry.residency not in {Residency.RESIDENT, Residency.FILLING}:
                break
            found.append(entry)
        return found

    def enter(self: Hit) -> Hit:
        self._entered = True
        for entry in self.entries:
            entry.leases += 1
        return self

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(Index, "leading", leading), _replaced(Hit, "__enter__", enter):
            yield

    return both()


def _evict_leased() -> Any:
    def evictable(self: Core, record: Record) -> bool:
        del self
        return isinstance(record, Entry) and record.residency is Residency.RESIDENT

    return _replaced(Core, "evictable", evictable)


def _return_early() -> Any:
    kept = Load._end_part

    def end_part(self: Load, number: int, error: BaseException | None) -> None:
        kept(self, number, error)
        self._left = 0
        self._wake()

    return _replaced(Load, "_end_part", end_part)


def _mixed_puts() -> Any:
    def new_put(self: DiskTier) -> bytes:
        return self.folder.writer + bytes(8)

    return _replaced(DiskTier, "new_put", new_put)


def _stale_publish() -> Any:
    kept = Core.end_part

    def end_part(self: Core, entry: Entry) -> None:
        if entry.pending == 1 and entry.residency is Residency.DOOMED and entry.error is None:
            entry.residency = Residency.FILLING
            self.filling += 1
            self.index.add(entry)
        kept(self, entry)

    return _replaced(Core, "end_part", end_part)


def _errors_are_fine() -> Any:
    def written(self: Writes, fill: Fill, op: Operation) -> None:
        if op.settled:
            self.writing -= 1
            self.end_fill(fill)

    return _replaced(Writes, "_written", written)


def _freed_too_early() -> Any:
    kept, freed = DiskTier.evict, DiskTier.freed

    def evict(self: DiskTier, slot: Slot) -> Sequence[Work]:
        works = kept(self, slot)
        freed(self, slot)
        return works

    def late(self: DiskTier, slot: Slot) -> None:
        if slot.residency is not Residency.ABSENT:
            freed(self, slot)

    @contextmanager
    def both() -> Iterator[None]:
        with _replaced(DiskTier, "evict", evict), _replaced(DiskTier, "freed", late):
            yield

    return both()


STORE_BUGS: Final[dict[str, Callable[[], Any]]] = {
    "publish before the last write": _publish_early,
    "unlink by key": _unlink_by_key,
    "a hit on keys alone": _key_only_hit,
    "evict ignores a lease": _evict_leased,
    "fetch returns before its siblings": _return_early,
    "mixed put ids": _mixed_puts,
    "stale generation publishes": _stale_publish,
    "write-behind counted as done on error": _errors_are_fine,
    "bytes are free before the file is gone": _freed_too_early,
}
"""Each makes a context manager that puts the fault in."""
