"""The index: which pages are here, as records in a dictionary, one for each put.

A record is complete only when every component of its put was published; a lookup sees complete
records only. A key leads to the newest put of it; an older one that is on its way out is reached by
whoever still works on it, and by nobody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tiers._residency import Change, Residency, change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiers._flight import Flight
    from tiers.disk import DiskSlot
    from tiers.host import HostSlot

_RESIDENT: Final = Residency.RESIDENT


@final
class Entry:
    """One put of one page.

    Attributes:
        digest: the page's key.
        provenance: digest of where it comes from.
        put: id that its components share.
        tenant: whose it is.
        depth: pages before it in its sequence.
        used: number of the lookup or put that last wanted it.
        nbytes: what its places count for, over all tiers.
        residency: how far it has come.
        host: its place in host memory, if it has one.
        disk: its file, if it has one.
        pending: writes of components that have not ended.
        reads: reads that have not ended.
        leases: Hits that lease it.
        freeing: places whose bytes are being given back.
        strikes: reads that failed in passing, one after the other.
        damaged: its file is to be set aside, not removed.
        error: why it is no longer wanted, if a fault is the reason.
        flight: the read of its file that is under way, if there is one.
        watchers: whom to tell of every change of residency.
    """

    __slots__ = (
        "damaged",
        "depth",
        "digest",
        "disk",
        "error",
        "flight",
        "freeing",
        "host",
        "leases",
        "nbytes",
        "pending",
        "provenance",
        "put",
        "reads",
        "residency",
        "strikes",
        "tenant",
        "used",
        "watchers",
    )

    def __init__(
        self, digest: bytes, provenance: bytes, put: bytes, *, tenant: str, depth: int, used: int
    ) -> None:
        self.digest = digest
        self.provenance = provenance
        self.put = put
        self.tenant = tenant
        self.depth = depth
        self.used = used
        self.nbytes = 0
        self.residency = Residency.ABSENT
        self.host: HostSlot | None = None
        self.disk: DiskSlot | None = None
        self.pending = 0
        self.reads = 0
        self.leases = 0
        self.freeing = 0
        self.strikes = 0
        self.damaged = False
        self.error: BaseException | None = None
        self.flight: Flight | None = None
        self.watchers: list[Callable[[], None]] | None = None

    def __repr__(self) -> str:
        return f"<page {self.digest[:6].hex()}, put {self.put.hex()}, {self.residency.value}>"

    @property
    def quiet(self) -> bool:
        """Whether nothing writes, reads or leases it."""
        return not (self.pending or self.reads or self.leases)

    def apply(self, event: Change) -> None:
        """Let the table decide; the only place where residency changes.

        Raises:
            IllegalTransition: the table has no such cell; nothing changed.
        """
        self.residency = change(self.residency, event)
        if self.watchers:
            for watcher in self.watchers:
                watcher()


@final
class Index:
    """Records by key: those that are filling or resident."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def tick(self) -> int:
        """A number that is larger than every one before it."""
        self._clock += 1
        return self._clock

    def get(self, digest: bytes) -> Entry | None:
        """The record of a key."""
        return self._entries.get(digest)

    def add(self, entry: Entry) -> None:
        """Let a key lead to a new put; the caller knows that it leads nowhere."""
        self._entries[entry.digest] = entry

    def drop(self, entry: Entry) -> None:
        """Let the key of a put lead nowhere, if it leads to this put."""
        if self._entries.get(entry.digest) is entry:
            del self._entries[entry.digest]

    def leading(self, digests: Sequence[bytes]) -> list[Entry]:
        """The resident records of the longest prefix, marked as used now."""
        found: list[Entry] = []
        get, add = self._entries.get, found.append
        self._clock = now = self._clock + 1
        for digest in digests:
            entry = get(digest)
            if entry is None or entry.residency is not _RESIDENT:
                break
            entry.used = now
            add(entry)
        return found

    def count(self, digests: Sequence[bytes]) -> int:
        """The length of the longest resident prefix; marks nothing."""
        get = self._entries.get
        length = 0
        for digest in digests:
            entry = get(digest)
            if entry is None or entry.residency is not _RESIDENT:
                break
            length += 1
        return length
