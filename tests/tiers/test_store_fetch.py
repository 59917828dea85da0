"""Hits and fetches: leases, aborts, ends."""

import threading
from itertools import permutations
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from tests.tiers.store_kit import keys_of, poison, rig, until, wrong_pages

from tiers import Placement
from tiers._store_fetch import TAKES_AT_ONCE
from transfer import External, HoldConflict

pytestmark = pytest.mark.anyio
PLACEMENTS = pytest.mark.parametrize("placement", Placement)


@PLACEMENTS
async def test_lookup_evict_and_load_in_every_order(tmp_path: Path, placement: Placement) -> None:
    # case 19 (lookup, then evict, a lease of its own for each; a lost one is a shorter prefix)
    one, two = keys_of(2), keys_of(2, start=1)
    orders = list(permutations(["evict", "a", "b"]))
    async with rig(tmp_path, placement=placement) as it:
        for order in orders:
            await it.put(one)
            await it.put(two)
            hits = {"a": it.store.lookup(one), "b": it.store.lookup(two)}
            for step in order:
                if step == "evict":
                    it.store.evict(2)
                else:
                    keys = one if step == "a" else two
                    count = await it.get(keys, hit=hits[step])
                    assert count == len(hits[step])
            await it.store.drain()
        assert all(entry.leases == 0 for entry in it.store.entries())


@PLACEMENTS
async def test_a_lookup_without_a_load_keeps_nothing(tmp_path: Path, placement: Placement) -> None:
    # case 19 (two lookups and one load, a lookup with no load)
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        it.store.lookup(keys)
        with it.store.lookup(keys), it.store.lookup(keys):
            assert it.store.evict(3) == 0
        assert it.store.evict(3) == 3
        await it.store.drain()
        assert it.store.match(keys) == 0


@PLACEMENTS
async def test_a_thousand_aborts_leak_nothing(tmp_path: Path, placement: Placement) -> None:
    # case 44 (abort at every stage, queued, submitted, running, done but not taken)
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement, read_bytes=1) as it:
        await it.put(keys)
        for number in range(250):
            await until(lambda: it.pool.counts().free >= 3)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(it.get, keys)
                    for _ in range(number % 12):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
            if number % 25 == 0:
                await it.store.drain()
                await until(lambda: it.pool.counts().free == it.pool.blocks)
                it.check()
        await it.store.drain()
        assert await it.get(keys) == 3


async def test_a_fetch_returns_when_every_part_has_ended(tmp_path: Path) -> None:
    keys = keys_of(4)
    async with rig(tmp_path) as it:
        await it.put(keys)
        gate = it.calls.gates["read"] = threading.Event()
        with it.store.lookup(keys) as hit, it.lease(4) as pages:
            poison(pages)
            done = anyio.Event()

            async def fetch() -> None:
                assert await it.store.fetch(hit, into=pages) == 4
                done.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fetch)
                await until(it.calls.arrived.is_set)
                assert not done.is_set()
                gate.set()
            assert it.engine.holders(pages) == []
            assert wrong_pages(pages, keys, 4) == []


@PLACEMENTS
async def test_a_fetch_is_ordered_behind_what_it_names(
    tmp_path: Path, placement: Placement
) -> None:
    keys = keys_of(2)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        with it.store.lookup(keys) as hit, it.lease(2) as pages:
            reader = await it.engine.submit(External(reads=[pages]))
            with pytest.raises(HoldConflict):
                await it.store.fetch(hit, into=pages)
            counts: list[int] = []

            async def fetch() -> None:
                counts.append(await it.store.fetch(hit, into=pages, after=reader))

            poison(pages[:0])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fetch)
                for _ in range(50):
                    await anyio.lowlevel.checkpoint()
                assert counts == []
                reader.finish()
            assert counts == [2]
            assert wrong_pages(pages, keys, 2) == []


async def test_what_lands_while_there_is_enough_to_do_is_taken_together(tmp_path: Path) -> None:
    keys = keys_of(12)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys)
        with it.store.lookup(keys) as hit, it.lease(12) as pages:
            poison(pages)
            reader = await it.engine.submit(External(reads=[pages]))
            counts: list[int] = []

            async def fetch() -> None:
                counts.append(await it.store.fetch(hit, into=pages, after=reader))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fetch)
                nbytes = 12 * it.store.form.file_bytes
                await until(lambda: it.store.statistics().read_bytes == nbytes)
                taking = [op for op in it.engine.holders(pages) if op.name == "fetch pages"]
                assert 0 < len(taking) < TAKES_AT_ONCE
                reader.finish()
            assert counts == [12]
            assert wrong_pages(pages, keys, 12) == []


async def test_a_bad_page_ends_the_prefix_and_the_others_are_kept(tmp_path: Path) -> None:
    keys = keys_of(4)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys)
        (path,) = it.files(f"data/*/{keys.digests[2].hex()}-*")
        path.write_bytes(bytes(path.stat().st_size))
        assert await it.get(keys) == 2
        assert it.store.match(keys) == 2
        assert it.store.statistics().dropped == 1
        await it.put(keys)
        assert await it.get(keys) == 4
