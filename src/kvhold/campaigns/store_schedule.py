"""One schedule of a store campaign: random steps, each held against a plain model and the files."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel

from kvhold.campaigns.store_pages import LAYOUT, fill, keys_of, poison, versions_of
from tiers import DiskTier, HostTier, KVStore, Placement, PutFailed
from tiers._form import Form
from tiers._residency import Residency
from transfer import Engine, FileDevice, HostDevice, HostPool
from transfer.testing import Fault, FaultPlan, FaultyCalls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tiers import Hit, Keys

SEQUENCES: Final = 4
PAGES: Final = 4
STEPS: Final = 40
RATES: Final = {
    Fault.EIO: 0.02,
    Fault.ENOSPC: 0.02,
    Fault.SHORT: 0.05,
    Fault.NOTHING: 0.01,
    Fault.EINTR: 0.02,
}


class Violation(AssertionError):
    """The store did what it must not."""


@dataclass
class StoreReport:
    """What a store campaign found.

    Attributes:
        schedules: how many were run.
        steps: how many steps they had.
        faults: how often each fault struck.
        pages: pages fetched and compared.
        failed: seeds of schedules with a violation, and the violation.
        bugs: for each seeded bug, the schedules it took, None if none found it, and what was seen.
        seconds: how long the schedules took, without bugs.
    """

    schedules: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    pages: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    bugs: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether nothing was violated and every bug was found."""
        return not self.failed and all(found is not None for found, _ in self.bugs.values())


