"""A plan's hold: from its first run until the fence behind finish, whoever releases what."""

import pytest
import torch

from attention import (
    AttentionError,
    PagedDecoder,
    PagedKVCache,
    PageTable,
    PageTableError,
    Plan,
    PlanState,
    Unsupported,
)
from transfer import (
    Engine,
    External,
    HoldConflict,
    HostDevice,
    Launch,
    LeaseError,
    Operation,
    PoolExhausted,
    State,
)

pytestmark = pytest.mark.anyio


def make(pages: int = 6) -> PagedKVCache:
    return PagedKVCache(layers=2, pages=pages, page_size=4, kv_heads=2, head_dim=16)


def state_of(plan: Plan) -> PlanState:
    """Read anew each time: a checker would take a state once seen for lasting."""
    return plan.state


def hold_of(plan: Plan) -> Operation | None:
    return plan.hold


def query(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 4, 16).to(torch.bfloat16)


async def test_pages_are_held_from_the_first_run_until_finish() -> None:
    cache = make()
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        lease = cache.lease(3)
        table = PageTable.of([lease], [9], pool=cache.pool, page_size=4)
        plan = decoder.plan(table, query_heads=4)
        assert state_of(plan) is PlanState.PLANNED
        assert cache.pool.counts().held == 0
        for layer in range(2):
            decoder.run(plan, layer, query())
        assert state_of(plan) is PlanState.HELD
        assert cache.pool.counts().held == 3
        assert engine.holders(lease.handle) == [plan.hold]
        lease.release()
        # Released and still held: the pages are given to nobody.
        assert cache.pool.counts() == (3, 0, 3, 0)
        with cache.lease(3) as others:
            assert set(others.ids).isdisjoint(table.indices)
            with pytest.raises(PoolExhausted, match="3 held by operations"):
                cache.lease(1)
        plan.finish()
        hold = plan.hold
        assert hold is not None
        await hold.wait()
        assert hold.state is State.COMPLETED
        assert cache.pool.counts().free == 6


async def test_one_hold_for_all_pages_and_layers() -> None:
    cache = make(64)
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        with cache.lease(60) as pages:
            table = PageTable.of([pages], [240], pool=cache.pool, page_size=4)
            plan = decoder.plan(table, query_heads=4)
            before = engine.statistics().devices["host"].submitted
            for layer in (0, 1, 0):
                decoder.run(plan, layer, query())
            assert engine.statistics().devices["host"].submitted == before + 1
            plan.finish()
            await engine.drain()


async def test_a_writer_waits_for_the_readers_of_a_plan() -> None:
    cache = make()
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        with cache.lease(2) as pages:
            table = PageTable.of([pages], [8], pool=cache.pool, page_size=4)
            plan = decoder.plan(table, query_heads=4)
            decoder.run(plan, 0, query())
            with pytest.raises(LeaseError):
                pages[0].tensor("key", 0, write=True)
            with pytest.raises(HoldConflict):
                await engine.submit(Launch(lambda: None, writes=[pages]))
            assert plan.hold is not None
            wrote: list[int] = []
            writer = await engine.submit(
                Launch(lambda: wrote.append(1), writes=[pages]), after=plan.hold
            )
            assert writer.state is State.PREPARED
            plan.finish()
            await writer.wait()
            assert wrote == [1]


async def test_pages_that_are_being_written_are_not_run_over() -> None:
    cache = make()
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        with cache.lease(1) as pages:
            table = PageTable.of([pages], [4], pool=cache.pool, page_size=4)
            plan = decoder.plan(table, query_heads=4)
            fill = engine.submit_nowait(External(writes=[pages]))
            with pytest.raises(PageTableError, match="still being written"):
                PageTable.of([pages], [4], pool=cache.pool, page_size=4)
            with pytest.raises(HoldConflict):
                decoder.run(plan, 0, query())
            assert state_of(plan) is PlanState.PLANNED
            fill.finish()
            await fill.wait()
            decoder.run(plan, 0, query())
            plan.finish()
            await engine.drain()


async def test_a_stale_table_is_refused_at_the_first_run() -> None:
    cache = make()
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        lease = cache.lease(1)
        table = PageTable.of([lease], [4], pool=cache.pool, page_size=4)
        plan = decoder.plan(table, query_heads=4)
        lease.release()
        with pytest.raises(LeaseError, match="stale"):
            decoder.run(plan, 0, query())


