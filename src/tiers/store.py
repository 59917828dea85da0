"""KVStore: pages of K/V cache in host memory and files, found by what led to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from tiers._flight import Flights
from tiers._form import Form, Placement, stages_of
from tiers._layout import PageLayout, ScaleScope, StaticScales
from tiers._policy import Admission, Lru
from tiers._store_core import Core
from tiers._store_fetch import Hit, Load
from tiers._store_put import Put, PutFailed, Ticket
from tiers._store_report import StoreStatistics, VerifyReport, observe, verify
from tiers._store_upkeep import Recovery, open_tier, release_tier
from transfer._drain import wait_unstoppable
from transfer._errors import EngineClosed, LayoutMismatch, LeaseError
from transfer._memory import HostPool
from transfer._wait import wait_woken
from transfer._work import handle_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from tiers._health import Health
    from tiers._index import Entry
    from tiers._key import Keys
    from tiers._policy import MakePolicy
    from tiers._store_put import Backpressure
    from tiers._store_upkeep import Progress
    from tiers.disk import DiskTier
    from tiers.fp8 import NonFinite
    from tiers.host import HostTier, MakePool
    from transfer._engine import Engine
    from transfer._memory import Pool
    from transfer._work import HandleLike

__all__ = ["Hit", "KVStore", "Placement", "PutFailed", "StoreStatistics", "Ticket", "VerifyReport"]


@final
class KVStore:
    """Stores pages under their keys and brings them back.

    Use it inside its engine: ``async with KVStore(engine, …) as store``. Leaving writes out what is
    staged and waits until nothing of the store is in flight.

    Args:
        engine: a started engine with devices for host memory and, for files, files.
        layout: the page as the caller has it.
        placement: where components go.
        host: host memory for the components that are kept there.
        disk: a folder for those that are kept in files.
        value: format of the codes, for full-width values.
        scope: how scales are shared, for full-width values.
        static_scales: scales of FP8 values that have none of their own.
        nonfinite: what becomes of NaN and infinities among values.
        write_behind_bytes: bytes of pages that may be staged for files, at least one page.
        read_bytes: bytes of pages that may be on their way back, a share that writes cannot take.
        make_pool: makes the memory of both, such as `transfer.cuda.PinnedPool`; the store closes it.
        backpressure: whether a put waits for room that comes by itself, or is refused.
        policy: makes an eviction policy: `Lru` or `S3Fifo`.
        quotas: bytes, over all tiers, that a tenant may have.
        admission: a page is taken at its n-th offer.
        writes_at_once: file writes that the engine is given at a time.
        reads_at_once: file reads that the engine is given at a time.
        close_deadline: seconds that leaving waits for the write-behind.

    Raises:
        LayoutMismatch: tiers that the placement does not have or lacks, or of another layout.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        layout: PageLayout,
        placement: Placement = Placement.SPLIT,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        value: str = "float8_e4m3fn",
        scope: ScaleScope = ScaleScope.HEAD,
        static_scales: StaticScales | None = None,
        nonfinite: NonFinite = "saturate",
        write_behind_bytes: int = 256 << 20,
        read_bytes: int = 64 << 20,
        make_pool: MakePool = HostPool,
        backpressure: Backpressure = "wait",
        policy: MakePolicy = Lru,
        quotas: Mapping[str, int] | None = None,
        admission: int = 1,
        writes_at_once: int = 8,
        reads_at_once: int = 8,
        close_deadline: float = 30.0,
    ) -> None:
        form = Form(
            layout,
            placement,
            value=value,
            scope=scope,
            nonfinite=nonfinite,
            static_scales=static_scales,
        )
        if (host is None) != (not form.host_names) or (disk is None) != (not form.file_bytes):
            raise LayoutMismatch(
                f"{placement.value}: found host tier {host!r}, disk tier {disk!r}; it keeps "
                f"{form.host_names or 'nothing'} in host memory, {form.file_bytes} bytes in a file"
            )
        if host is not None:
            form.check_host(host)
        self.engine = engine
        self.placement = placement
        self.layout = layout
        self.form = form
        self._host = host
        self._disk = disk
        self._backpressure: Backpressure = backpressure
        self._deadline = close_deadline
        writes, reads = stages_of(
            form, write_bytes=write_behind_bytes, read_bytes=read_bytes, make_pool=make_pool
        )
        self._core = Core(
            engine,
            form,
            host=host,
            disk=disk,
            writes=writes,
            make_policy=policy,
            quotas=quotas,
            admission=Admission(admission),
            writes_at_once=writes_at_once,
        )
        self._flights = Flights(self._core, reads, at_once=reads_at_once)
        self._recovery: Recovery | None = None
        self._started = False
        self._known: tuple[bytes, bool] = (b"", False)

    def __repr__(self) -> str:
        return f"<store of {self.placement.value} pages, {len(self._core.index)} known>"

    # Starting and leaving

    async def start(self, *, progress: Progress | None = None) -> None:
        """Take the folder and begin to look through it; the store works from now on.

        Args:
            progress: called with parts of the folder looked through, and parts in all.

        Raises:
            TierBusy: another writer has the folder.
            TierError, OSError: it cannot be used.
        """
        if self._started or self._core.closing:
            raise EngineClosed(f"{self!r} was started before; make another one")
        self._core.runner.bind()
        if self._disk is not None:
            await open_tier(self._core, self._disk)
            self._recovery = Recovery(self._core, self._disk, progress)
            self._core.pumps.append(self._recovery.pump)
            self._core.runner.ring()
        self._started = True

    async def recovered(self) -> int:
        """Wait until the folder was looked through; how many pages were taken over.

        Raises:
            TransferError: a part of it could not be read.
        """
        return 0 if self._recovery is None else await self._recovery.wait()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        finally:
            if not self._started:
                self._give_back()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def drain(self) -> None:
        """Wait until nothing of the store is staged, queued or in flight."""
        while not self._idle():
            await wait_woken(self._core.waiters)

    async def aclose(self) -> None:
        """Refuse new work, write out what is staged, give everything back. May be repeated.

        Goes on waiting after every cancellation and raises one again at the end. What is not
        written at the deadline is given up. Files that are of no use without this process' memory
        are removed as far as the deadline allows; the next process removes the rest.

        Raises:
            PoolBusy: operations that never ended hold memory of the store.
        """
        core = self._core
        if not self._started:
            self._give_back()
            return
        self._started = False
        core.closing = True
        core.wake()
        strikes = [await self._settle(self._deadline)]
        core.writes.drop(EngineClosed("the store was closed before the page was written"))
        self._flights.drop(EngineClosed("the store was closed before the page was read"))
        if core.form.host_names:
            for entry in list(core.index):
                core.remove(entry)
        for give_up in list(core.hits):
            give_up()
        core.removals.retry()  # a page that was removed must not come back with the next process
        strikes.append(await self._settle(self._deadline))
        if self._disk is not None:
            release_tier(core, self._disk)
            strikes.append(await self._settle(self._deadline))
        self._give_back()
        caught = next((strike for strike in strikes if strike is not None), None)
        if caught is not None:
            raise caught

    def _give_back(self) -> None:
        """Close the staging memory; the store is of no use any more."""
        self._core.closing = True
        try:
            self._core.stages.close()
        finally:
            self._flights.stages.close()

    async def _settle(self, deadline: float) -> BaseException | None:
        return await wait_unstoppable(self._idle, self._core.waiters, deadline=deadline)

    def _idle(self) -> bool:
        return not (self._core.busy or self._flights.queued)

    # Verbs

    async def put(self, keys: Keys, pages: HandleLike, *, after: object = ()) -> Ticket:
        """Store pages. Returns when they may be reused; files are written behind.

        Putting a page that is there, or on its way, changes nothing; putting again fills gaps. A page
        that is not taken is named in the ticket, and so are those behind it. Cancelled, the call
        leaves at once when the blocks are a pool's, which keeps them until they are quiet, and
        else when they are; pages that were staged go on.

        Args:
            keys: names of the pages.
            pages: blocks, one for each key or more.
            after: what wrote them: a stream, an event, an operation; ``()`` if that has ended.

        Raises:
            LayoutMismatch: keys or blocks of another layout.
            CompletionLost: whether something still reads the blocks cannot be learnt.
            EngineClosed: the store is closed.
            BadWork, LeaseError, SubmitError, DevicePoisoned: as `Engine.submit`.
        """
        self._check(keys)
        call = Put(
            self._core,
            keys,
            handle_of(pages),
            after=after,
            backpressure=self._backpressure,
        )
        self._core.counts["offered"] += len(keys)
        if self._core.removals.stuck and self._core.monitor.allows(self._core.runner.now):
            self._core.removals.retry()
        await call.run()
        return call.ticket

    def lookup(self, keys: Keys, *, max_tokens: int | None = None) -> Hit:
        """Find the longest prefix of which every component is there.

        Args:
            keys: names of the pages.
            max_tokens: as many tokens at most, rounded down to pages.

        Returns:
            A hit; enter it to keep the pages from eviction.

        Raises:
            LayoutMismatch: keys of another layout.
        """
        self._check(keys)
        digests = self._bounded(keys, max_tokens)
        core = self._core
        # A tier that fails every read costs nobody the wait: its pages are misses until a probe.
        entries = core.index.leading(digests) if core.reads.allows(core.runner.now) else []
        core.counts["lookups"] += 1
        core.counts["hits"] += len(entries)
        core.counts["misses"] += len(digests) - len(entries)
        return Hit(core, entries, page_size=keys.page_size, whose=keys.provenance)

    def match(self, keys: Keys, *, max_tokens: int | None = None) -> int:
        """Count the leading pages that are there, without a lease and without marking them used."""
        self._check(keys)
        return self._core.index.count(self._bounded(keys, max_tokens))

    async def fetch(self, hit: Hit, *, into: HandleLike, after: object = ()) -> int:
        """Bring the pages of a hit into blocks.

        Reads of a page are shared by all who want it, and belong to the store. When this returns,
        every part has ended; blocks behind the number are undefined.

        Args:
            hit: an entered hit.
            into: blocks, one for each page or more.
            after: what still reads or writes the blocks; ``()`` for nothing.

        Returns:
            How many leading pages are valid.

        Raises:
            LeaseError: the hit is not entered.
            LayoutMismatch: blocks of another layout.
            CompletionLost: the end of a part cannot be learnt.
            BadWork, SubmitError, DevicePoisoned, EngineClosed: as `Engine.submit`.
        """
        if not hit.leased:
            raise LeaseError(f"{hit!r} is not entered: fetch inside `with`")
        self._check_open()
        return await Load(self._flights, hit.entries, handle_of(into)).run(after)

    def evict(self, pages: int) -> int:
        """Let go of up to `pages` pages that nobody uses, those of least worth first; how many."""
        count = 0
        core = self._core
        for record in core.shares.victims(core.evictable):
            if count == pages:
                break
            core.evict(record)  # type: ignore[arg-type]
            count += 1
        return count

    def remove(self, keys: Keys) -> int:
        """Let go of pages: a miss at once, their bytes freed with the last use; how many."""
        found = [self._core.index.get(digest) for digest in keys.digests]
        for entry in found:
            if entry is not None:
                self._core.remove(entry)
        return sum(entry is not None for entry in found)

    async def verify(self, *, progress: Progress | None = None) -> VerifyReport:
        """Read the file of every resident page and check every byte; damaged ones are set aside.

        Args:
            progress: called with pages checked and pages in all.
        """
        self._check_open()
        return await verify(self._flights, progress)

    def _check_open(self) -> None:
        if not self._started:
            raise EngineClosed(f"{self!r} is not started, or closed")

    def _check(self, keys: Keys) -> None:
        """Keys are of the layout and the scheme that this store keeps."""
        self._check_open()
        provenance = keys.provenance
        if self._known == (provenance.digest, True):
            return
        self.form.check_keys(provenance)
        self._known = (provenance.digest, True)

    def _bounded(self, keys: Keys, max_tokens: int | None) -> list[bytes]:
        if max_tokens is None:
            return keys.digests
        return keys.digests[: max(0, max_tokens) // keys.page_size]

    # Looking

    def health(self) -> Health:
        """Whether the last tier can be written, and why not."""
        return self._core.monitor.health()

    def read_health(self) -> Health:
        """Whether the last tier can be read, and why not."""
        return self._core.reads.health()

    def pools(self) -> list[Pool]:
        """The store's own staging memory, for looking at its counts."""
        return [*self._core.stages.pools, *self._flights.stages.pools]

    def entries(self) -> Iterator[Entry]:
        """The records of pages that are resident or on their way in; for looking only."""
        return iter(self._core.index)

    def statistics(self) -> StoreStatistics:
        """A frozen snapshot."""
        return observe(self._core)