class Schedule:
    """One schedule.

    Args:
        seed: decides everything but the timing of threads.
        root: a folder of its own.
        report: counts.
    """

    def __init__(self, seed: int, root: Path, report: StoreReport) -> None:
        self.random = random.Random(seed)
        self.root = root
        self.report = report
        self.faulty = self.random.random() < 0.5
        self.placement = self.random.choice(list(Placement))
        self.calls = FaultyCalls(FaultPlan(seed))
        self.versions: dict[tuple[int, int], int] = {}
        self.absent: set[tuple[int, int]] = set()
        self.hits: list[tuple[int, Hit]] = []
        self.tight = self.random.random() < 0.5

    async def run(self) -> None:
        """Run it.

        Raises:
            Violation: says what is wrong.
        """
        form = Form(LAYOUT, self.placement)
        pool = HostPool(LAYOUT, 3 * PAGES)
        blocks = 6 if self.tight else 32
        host = HostTier.of(form.stored, form.host_names, blocks=blocks) if form.host_names else None
        quota = 6 * form.file_bytes if self.tight else None
        disk = DiskTier(self.root, quota=quota) if form.file_bytes else None
        async with (
            Engine(HostDevice(threads=2), FileDevice(calls=self.calls, threads=3)) as engine,
            KVStore(
                engine,
                layout=LAYOUT,
                placement=self.placement,
                host=host,
                disk=disk,
                write_behind_bytes=form.file_bytes * (2 if self.tight else 16),
                backpressure=self.random.choice(["wait", "refuse"]),
            ) as store,
        ):
            self.store, self.engine, self.pool, self.disk = store, engine, pool, disk
            await store.recovered()
            if self.faulty:
                self.calls.plan = FaultPlan(self.calls.plan.seed, rates=RATES)
            for _ in range(STEPS):
                await self.step()
            await self.finish()
        pool.close()
        if host is not None:
            host.close()

    # Steps

    async def step(self) -> None:
        """Do one thing, then look."""
        verbs: list[tuple[Callable[[], Any], int]] = [
            (self.put, 6),
            (self.fetch, 6),
            (self.hold, 2),
            (self.let_go, 2),
            (self.remove, 3),
            (self.evict, 2),
            (self.put_twice, 1),
            (self.stand_still, 1),
            (self.drain, 1),
        ]
        (verb,) = self.random.choices([v for v, _ in verbs], [w for _, w in verbs])
        await verb()
        self.report.steps += 1
        self.look()

    def choose(self) -> tuple[int, int, Keys]:
        """A sequence, and how many of its pages."""
        sequence, pages = self.random.randrange(SEQUENCES), self.random.randint(1, PAGES)
        return sequence, pages, keys_of(sequence, pages)

    def version(self, sequence: int, pages: int) -> int:
        """The version that a put of these pages brings: one more than any that was put before."""
        newest = max(self.versions.get((sequence, page), 0) for page in range(pages))
        for page in range(pages):
            self.versions[sequence, page] = newest + 1
        return newest + 1

    async def put(self) -> None:
        """Put pages; sometimes give up, sometimes wait for them."""
        sequence, pages, keys = self.choose()
        version = self.version(sequence, pages)
        wait = self.random.random() < 0.4
        with self.pool.lease(pages) as blocks:
            fill(blocks, keys, version)
            for page in range(pages):
                self.absent.discard((sequence, page))
            with anyio.CancelScope() as scope:
                if self.random.random() < 0.2:
                    scope.deadline = anyio.current_time() + self.random.random() * 0.002
                ticket = await self.store.put(keys, blocks)
                poison(blocks)
            if scope.cancelled_caught:
                return
        if wait:
            try:
                await ticket.resident()
            except PutFailed:
                if not self.faulty and not ticket.refused:
                    raise Violation("a put failed without a fault") from None

    async def put_twice(self) -> None:
        """Put, remove and put again while files of the first put are still being written."""
        self.calls.gate.shut()
        try:
            await self.put_plain()
            sequence, _, keys = self.choose()
            self.drop(sequence, keys)
            await anyio.lowlevel.checkpoint()
        finally:
            self.calls.gate.open()
        if self.random.random() < 0.5:
            await self.store.drain()

    async def put_plain(self) -> None:
        """Put pages whose files cannot be written yet, look, and remove them."""
        sequence, pages, keys = self.choose()
        if self.placement is Placement.SPLIT or self.placement is Placement.WHOLE_DISK:
            pages = min(pages, 2)
            keys = keys_of(sequence, pages)
        version = self.version(sequence, pages)
        with self.pool.lease(pages) as blocks, anyio.move_on_after(0.02):
            fill(blocks, keys, version)
            for page in range(pages):
                self.absent.discard((sequence, page))
            await self.store.put(keys, blocks)
            await anyio.lowlevel.checkpoint()
            self.look()
            await self.take(sequence, self.store.lookup(keys), keys, brief=True)
            self.drop(sequence, keys)

    async def fetch(self) -> None:
        """Fetch what is there; sometimes give up."""
        sequence, _, keys = self.choose()
        if self.random.random() < 0.2:
            with anyio.move_on_after(self.random.random() * 0.002):
                await self.take(sequence, self.store.lookup(keys), keys)
        else:
            await self.take(sequence, self.store.lookup(keys), keys)

    async def take(self, sequence: int, hit: Hit, keys: Keys, *, brief: bool = False) -> None:
        """Fetch a hit and compare every byte."""
        with hit, self.pool.lease(max(1, len(hit))) as blocks:
            self.look_at(hit, sequence)
            if brief:
                return
            poison(blocks)
            count = await self.store.fetch(hit, into=blocks)
            if self.engine.holders(blocks):
                raise Violation("a fetch returned while its blocks are held")
            newest = max(self.versions.values(), default=0)
            found = versions_of(blocks, keys, count, newest)
            if None in found:
                raise Violation(f"wrong bytes in pages {found} of sequence {sequence}")
            if count < len(hit) and not self.faulty:
                raise Violation(f"{count} of {len(hit)} leased pages came without a fault")
            self.report.pages += count

    async def hold(self) -> None:
        """Keep a hit over several steps."""
        if len(self.hits) < 3:
            sequence, _, keys = self.choose()
            hit = self.store.lookup(keys)
            hit.__enter__()
            self.hits.append((sequence, hit))

    async def let_go(self) -> None:
        """Use a hit that was kept, and leave it."""
        if self.hits:
            sequence, hit = self.hits.pop(self.random.randrange(len(self.hits)))
            if hit.entries and self.random.random() < 0.7:
                with self.pool.lease(len(hit)) as blocks:
                    count = await self.store.fetch(hit, into=blocks)
                    found = versions_of(
                        blocks, keys_of(sequence, len(hit)), count, max(self.versions.values())
                    )
                    if None in found or (count < len(hit) and not self.faulty):
                        raise Violation(f"a leased hit of {len(hit)} pages gave {found}")
            hit.__exit__(None, None, None)

    def drop(self, sequence: int, keys: Keys) -> None:
        """Remove pages; they are a miss from now on."""
        self.store.remove(keys)
        for page in range(len(keys)):
            self.absent.add((sequence, page))

    async def remove(self) -> None:
        """Remove pages, and sometimes put others at once."""
        sequence, _, keys = self.choose()
        self.drop(sequence, keys)
        if self.random.random() < 0.5:
            await self.put()

    async def evict(self) -> None:
        """Let a few pages go."""
        self.store.evict(self.random.randint(1, 4))

    async def drain(self) -> None:
        """Wait until nothing goes on."""
        await self.store.drain()

    async def stand_still(self) -> None:
        """Let the disk stand still for some steps' worth of time."""
        self.calls.gate.shut()
        try:
            with anyio.move_on_after(0.01):
                await self.put()
        finally:
            self.calls.gate.open()

    # Looking

    def look(self) -> None:
        """Hold the books against the files and the model."""
        store = self.store
        for entry in store.entries():
            if entry.residency is Residency.RESIDENT and self.disk is not None:
                assert entry.disk is not None  # noqa: S101 - the placement has files
                path = self.disk.path(entry.disk)
                if not path.exists():
                    raise Violation(f"{entry!r} is visible and has no file")
        for sequence, hit in self.hits:
            self.look_at(hit, sequence)
        for sequence in range(SEQUENCES):
            seen = store.match(keys_of(sequence, PAGES))
            gone = [page for page in range(seen) if (sequence, page) in self.absent]
            if gone:
                raise Violation(f"pages {gone} of sequence {sequence} were removed and are visible")
        for pool in store.pools():
            if sum(pool.counts()) != pool.blocks:
                raise Violation(f"{pool!r} does not add up")
        self.look_at_files()

    def look_at_files(self) -> None:
        """No byte of a file goes uncounted, also while files are written and removed.

        Bytes count from before the first write until after the last name is gone, and are counted
        on this thread; what worker threads do meanwhile only makes a file smaller or absent.
        """
        if self.disk is None:
            return
        real: dict[int, int] = {}
        for path in self.root.glob("data/*/*"):
            with suppress(FileNotFoundError):
                found = path.stat()
                real[found.st_ino] = found.st_blocks * 512  # two names while it is published
        counted = self.store.statistics().tiers["disk"].charged
        if sum(real.values()) > counted:
            raise Violation(f"{sum(real.values())} bytes are in files, {counted} are counted")

    def look_at(self, hit: Hit, sequence: int) -> None:
        """The pages of a hit are there as long as it is."""
        for entry in hit.entries:
            if entry.residency not in {Residency.RESIDENT, Residency.DOOMED}:
                raise Violation(f"{entry!r} of sequence {sequence} is leased")

    async def finish(self) -> None:
        """Everything ends: what is left agrees with the files to the byte."""
        for _, hit in self.hits:
            hit.__exit__(None, None, None)
        self.hits = []
        self.calls.plan = FaultPlan(0)
        await self.store.drain()  # a call that was under way may have met a fault of the old plan
        self.report.faults += Counter({f.value: n for f, n in self.calls.injected.items()})
        self.store._core.removals.retry()
        await self.store.drain()
        self.look()
        for pool in [self.pool, *self.store.pools()]:
            if pool.counts().free != pool.blocks:
                raise Violation(f"{pool!r} is not free at the end")
        tiers = self.store.statistics().tiers
        if self.disk is not None:
            files = list(self.root.glob("data/*/*"))
            real = sum(path.stat().st_blocks * 512 for path in files)
            if tiers["disk"] != (0, real, 0, 0):
                raise Violation(f"{tiers['disk']} is counted, {real} bytes are there")
            if len(files) != sum(1 for _ in self.store.entries()):
                raise Violation(f"{len(files)} files for {len(list(self.store.entries()))} pages")
        for sequence in range(SEQUENCES):
            keys = keys_of(sequence, PAGES)
            await self.take(sequence, self.store.lookup(keys), keys)
