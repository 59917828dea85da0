"""The store against a plain dictionary: random rules, poisoned pages, faults, and a clock by hand."""

import asyncio
import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.tiers.store_kit import Calls

from kvhold.campaigns.store_pages import LAYOUT, fill, keys_of, poison, versions_of
from tiers import DiskTier, Hit, HostTier, KVStore, Placement, PutFailed
from tiers._form import Form
from tiers._residency import Residency
from transfer import Engine, FileDevice, HostDevice, HostPool

SEQUENCES = st.integers(0, 2)
PAGES = st.integers(1, 3)
ERRORS = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS])
NAMES = st.sampled_from(["create", "open", "read", "write", "link", "unlink"])


class StoreMachine(RuleBasedStateMachine):
    """A store beside a model of it.

    The model says for each page which versions may be found: those that were put since it was last
    removed. It also says which pages must be found: those whose put was confirmed while nothing
    failed, was evicted or removed since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may: dict[tuple[int, int], set[int]] = {}
        self.must: set[tuple[int, int]] = set()
        self.hits: list[tuple[int, Hit]] = []
        self.version = 0
        self.late = 0.0

    @initialize(placement=st.sampled_from(Placement), tight=st.booleans())
    def open(self, placement: Placement, tight: bool) -> None:
        self.placement = placement
        self.tight = tight
        self.root = Path(tempfile.mkdtemp(prefix="kvhold-model-"))
        self.calls = Calls()
        self.runner = asyncio.Runner()
        loop = self.runner.get_loop()
        clock = loop.time
        loop.time = lambda: clock() + self.late  # type: ignore[method-assign]
        form = Form(LAYOUT, placement)
        blocks = 5 if tight else 32
        self.pool = HostPool(LAYOUT, 12)
        self.host = (
            HostTier.of(form.stored, form.host_names, blocks=blocks) if form.host_names else None
        )
        quota = 5 * form.file_bytes if tight else None
        self.disk = DiskTier(self.root, quota=quota) if form.file_bytes else None
        self.engine = Engine(HostDevice(threads=2), FileDevice(threads=2, calls=self.calls))

        async def start() -> KVStore:
            self.engine.start()
            store = KVStore(
                self.engine,
                layout=LAYOUT,
                placement=placement,
                host=self.host,
                disk=self.disk,
                write_behind_bytes=max(1, form.file_bytes) * (2 if tight else 16),
            )
            await store.start()
            await store.recovered()
            return store

        self.store = self.runner.run(start())

    def run(self, call: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await call

        return self.runner.run(bounded())

    # Rules

    @rule(sequence=SEQUENCES, pages=PAGES, wait=st.booleans())
    def put(self, sequence: int, pages: int, wait: bool) -> None:
        self.version += 1
        keys = keys_of(sequence, pages)

        async def call() -> bool:
            with self.pool.lease(pages) as blocks:
                fill(blocks, keys, self.version)
                ticket = await self.store.put(keys, blocks)
                poison(blocks)
            for page in range(pages):
                self.may.setdefault((sequence, page), set()).add(self.version)
            if not wait:
                return False
            try:
                await ticket.resident()
            except PutFailed:
                assert ticket.refused or self.calls.fired, "a put failed without a reason"
                return False
            return True

        if self.tight:
            self.must.clear()  # it may have pushed out any page
        if self.run(call()):
            self.must |= {(sequence, page) for page in range(pages)}

    @rule(sequence=SEQUENCES, pages=PAGES)
    def remove(self, sequence: int, pages: int) -> None:
        self.store.remove(keys_of(sequence, pages))
        for page in range(pages):
            self.may[sequence, page] = set()
            self.must.discard((sequence, page))

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        self.store.evict(count)
        self.must.clear()

    @rule(sequence=SEQUENCES)
    def fetch(self, sequence: int) -> None:
        keys = keys_of(sequence, 3)
        hit = self.store.lookup(keys)
        leading = 0
        while (sequence, leading) in self.must and leading < 3:
            leading += 1
        assert len(hit) >= leading or self.store.read_health().degraded
        self.run(self.take(sequence, hit))

    async def take(self, sequence: int, hit: Hit) -> None:
        with hit, self.pool.lease(max(1, len(hit))) as blocks:
            poison(blocks)
            count = await self.store.fetch(hit, into=blocks)
            found = versions_of(blocks, keys_of(sequence, 3), count, self.version)
            for page, version in enumerate(found):
                assert version in self.may.get((sequence, page), set()), (page, version)
            if count < len(hit):
                assert self.calls.fired, f"{count} of {len(hit)} pages came without a fault"

    @precondition(lambda self: len(self.hits) < 2)
    @rule(sequence=SEQUENCES)
    def hold(self, sequence: int) -> None:
        self.hits.append((sequence, self.store.lookup(keys_of(sequence, 3)).__enter__()))

    @precondition(lambda self: self.hits)
    @rule()
    def let_go(self) -> None:
        self.hits.pop()[1].__exit__(None, None, None)

    @rule(number=st.integers(1, 6), error=ERRORS, name=NAMES)
    def fail(self, number: int, error: int, name: str) -> None:
        self.calls.nth(number, error, only=[name])
        self.must.clear()

    @rule()
    def drain(self) -> None:
        self.run(self.store.drain())

    @rule()
    def wait_long(self) -> None:
        """The clock jumps: what was held off is tried again."""
        self.late += 60

    # Invariants

    @invariant()
    def only_whole_pages_are_seen(self) -> None:
        if not hasattr(self, "store"):
            return
        for entry in self.store.entries():
            if entry.residency is Residency.RESIDENT and entry.disk is not None:
                assert self.disk is not None
                assert self.disk.path(entry.disk).exists()
        for sequence in range(3):
            seen = self.store.match(keys_of(sequence, 3))
            assert all(self.may.get((sequence, page)) for page in range(seen))

    @invariant()
    def leased_pages_stay(self) -> None:
        for _, hit in self.hits:
            for entry in hit.entries:
                assert entry.residency in {Residency.RESIDENT, Residency.DOOMED}

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.calls.fail = None
        for _, hit in self.hits:
            hit.__exit__(None, None, None)

        async def end() -> None:
            await self.store.drain()  # what was under way may still meet a fault
            self.store._core.removals.retry()
            await self.store.drain()
            for pool in [self.pool, *self.store.pools()]:
                assert pool.counts().free == pool.blocks
            if self.disk is not None:
                files = list(self.root.glob("data/*/*"))
                real = sum(path.stat().st_blocks * 512 for path in files)
                assert self.disk.counts() == (0, real, 0, 0)
                assert len(files) == sum(1 for _ in self.store.entries())
            await self.store.aclose()
            await self.engine.aclose()

        self.run(end())
        self.runner.close()
        self.pool.close()
        if self.host is not None:
            self.host.close()
        shutil.rmtree(self.root)


def check(examples: int) -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_store_agrees_with_a_dictionary() -> None:
    check(25)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_store_agrees_with_a_dictionary_for_long() -> None:
    check(400)
