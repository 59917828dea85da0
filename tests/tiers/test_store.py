"""The store's verbs, in every placement, on every loop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.tiers.store_kit import (
    LAYOUT,
    PROVENANCE,
    SCALES,
    STATIC,
    STATIC_PROVENANCE,
    THROUGH,
    fill,
    keys_of,
    poison,
    rig,
    wrong_pages,
)

from tiers import (
    DiskTier,
    KVStore,
    PageLayout,
    PageOrder,
    Placement,
    Provenance,
    PutFailed,
    ScaleScope,
    StaticScales,
    TierBusy,
)
from tiers._team import Team
from tiers.format import parse_v3, seal_v3
from transfer import BlockLayout, EngineClosed, HostPool, LayoutMismatch, LeaseError

pytestmark = pytest.mark.anyio

PLACEMENTS = pytest.mark.parametrize("placement", Placement)


@PLACEMENTS
@pytest.mark.parametrize("layout", [LAYOUT, THROUGH, STATIC], ids=["computed", "through", "static"])
async def test_what_was_put_comes_back(
    tmp_path: Path, placement: Placement, layout: PageLayout
) -> None:
    fixed = SCALES.digest if layout is STATIC else b""
    provenance = Provenance(model="m", revision="r", layout=layout, static_scales=fixed)
    keys = keys_of(5, provenance=provenance)
    async with rig(tmp_path, placement=placement, layout=provenance.layout) as it:
        assert await it.get(keys) == 0
        ticket = await it.put(keys)
        assert (ticket.stored, ticket.present, ticket.refused) == (5, 0, {})
        assert await it.get(keys) == 5
        assert it.store.match(keys) == 5
        report = await it.store.verify()
        assert (report.checked, dict(report.damaged)) == (5, {})


@PLACEMENTS
async def test_sizes_around_a_page(tmp_path: Path, placement: Placement) -> None:
    # case 51 (zero, one, a page less one, a page, a page and one, a load inside a prefix)
    async with rig(tmp_path, placement=placement) as it:
        for tokens in (0, 1, 3, 4, 5, 8):
            keys = PROVENANCE.keys(range(100 * tokens, 100 * tokens + tokens), extra=b"")
            await it.put(keys)
            assert await it.get(keys) == tokens // 4
        keys = keys_of(4)
        await it.put(keys)
        for limit, pages in ((0, 0), (3, 0), (4, 1), (15, 3), (16, 4), (99, 4), (-1, 0)):
            hit = it.store.lookup(keys, max_tokens=limit)
            assert (hit.pages, hit.tokens) == (pages, 4 * pages)
            assert await it.get(keys, hit=hit) == pages


@PLACEMENTS
async def test_putting_again_changes_nothing_and_fills_gaps(
    tmp_path: Path, placement: Placement
) -> None:
    # case 40 (holes, where a lookup stops until the page is put again)
    keys = keys_of(4)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        again = await it.put(keys)
        assert (again.stored, again.present) == (0, 4)
        assert it.store.remove(keys[1:2]) == 1
        await it.store.drain()
        assert it.store.match(keys) == 1
        filled = await it.put(keys)
        assert (filled.stored, filled.present) == (1, 3)
        assert await it.get(keys) == 4


async def test_other_provenance_is_a_miss_or_refused(tmp_path: Path) -> None:
    # case 35 (settings left out of the key)
    async with rig(tmp_path) as it:
        await it.put(keys_of(2))
        for change in ({"rank": 1, "world_size": 2}, {"revision": "s"}, {"tenant": "t"}):
            other = replace(PROVENANCE, **change)
            assert it.store.match(keys_of(2, provenance=other)) == 0
        for layout in (replace(LAYOUT, order=PageOrder.HND), replace(LAYOUT, key="float16")):
            wrong = Provenance(model="m", revision="r", layout=layout)
            with pytest.raises(LayoutMismatch, match="keys"):
                it.store.lookup(keys_of(2, provenance=wrong))
        assert it.store.match(keys_of(2)) == 2


async def test_keys_of_other_static_scales_never_match(tmp_path: Path) -> None:
    # case 59 (scales that a reader forgets)
    keys = keys_of(2, provenance=STATIC_PROVENANCE)
    other_scales = StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0000002]])
    other = replace(STATIC_PROVENANCE, static_scales=other_scales.digest)
    assert not set(keys.digests) & set(keys_of(2, provenance=other).digests)
    options: dict[str, Any] = {"placement": Placement.WHOLE_DISK, "layout": STATIC}
    async with rig(tmp_path, **options) as it:
        await it.put(keys)
        for wrong in (other, replace(STATIC_PROVENANCE, static_scales=b"by hand")):
            with pytest.raises(LayoutMismatch, match="keys"):
                it.store.lookup(keys_of(2, provenance=wrong))
    async with rig(tmp_path, static_scales=other_scales, **options) as it:
        assert await it.get(keys_of(2, provenance=other)) == 0
        with pytest.raises(LayoutMismatch, match="keys"):
            it.store.lookup(keys)


async def test_a_file_of_other_static_scales_is_a_miss(tmp_path: Path) -> None:
    # The file names the right key, provenance and put, and its checksums are right.
    keys = keys_of(1, provenance=STATIC_PROVENANCE)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, layout=STATIC) as it:
        await it.put(keys)
        (path,) = it.files()
        parsed = parse_v3(memoryview(path.read_bytes()))
        blob = bytearray(path.read_bytes())
        scales = parsed.plan.view(memoryview(blob), "value_scale")
        assert bytes(scales) == SCALES.data
        scales[3] ^= 0x01
        seal_v3(parsed.plan, memoryview(blob), parsed.identity, Team())
        path.write_bytes(blob)
        assert await it.get(keys) == 0
        assert it.store.statistics().faults == {"ScaleError": 1}
        assert it.store.match(keys) == 0


async def test_wrong_blocks_are_refused_before_anything_is_taken(tmp_path: Path) -> None:
    keys = keys_of(3)
    async with rig(tmp_path) as it:
        with it.lease(2) as pages, pytest.raises(LayoutMismatch, match="2 blocks, expected 3"):
            await it.store.put(keys, pages)
        await it.put(keys)
        with (
            it.lease(2) as pages,
            it.store.lookup(keys) as hit,
            pytest.raises(LayoutMismatch, match="2 blocks, expected 3"),
        ):
            await it.store.fetch(hit, into=pages)
        async with rig(tmp_path / "other", layout=THROUGH) as other:
            with other.lease(3) as pages, pytest.raises(LayoutMismatch, match="value"):
                await it.store.put(keys_of(3, start=7), pages)


async def test_a_hit_has_to_be_entered_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.put(keys_of(1))
        hit = it.store.lookup(keys_of(1))
        with it.lease(1) as pages, pytest.raises(LeaseError, match="not entered"):
            await it.store.fetch(hit, into=pages)
        with hit, pytest.raises(LeaseError, match="second time"):
            hit.__enter__()


async def test_a_hit_that_is_not_entered_cannot_be_left(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.put(keys_of(2))
        with it.store.lookup(keys_of(2)) as first:
            other = it.store.lookup(keys_of(2))
            with pytest.raises(LeaseError, match="not entered"):
                other.__exit__(None, None, None)
            assert [entry.leases for entry in first.entries] == [1, 1]
            assert it.store.evict(2) == 0
        with pytest.raises(LeaseError, match="not entered"):
            first.__exit__(None, None, None)
        assert [entry.leases for entry in first.entries] == [0, 0]


@PLACEMENTS
async def test_a_hit_that_is_held_past_closing_keeps_nothing(
    tmp_path: Path, placement: Placement
) -> None:
    # The folder is somebody else's when the store is closed: nothing may be removed after that.
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        with it.store.lookup(keys) as hit:
            it.store.remove(keys[:2])
            await it.store.aclose()
            left = [path.name for path in it.files()]
            assert len(left) == (1 if placement is Placement.WHOLE_DISK else 0)
            assert [entry.leases for entry in hit.entries] == [0, 0, 0]
        assert not it.store._core.busy
        assert [path.name for path in it.files()] == left


async def test_one_block_may_be_given_for_one_page(tmp_path: Path) -> None:
    keys = keys_of(1)
    async with rig(tmp_path) as it:
        with it.pool.lease() as page, it.lease(2) as two:
            block = two[:1]
            fill(block, keys)
            page.view(write=True)[:] = block[0].view()
            await (await it.store.put(keys, page)).resident()
            page.view(write=True)[:] = bytes(page.nbytes)
            with it.store.lookup(keys) as hit:
                assert await it.store.fetch(hit, into=page) == 1
            assert bytes(page.view()) == bytes(block[0].view())


async def test_after_closing_there_is_nothing(tmp_path: Path) -> None:
    keys = keys_of(3)
    async with rig(tmp_path) as it:
        await it.put(keys)
        await it.store.aclose()
        await it.store.aclose()
        assert it.files() == []
        with pytest.raises(EngineClosed):
            it.store.match(keys)
        with it.lease(3) as pages, pytest.raises(EngineClosed):
            await it.store.put(keys, pages)
        with pytest.raises(EngineClosed):
            await it.store.start()


async def test_a_whole_file_outlives_the_store(tmp_path: Path) -> None:
    # case 21, 29 (a new process on the same folder)
    keys = keys_of(4)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys)
    steps: list[tuple[int, int]] = []
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, recover=False) as it:
        assert await it.store.recovered() == 4
        assert await it.get(keys) == 4
        again = await it.put(keys)
        assert again.present == 4
    assert steps == []


async def test_tickets_say_when_pages_are_gone(tmp_path: Path) -> None:
    keys = keys_of(2)
    async with rig(tmp_path) as it:
        ticket = await it.put(keys)
        with it.store.lookup(keys) as hit:
            assert it.store.remove(keys) == 2
            assert it.store.match(keys) == 0  # a miss at once
            assert len(it.files()) == 2  # and its bytes stay until the last lease has ended
            with it.lease(2) as pages:
                poison(pages)
                assert await it.store.fetch(hit, into=pages) == 2
                assert wrong_pages(pages, keys, 2) == []
        with anyio.fail_after(20):
            await ticket.gone()
        assert it.files() == []


async def test_two_puts_of_one_key_share_one_entry(tmp_path: Path) -> None:
    # case 22 (two tasks put one key)
    keys = keys_of(3)
    async with rig(tmp_path) as it:
        tickets = []

        async def one() -> None:
            tickets.append(await it.put(keys))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(one)
        assert sum(ticket.stored for ticket in tickets) == 3
        assert len(it.files()) == 3
        assert await it.get(keys) == 3


async def test_a_store_needs_the_tiers_of_its_placement(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        for placement in Placement:
            with pytest.raises(LayoutMismatch, match="host tier None"):
                KVStore(it.engine, layout=LAYOUT, placement=placement)


@PLACEMENTS
async def test_staging_in_memory_of_the_callers(tmp_path: Path, placement: Placement) -> None:
    made: list[HostPool] = []

    def make(layout: BlockLayout, blocks: int, *, name: str) -> HostPool:
        made.append(HostPool(layout, blocks, name=name))
        return made[-1]

    async with rig(tmp_path, placement=placement, make_pool=make) as it:
        assert it.store.pools() == made
        await it.put(keys_of(5))
        assert await it.get(keys_of(5)) == 5
        assert not any(pool._closed for pool in made)
    assert len(made) == (2 if placement is Placement.WHOLE_HOST else 4)
    assert all(pool._closed for pool in made)


async def test_staging_is_given_back_when_the_store_cannot_start(tmp_path: Path) -> None:
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        options: dict[str, Any] = {"layout": LAYOUT, "placement": Placement.WHOLE_DISK}
        store = KVStore(it.engine, disk=DiskTier(tmp_path), **options)
        with pytest.raises(TierBusy):
            async with store:
                pytest.fail("it has no folder")
        assert all(pool._closed for pool in store.pools())
        with pytest.raises(EngineClosed):
            await store.start()
        never = KVStore(it.engine, disk=DiskTier(tmp_path), **options)
        await never.aclose()
        assert all(pool._closed for pool in never.pools())


async def test_a_refusal_names_pages_and_reasons(tmp_path: Path) -> None:
    async with rig(tmp_path, blocks=2) as it:
        ticket = await it.put(keys_of(4), wait=False)
        assert ticket.refused == {2: "host full", 3: "host full"}
        with pytest.raises(PutFailed, match="2 pages are not resident") as caught:
            await ticket.resident()
        assert caught.value.pages == {2: "host full", 3: "host full"}
        assert dict(it.store.statistics().refused) == {"host full": 2}
        assert await it.get(keys_of(4)) == 2
