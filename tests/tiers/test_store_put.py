"""Putting under pressure: eviction, quotas, refusals, waiting, foreign pages, layouts."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from tests.tiers.store_kit import (
    LAYOUT,
    PROVENANCE,
    fill,
    keys_of,
    page_bytes,
    rig,
    until,
    wrong_pages,
)

from tiers import CacheKind, PageLayout, PageOrder, Placement, PutFailed, S3Fifo, view_cache
from tiers._form import Form
from tiers._store_put import group_size
from transfer import External, HoldConflict, Pool

pytestmark = pytest.mark.anyio

PLACEMENTS = pytest.mark.parametrize("placement", Placement)
SPLIT_FILE = 12288
WHOLE_FILE = 16384


@pytest.mark.parametrize(
    ("heads", "pages", "expected"),
    [
        (1, 1, 8),  # pages of 128 KiB: a megabyte in any case
        (1, 256, 32),  # four at most
        (1, 128, 16),  # an eighth of the call
        (8, 3, 1),  # pages of 1 MiB
        (8, 16, 2),
        (8, 256, 4),
        (64, 256, 1),  # pages of 8 MiB
    ],
)
def test_pages_are_encoded_in_groups_that_can_be_shared(
    heads: int, pages: int, expected: int
) -> None:
    layout = PageLayout(layers=16, page_size=16, kv_heads=heads, head_dim=128, order=PageOrder.NHD)
    assert group_size(Form(layout, Placement.WHOLE_DISK), pages) == expected


@PLACEMENTS
@pytest.mark.parametrize("policy", [None, S3Fifo], ids=["lru", "s3fifo"])
async def test_new_pages_push_out_old_ones(
    tmp_path: Path, placement: Placement, policy: object
) -> None:
    # case 26 (capacity)
    quota = None if placement is Placement.WHOLE_HOST else 4 * WHOLE_FILE
    options: dict[str, Any] = {} if policy is None else {"policy": policy}
    async with rig(tmp_path, placement=placement, blocks=4, quota=quota, **options) as it:
        for start in range(12):
            ticket = await it.put(keys_of(2, start=start))
            assert not ticket.refused
            for counts in it.store.statistics().tiers.values():
                assert counts.charged <= 4 * WHOLE_FILE
            assert await it.get(keys_of(2, start=start)) == 2
        assert it.store.statistics().evicted >= 20


@PLACEMENTS
async def test_a_put_never_evicts_itself(tmp_path: Path, placement: Placement) -> None:
    quota = None if placement is Placement.WHOLE_HOST else 3 * WHOLE_FILE
    async with rig(tmp_path, placement=placement, blocks=3, quota=quota) as it:
        await it.put(keys_of(2, start=1))
        ticket = await it.put(keys_of(8), wait=False)
        assert ticket.stored >= 3
        assert min(ticket.refused) == ticket.stored
        await it.store.drain()
        assert await it.get(keys_of(8)) == ticket.stored


@PLACEMENTS
async def test_a_put_inside_a_hit_refuses_instead_of_waiting(
    tmp_path: Path, placement: Placement
) -> None:
    # case 19 (leases, where what a Hit or a doomed page holds does not end by itself)
    quota = None if placement is Placement.WHOLE_HOST else 2 * SPLIT_FILE
    if placement is Placement.WHOLE_DISK:
        quota = 2 * WHOLE_FILE
    async with rig(tmp_path, placement=placement, blocks=2, quota=quota) as it:
        await it.put(keys_of(2))
        with it.store.lookup(keys_of(2)), anyio.fail_after(20):
            ticket = await it.put(keys_of(1, start=1), wait=False)
            assert len(ticket.refused) == 1
            it.store.remove(keys_of(2))
            ticket = await it.put(keys_of(1, start=1), wait=False)
            assert len(ticket.refused) == 1
        assert (await it.put(keys_of(1, start=1))).stored == 1


@PLACEMENTS
async def test_a_tenant_gives_way_itself(tmp_path: Path, placement: Placement) -> None:
    async with rig(tmp_path, placement=placement, quotas={"a": 40000}) as it:
        page = it.store._core.page_bytes()
        mine = replace(PROVENANCE, tenant="a", salt=b"s")
        theirs = keys_of(3)
        await it.put(theirs)
        for start in range(40000 // page + 4 if page > 4096 else 4):
            ticket = await it.put(keys_of(1, start=start, provenance=mine))
            assert not ticket.refused
            assert it.store.statistics().tenants.get("a", 0) <= 40000
        assert await it.get(theirs) == 3
        if page * 4 > 40000:
            assert it.store.statistics().evicted > 0


async def test_pages_are_admitted_at_their_second_offer(tmp_path: Path) -> None:
    async with rig(tmp_path, admission=2) as it:
        first = await it.put(keys_of(2), wait=False)
        assert first.refused == {0: "not admitted", 1: "not admitted"}
        assert (await it.put(keys_of(2))).stored == 2
        assert await it.get(keys_of(2)) == 2


async def test_a_refused_page_is_offered_again(tmp_path: Path) -> None:
    # case 40 (three pages, room for two, room later)
    async with rig(tmp_path, blocks=2) as it:
        with it.store.lookup(keys_of(3)):
            ticket = await it.put(keys_of(3), wait=False)
        assert list(ticket.refused) == [2]
        await it.store.drain()
        it.store.remove(keys_of(3)[:1])
        await it.store.drain()
        filled = await it.put(keys_of(3)[1:])
        assert (filled.stored, filled.present) == (1, 1)


async def test_pages_of_one_value_that_is_not_finite(tmp_path: Path) -> None:
    keys = keys_of(3)
    async with rig(tmp_path, nonfinite="refuse") as it:
        with it.lease(3) as pages:
            fill(pages, keys)
            pages[1].tensor("value", 0, write=True)[0, 0, 0] = float("nan")
            ticket = await it.store.put(keys, pages)
        with pytest.raises(PutFailed, match="1 NaN") as caught:
            await ticket.resident()
        assert list(caught.value.pages) == [1]
        assert await it.get(keys) == 1


@PLACEMENTS
async def test_pages_of_another_program(tmp_path: Path, placement: Placement) -> None:
    # case 16, 17 (a paged cache with layers of its own, keys and values interleaved)
    keys = keys_of(4)
    kind = CacheKind.BLOCK_FIRST_NHD
    caches = [torch.zeros(8, 2, 4, 2, 8, dtype=torch.bfloat16) for _ in range(LAYOUT.layers)]
    view = view_cache(LAYOUT, [[cache] for cache in caches], kind=kind)
    foreign = Pool.over(view.tensors, view)
    async with rig(tmp_path, placement=placement, write_behind_bytes=1, read_bytes=1) as it:
        with it.lease(4) as pages:
            fill(pages, keys)
            await it.engine.copy(pages, foreign.blocks_of([1, 3, 5, 7]))
        await (await it.store.put(keys, foreign.blocks_of([1, 3, 5, 7]))).resident()
        for cache in caches:
            cache.view(torch.int16).fill_(0x2525)
        assert await it.get(keys) == 4
        with it.store.lookup(keys) as hit:
            assert await it.store.fetch(hit, into=foreign.blocks_of([0, 2, 4, 6])) == 4
        with it.lease(4) as pages:
            await it.engine.copy(foreign.blocks_of([0, 2, 4, 6]), pages)
            assert wrong_pages(pages, keys, 4) == []
        for cache in caches:
            assert bool((cache.view(torch.int16)[1::2] == 0x2525).all())


async def test_foreign_pages_are_quiet_when_a_cancelled_call_returns(tmp_path: Path) -> None:
    # case 9 (cancel in the middle), on memory that no pool keeps
    keys = keys_of(4)
    caches = [torch.zeros(4, 2, 4, 2, 8, dtype=torch.bfloat16) for _ in range(LAYOUT.layers)]
    view = view_cache(LAYOUT, [[c] for c in caches], kind=CacheKind.BLOCK_FIRST_NHD)
    foreign = Pool.over(view.tensors, view)
    blocks = foreign.blocks_of([0, 1, 2, 3])
    async with rig(tmp_path, write_behind_bytes=1) as it:
        gate = it.calls.gates["write"] = threading.Event()
        for _ in range(20):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(it.store.put, keys, blocks)
                    await anyio.lowlevel.checkpoint()
                    scope.cancel()
            assert it.engine.holders(blocks) == []
        gate.set()


async def test_a_put_is_ordered_behind_what_it_names(tmp_path: Path) -> None:
    # case 2 (stream order)
    keys = keys_of(2)
    async with rig(tmp_path) as it:
        with it.lease(2) as pages:
            writer = await it.engine.submit(External(writes=[pages]))
            with pytest.raises(HoldConflict):
                await it.store.put(keys, pages)
            await it.store.drain()
            assert it.store.match(keys) == 0
            async with anyio.create_task_group() as tasks:
                tickets = []

                async def put() -> None:
                    tickets.append(await it.store.put(keys, pages, after=writer))

                tasks.start_soon(put)
                await until(lambda: it.store.statistics().pages == 2)
                assert tickets == []
                for block in pages:  # what the writer writes, as late as it can
                    view = pages.pool.storage.view(pages.pool.address(0, block.id), block.nbytes)
                    number = [b.id for b in pages].index(block.id)
                    view[:] = page_bytes(keys.digests[number])
                writer.finish()
            await tickets[0].resident()
        assert await it.get(keys) == 2


async def test_a_put_that_is_cancelled_leaves_whole_pages_or_none(tmp_path: Path) -> None:
    # case 21 (the task is dropped), case 44 (aborts leak nothing)
    async with rig(tmp_path, write_behind_bytes=1) as it:
        for start in range(30):
            keys = keys_of(4, start=start)
            with it.lease(4) as pages:
                fill(pages, keys)
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(it.store.put, keys, pages)
                        for _ in range(start % 6):
                            await anyio.lowlevel.checkpoint()
                        scope.cancel()
            await it.store.drain()
            it.check()
            assert await it.get(keys) == it.store.match(keys)
            again = await it.put(keys)
            assert not again.refused
            it.store.remove(keys)
            await it.store.drain()


async def test_keys_without_values_are_one_component(tmp_path: Path) -> None:
    layout = replace(LAYOUT, value=None)
    provenance = replace(PROVENANCE, layout=layout, scheme=None, scope=None)
    keys = keys_of(2, provenance=provenance)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, layout=layout) as it:
        await it.put(keys)
        assert await it.get(keys) == 2


async def test_bytes_by_tier(tmp_path: Path) -> None:
    """The share of a 16-bit page: 0.5 in host memory, 0.25 on disk, headers and padding beside."""
    layout = replace(LAYOUT, layers=16, page_size=16, kv_heads=8, head_dim=128, value_dim=128)
    provenance = replace(PROVENANCE, layout=layout)
    keys = keys_of(4, provenance=provenance)
    async with rig(tmp_path, layout=layout, pages=4, blocks=4) as it:
        await it.put(keys)
        tiers = it.store.statistics().tiers
        wide = 4 * layout.block_layout.nbytes
        assert tiers["host"].resident == wide // 2
        # 4096 bytes of header, and one block of scales, for each page of 1 MiB.
        assert tiers["disk"].resident == wide // 4 + 4 * (4096 + 4096)
        real = sum(path.stat().st_blocks * 512 for path in it.files())
        assert real == tiers["disk"].resident
        assert tiers["host"].resident + real <= 0.76 * wide
        assert await it.get(keys) == 4
