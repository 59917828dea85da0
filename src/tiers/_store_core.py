"""The store without its verbs: reserving, filling, publishing, dooming and freeing of pages.

Nothing here awaits. Every step is a plain function, called by a verb or by the end of an operation,
on the loop's thread. What a page holds is given up in one place, `Core.settle`, and only when nothing
writes, reads or leases it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from tiers._health import Monitor
from tiers._index import Entry, Index
from tiers._policy import Admission, Lru, Shares
from tiers._residency import Change, Residency
from tiers._runner import Runner
from tiers._store_removals import Removal, Removals
from tiers._store_writes import Fill, Writes
from tiers._tier import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiers._form import Form, Stages
    from tiers._key import Provenance
    from tiers._policy import MakePolicy, Record
    from tiers.disk import DiskTier
    from tiers.host import HostTier
    from transfer._engine import Engine
    from transfer._work import Work

READ_FAULTS: Final = 8
"""Reads that may fail in passing, one after the other, before lookups find nothing for a while."""
AHEAD: Final = 16
"""Pages that are evicted at once for a put of many, where freeing takes time."""


class Refusal(NamedTuple):
    """Why a page cannot be taken now.

    Attributes:
        reason: in a word, for statistics.
        wait: whether what stands in the way ends by itself.
    """

    reason: str
    wait: bool


class Core:
    """The state of a store.

    Args:
        engine: runs all work.
        form: how pages are stored.
        host: for components in host memory, if the placement has some.
        disk: for files, if the placement has some.
        writes: staging of pages on their way to files.
        make_policy: makes an eviction policy.
        quotas: bytes by tenant.
        admission: which pages are taken at all.
        writes_at_once: file writes that the engine is given at a time, so that a read never waits
            for more than these.
    """

    def __init__(
        self,
        engine: Engine,
        form: Form,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        writes: Stages,
        make_policy: MakePolicy = Lru,
        quotas: Mapping[str, int] | None = None,
        admission: Admission | None = None,
        writes_at_once: int = 8,
    ) -> None:
        self.form = form
        self.host = host
        self.disk = disk
        self.stages = writes
        self.index = Index()
        self.shares = Shares(make_policy, dict(quotas or {}))
        self.admission = admission or Admission()
        self.monitor = Monitor("host" if disk is None else disk.name)
        self.reads = Monitor(self.monitor.tier, verb="reads", tolerate=READ_FAULTS)
        self.runner = Runner(engine, self.pump)
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.waiters: list[Callable[[], None]] = []
        self.pumps: list[Callable[[], None]] = []
        self.hits: dict[Callable[[], None], None] = {}  # ends the leases of each hit
        self.filling = 0
        self.closing = False
        self.writes = Writes(self, at_once=writes_at_once)
        self.removals = Removals(self.runner, self.monitor, self.faults, self._removed)

    # Looking

    @property
    def busy(self) -> bool:
        """Whether something goes on that ends by itself."""
        return bool(self.runner.live or self.writes.queued or self.removals.queued)

    # Taking a page

    def reserve(
        self,
        digest: bytes,
        provenance: bytes,
        *,
        tenant: str,
        depth: int,
        stamp: int,
        raw: bool,
        own: int,
        want: int,
    ) -> Fill | Refusal:
        """Set everything aside that a page needs, or nothing.

        Args:
            digest: the page's key, which leads nowhere.
            provenance: digest of the provenance.
            tenant: whose it is.
            depth: pages before it.
            stamp: number of the put; what this put used is not evicted for it.
            raw: whether the codec cannot work on the caller's pages.
            own: pages that this put is filling already.
            want: pages that this put still has, this one included.
        """
        needs_stage = bool(self.form.file_bytes) or raw
        if needs_stage and not self.stages.free(raw=raw):
            return Refusal("write-behind full", self.busy)
        refusal = self._make_room(tenant, stamp, own, want)
        if refusal is not None:
            return refusal
        if self.disk is not None and not self.monitor.allows(self.runner.now):
            return Refusal("degraded", wait=False)
        put = self._new_put()
        entry = Entry(digest, provenance, put, tenant=tenant, depth=depth, used=stamp)
        form = self.form
        if self.host is not None:
            entry.host = self.host.reserve(Item(digest, put, form.host_parts, form.host_bytes))
            entry.nbytes += entry.host.charged
        if self.disk is not None:
            item = Item(digest, put, form.disk_parts, form.file_bytes)
            entry.disk = self.disk.reserve(item, kind=form.kind)
            entry.nbytes += entry.disk.charged
        entry.apply(Change.RESERVE)
        self.shares.charge(tenant, entry.nbytes)
        self.index.add(entry)
        self.filling += 1
        return Fill(entry, self.stages.lease(raw=raw) if needs_stage else None, own)

    def _new_put(self) -> bytes:
        if self.disk is not None:
            return self.disk.new_put()
        return self.index.tick().to_bytes(16, "big")

    def page_bytes(self) -> int:
        """What one page counts for over all tiers."""
        nbytes = self.host.stride if self.host is not None else 0
        return nbytes + (self.disk.charge(self.form.file_bytes) if self.disk is not None else 0)

    def _make_room(self, tenant: str, stamp: int, own: int, want: int) -> Refusal | None:
        """Evict until a page fits; what stands in the way if it does not."""

        def may(record: Record) -> bool:
            return record.used != stamp and self.evictable(record)

        page = self.page_bytes()
        lacks: list[tuple[str, Callable[[], bool], str | None]] = [
            ("tenant quota", lambda: self.shares.over(tenant, page) > 0, tenant)
        ]
        host, disk = self.host, self.disk
        if host is not None:
            lacks.append(("host full", lambda: not host.fits(self.form.host_bytes), None))
        if disk is not None:
            lacks.append(("disk full", lambda: not disk.fits(self.form.file_bytes), None))
        for reason, lacking, whose in lacks:
            while lacking():
                leaving = self._leaving(reason, tenant)
                if leaving >= page * min(want, AHEAD):
                    return Refusal(reason, wait=True)
                victim = next(self.shares.victims(may, whose), None)
                if not isinstance(victim, Entry):
                    others = self.busy and self.filling > own
                    return Refusal(reason, wait=leaving > 0 or others)
                self.evict(victim)
        return None

    def _leaving(self, reason: str, tenant: str) -> int:
        """Bytes that will be free without more evictions, where that takes time."""
        if reason == "host full":
            return 0
        whose = tenant if reason == "tenant quota" else None
        return self.removals.pages(whose) * self.page_bytes()

    def evictable(self, record: Record) -> bool:
        """Whether a page may be evicted: it is resident, nobody leases it and nothing reads it."""
        return isinstance(record, Entry) and record.residency is Residency.RESIDENT and record.quiet

    def trim(self) -> None:
        """Evict what is there beyond the quota, as after taking over a folder."""
        disk = self.disk
        if disk is None or disk.capacity is None:
            return
        over = disk.counts().charged - disk.capacity
        for record in list(self.shares.victims(self.evictable)) if over > 0 else ():
            if over <= 0 or not isinstance(record, Entry):
                return
            over -= record.nbytes
            self.evict(record)

    def claim(self, entry: Entry, whose: Provenance, depth: int) -> None:
        """A page that a scan found is found by its key: now it is known whose it is, and where."""
        entry.provenance = whose.digest
        entry.depth = depth
        tenant = whose.tenant
        if tenant == entry.tenant or entry.residency is not Residency.RESIDENT:
            return
        self.shares.drop(entry)
        self.shares.charge(entry.tenant, -entry.nbytes)
        entry.tenant = tenant
        self.shares.charge(tenant, entry.nbytes)
        self.shares.add(entry)

    # Filling

    def begin_part(self, entry: Entry) -> None:
        """Another component of an entry is being written."""
        entry.pending += 1

    def end_part(self, entry: Entry) -> None:
        """A component's write has ended, well or not; the last one publishes what is still wanted."""
        entry.pending -= 1
        if entry.pending == 0 and entry.residency is Residency.FILLING:
            self._publish(entry)
        else:
            self.settle(entry)

    def _publish(self, entry: Entry) -> None:
        if self.host is not None and entry.host is not None:
            self.host.publish(entry.host)
        if self.disk is not None and entry.disk is not None:
            self.disk.publish(entry.disk)
        self.filling -= 1
        self.counts["stored"] += 1
        entry.apply(Change.PUBLISH)
        self.shares.add(entry)

    # Going

    def evict(self, entry: Entry) -> None:
        """Let a resident entry go that nobody uses."""
        self.index.drop(entry)
        self.shares.drop(entry)
        self.counts["evicted"] += 1
        entry.apply(Change.EVICT)
        self._free(entry)

    def remove(self, entry: Entry) -> None:
        """Let an entry go: a miss at once, its bytes freed when nothing uses it any more."""
        self._doom(entry, Change.REMOVE)

    def fail(self, entry: Entry, error: BaseException, *, damaged: bool = False) -> None:
        """A fault makes an entry useless."""
        if entry.residency in (Residency.ABSENT, Residency.EVICTING):
            return
        entry.error = entry.error or error
        entry.damaged = entry.damaged or damaged
        is_new = entry.residency is Residency.FILLING
        self.counts["failed" if is_new else "dropped"] += 1
        self._doom(entry, Change.FAIL)

    def _doom(self, entry: Entry, event: Change) -> None:
        self.index.drop(entry)
        self.shares.drop(entry)
        self.filling -= entry.residency is Residency.FILLING
        entry.apply(event)
        self.settle(entry)

    def settle(self, entry: Entry) -> None:
        """Free a doomed entry once nothing uses it; called whenever a use has ended."""
        if entry.residency is Residency.DOOMED and entry.quiet:
            entry.apply(Change.QUIET)
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        """Give back the places of an entry that nothing touches."""
        entry.freeing = 1
        if self.host is not None and entry.host is not None:
            slot = entry.host
            resident = slot.residency is Residency.RESIDENT
            (self.host.evict if resident else self.host.withdraw)(slot)
            self.host.freed(slot)
        if self.disk is not None and entry.disk is not None:
            entry.freeing += 1
            self.removals.add(Removal(entry, entry.disk, self._removal(entry)))
        self._end_freeing(entry)

    def _removal(self, entry: Entry) -> Sequence[Work]:
        assert self.disk is not None  # noqa: S101 - the caller knows
        assert entry.disk is not None  # noqa: S101
        if entry.disk.residency is not Residency.RESIDENT:
            return self.disk.withdraw(entry.disk)
        return self.disk.set_aside(entry.disk) if entry.damaged else self.disk.evict(entry.disk)

    def _end_freeing(self, entry: Entry) -> None:
        entry.freeing -= 1
        if entry.freeing == 0:
            self.shares.charge(entry.tenant, -entry.nbytes)
            entry.apply(Change.FREED)

    def _removed(self, removal: Removal) -> None:
        assert self.disk is not None  # noqa: S101 - only files are removed so
        self.disk.freed(removal.slot)
        self._end_freeing(removal.entry)

    # Going on

    def pump(self) -> None:
        """Start whatever there is room for, and let those who wait look again."""
        self.removals.pump()
        for pump in list(self.pumps):
            pump()
        self.writes.pump()
        self.wake()

    def wake(self) -> None:
        """Let those who wait for room, or for the end of everything, look again."""
        for waiter in list(self.waiters):
            waiter()