async def test_an_update_hands_the_hold_over() -> None:
    cache = make()
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        with cache.lease(2) as pages:
            short = PageTable.of([pages[:1]], [4], pool=cache.pool, page_size=4)
            longer = PageTable.of([pages], [5], pool=cache.pool, page_size=4)
            plan = decoder.plan(short, query_heads=4)
            decoder.run(plan, 0, query())
            first = plan.hold
            plan.update(longer)
            assert state_of(plan) is PlanState.PLANNED
            assert hold_of(plan) is None
            plan.begin()
            second = hold_of(plan)
            assert first is not None
            assert second is not None
            assert second is not first
            await first.wait()
            assert engine.holders(pages) == [second]
            plan.finish()
            await engine.drain()
            assert cache.pool.counts().held == 0


async def test_a_finished_plan_is_not_used_again() -> None:
    cache = make()
    async with Engine(HostDevice(threads=1)) as engine:
        decoder = PagedDecoder(engine, cache)
        with cache.lease(1) as pages:
            table = PageTable.of([pages], [4], pool=cache.pool, page_size=4)
            plan = decoder.plan(table, query_heads=4)
            plan.finish()
            plan.finish()
            assert state_of(plan) is PlanState.FINISHED
            with pytest.raises(AttentionError, match="used after finish"):
                decoder.run(plan, 0, query())
            with pytest.raises(AttentionError, match="updated after finish"):
                plan.update(table)


async def test_without_an_engine_the_host_program_answers_for_its_pages() -> None:
    cache = make()
    decoder = PagedDecoder(None, cache)
    with cache.lease(1) as pages:
        table = PageTable.of([pages], [4], pool=cache.pool, page_size=4)
        plan = decoder.plan(table, query_heads=4)
        decoder.run(plan, 0, query())
        assert plan.hold is None
        assert cache.pool.counts().held == 0
        plan.finish()


async def test_queries_that_were_not_planned_are_refused() -> None:
    cache = make()
    decoder = PagedDecoder(None, cache)
    table = PageTable.raw([0, 1], [0], [4], page_size=4, pages=6)
    plan = decoder.plan(table, query_heads=4)
    good = query()
    assert decoder.run(plan, 0, good).shape == good.shape
    for wrong in (
        good.to(torch.float16),
        query(2),
        good[:, :2],
        torch.randn(1, 4, 32).to(torch.bfloat16)[..., ::2],
    ):
        with pytest.raises(Unsupported, match="planned"):
            decoder.run(plan, 0, wrong)


async def test_an_update_by_a_table_of_another_cache_changes_nothing() -> None:
    cache, other = make(), make()
    async with Engine(HostDevice()) as engine:
        decoder = PagedDecoder(engine, cache)
        with cache.lease(1) as mine, other.lease(1) as theirs:
            plan = decoder.plan(
                PageTable.of([mine], [3], pool=cache.pool, page_size=4), query_heads=4
            )
            rows = query()
            before = decoder.run(plan, 0, rows)
            for table in (
                PageTable.of([theirs], [3], pool=other.pool, page_size=4),
                PageTable.raw([0, 1], [5], [3], page_size=8, pages=6),
                PageTable.raw([0, 1], [6], [3], page_size=4, pages=7),
            ):
                with pytest.raises(PageTableError, match=r"cache|pool of 6"):
                    plan.update(table)
                assert state_of(plan) is PlanState.HELD
                assert cache.pool.counts().held == 1
            assert torch.equal(decoder.run(plan, 0, rows), before)
            plan.finish()


@pytest.mark.parametrize("layer", [-1, 2])
async def test_a_layer_that_is_not_there_is_refused_and_holds_nothing(layer: int) -> None:
    cache = make()
    async with Engine(HostDevice()) as engine:
        decoder = PagedDecoder(engine, cache)
        with cache.lease(1) as mine:
            table = PageTable.of([mine], [3], pool=cache.pool, page_size=4)
            plan = decoder.plan(table, query_heads=4)
            with pytest.raises(Unsupported, match=f"layer {layer} of 2"):
                decoder.run(plan, layer, query())
            with pytest.raises(Unsupported, match=f"layer {layer} of 2"):
                decoder.run_with_lse(plan, layer, query())
            assert cache.pool.counts().held == 0


async def test_results_that_kernels_would_write_elsewhere_are_refused() -> None:
    cache = make()
    decoder = PagedDecoder(None, cache)
    with cache.lease(1) as mine:
        table = PageTable.of([mine], [3], pool=cache.pool, page_size=4)
        plan = decoder.plan(table, query_heads=4)
        wide = torch.zeros(1, 4, 32, dtype=torch.bfloat16)
        for out in (
            wide[..., :16],
            wide,
            torch.zeros(2, 1, 4, 16, dtype=torch.bfloat16),
            torch.zeros(1, 4, 16),
            torch.zeros(1, 4, 16, dtype=torch.bfloat16, device="meta"),
        ):
            with pytest.raises(Unsupported, match="out is"):
                decoder.run(plan, 0, query(), out=out)
        assert not wide.any()
