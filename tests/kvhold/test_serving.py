"""The server: answers over restored, half-restored and late pages, all equal to computed ones."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from sniffio import current_async_library
from tests.kvhold import tiny

from kvhold.demo_faults import ShakyCalls, value_files
from kvhold.serving import Answer, Request, Server, Stepper
from kvhold.serving_pages import PageRoom, cache_for, provenance_of
from tiers import DiskTier, HostTier, KVStore, Placement, PutFailed
from transfer import Engine, FileDevice, HostDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.anyio
PAGE, CHUNK = 8, 16
DOCUMENT = [(7 * n) % 113 for n in range(64)]
REQUESTS = [Request(f"{q}", (*DOCUMENT, q, 5, 9), 6) for q in (1, 2, 3)]


class World:
    """A model, pages, and a store on files whose reads may be slow."""

    def __init__(self, engine: Engine, store: KVStore, calls: ShakyCalls, disk: DiskTier) -> None:
        self.engine = engine
        self.store = store
        self.calls = calls
        self.disk = disk
        self.cache = CACHE
        self.room = PageRoom(CACHE)
        self.stepper = Stepper(engine, CACHE, MODEL, chunk=CHUNK)

    def server(self, *, tiers: bool = True) -> Server:
        return Server(
            self.stepper,
            self.room,
            provenance=provenance_of(MODEL, CACHE, chunk=CHUNK),
            store=self.store if tiers else None,
        )


MODEL = tiny.model()
CACHE = cache_for(MODEL, pages=40, page_size=PAGE)


@asynccontextmanager
async def world(folder: Path, failing: tuple[int, ...] = ()) -> AsyncIterator[World]:
    calls = ShakyCalls(failing, slow_every=0, seconds=0.2)
    host = HostTier.of(CACHE.page_layout, ("key",), blocks=16)
    disk = DiskTier(folder)
    try:
        async with (
            Engine(HostDevice(), FileDevice(calls=calls)) as engine,
            KVStore(
                engine,
                layout=CACHE.page_layout,
                placement=Placement.SPLIT,
                host=host,
                disk=disk,
            ) as store,
        ):
            yield World(engine, store, calls, disk)
    finally:
        host.close()
    assert CACHE.pool.counts().free == CACHE.pool.blocks


def same(found: list[Answer], expected: list[Answer]) -> bool:
    return [(a.tokens, a.bits) for a in found] == [(a.tokens, a.bits) for a in expected]


async def test_restored_answers_equal_computed_ones_bit_for_bit(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        computed = await w.server(tiers=False).serve(REQUESTS, tasks=1)
        assert [answer.how for answer in computed] == ["computed"] * 3
        assert len({tuple(answer.tokens) for answer in computed}) > 1
        await w.server().keep(DOCUMENT)
        restored = await w.server().serve(REQUESTS, tasks=3)
        assert [answer.how for answer in restored] == ["restored"] * 3
        assert [answer.computed for answer in restored] == [3] * 3
        assert same(restored, computed)


async def test_a_lost_page_costs_the_rest_of_its_chunk_and_no_bit(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        computed = await w.server(tiers=False).serve(REQUESTS, tasks=1)
        await w.server().keep(DOCUMENT)
        value_files(w.store, w.disk)[5].unlink()
        found = await w.server().serve(REQUESTS[:1], tasks=1)
        assert (found[0].how, found[0].restored, found[0].computed) == ("in part", 4, 67 - 32)
        assert same(found, computed[:1])


async def test_a_page_that_could_not_be_written_is_named_and_recomputed(tmp_path: Path) -> None:
    async with world(tmp_path, failing=(2,)) as w:
        computed = await w.server(tiers=False).serve(REQUESTS, tasks=1)
        with pytest.raises(PutFailed, match="No space left"):
            await w.server().keep(DOCUMENT)
        found = await w.server().serve(REQUESTS, tasks=2)
        assert {answer.how for answer in found} <= {"in part", "computed"}
        assert same(found, computed)


async def test_a_slow_fetch_is_left_and_its_pages_come_back_when_quiet(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        computed = await w.server(tiers=False).serve(REQUESTS, tasks=1)
        await w.server().keep(DOCUMENT)
        w.calls.slow_every = 1
        hasty = Request(REQUESTS[0].name, REQUESTS[0].tokens, 6, patience=0.02)
        found = await w.server().serve([hasty], tasks=1)
        w.calls.slow_every = 0
        assert (found[0].late, found[0].how) == (True, "computed")
        assert same(found, computed[:1])
        assert same(await w.server().serve(REQUESTS, tasks=2), computed)


async def test_a_cancelled_request_gives_its_pages_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        computed = await w.server(tiers=False).serve(REQUESTS, tasks=1)
        await w.server().keep(DOCUMENT)
        w.calls.slow_every = 1
        with anyio.move_on_after(0.02) as scope:
            await w.server().answer(REQUESTS[0])
        w.calls.slow_every = 0
        assert scope.cancelled_caught
        await w.engine.drain()
        assert w.cache.pool.counts().free == w.cache.pool.blocks
        assert same(await w.server().serve(REQUESTS, tasks=1), computed)


async def test_keeping_what_is_there_computes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.server().keep(DOCUMENT)
        before = w.store.statistics().offered
        await w.server().keep(DOCUMENT[:32])
        assert w.store.statistics().offered == before


async def test_a_shared_prefix_is_read_where_it_lies(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        computed = await w.server(tiers=False).serve(REQUESTS, tasks=1)
        lease = await w.room.take(8)
        await w.stepper.prefill(lease.handle, DOCUMENT, 0, Answer("prefix"))
        server = w.server(tiers=False)
        found = [await server.answer(request, prefix=lease.handle) for request in REQUESTS]
        assert [answer.computed for answer in found] == [3] * 3
        assert same(found, computed)
        lease.release()


async def test_times_add_up(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        began = time.perf_counter()
        (answer,) = await w.server(tiers=False).serve(REQUESTS[:1], tasks=1)
        assert 0 < answer.first <= answer.total <= time.perf_counter() - began


async def test_a_chunk_is_whole_pages(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(ValueError, match="whole pages of 8"):
            Stepper(w.engine, w.cache, MODEL, chunk=12)


class Gate:
    """Stops the model inside a step until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside = threading.Event()
        self.open = threading.Event()
        forward = MODEL.forward

        def gated(*args: Any, **kwargs: Any) -> Tensor:
            self.inside.set()
            assert self.open.wait(30)
            return forward(*args, **kwargs)

        monkeypatch.setattr(MODEL, "forward", gated)


async def test_asyncios_own_cancellation_frees_no_page_that_the_model_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if current_async_library() != "asyncio":
        pytest.skip("asyncio's own Task.cancel()")
    async with world(tmp_path) as w:
        gate = Gate(monkeypatch)
        task = asyncio.ensure_future(w.server(tiers=False).answer(REQUESTS[0]))
        await anyio.to_thread.run_sync(gate.inside.wait, 30)
        for _ in range(2):  # the second strikes whoever waits for the thread
            task.cancel()
            await anyio.wait_all_tasks_blocked()
            assert w.cache.pool.counts().free == w.cache.pool.blocks - 10
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await w.engine.drain()
        assert w.cache.pool.counts().free == w.cache.pool.blocks


async def test_a_request_that_is_cancelled_while_it_waits_for_the_model_gives_its_pages_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as w:
        gate = Gate(monkeypatch)
        server = w.server(tiers=False)
        async with anyio.create_task_group() as group:
            group.start_soon(server.answer, REQUESTS[0])
            await anyio.to_thread.run_sync(gate.inside.wait, 30)
            async with anyio.create_task_group() as second:
                second.start_soon(server.answer, REQUESTS[1])
                await anyio.wait_all_tasks_blocked()
                second.cancel_scope.cancel()
            with anyio.fail_after(30):
                w.room.give_back(await w.room.take(w.cache.pool.blocks - 10))
            gate.open.set()


async def test_cancelled_between_late_pages_and_new_ones_is_a_cancellation(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.server().keep(DOCUMENT)
        w.calls.slow_every = 1
        hasty = Request("hasty", REQUESTS[0].tokens, 6, patience=0.02)
        leases = [await w.room.take(w.cache.pool.blocks - 10)]
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(w.server().answer, hasty)
                await anyio.wait_all_tasks_blocked()
                leases.append(await w.room.take(10))  # those that it leaves
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        w.calls.slow_every = 0
        for lease in leases:
            w.room.give_back(lease)
        assert scope.cancelled_caught


async def test_a_prefix_in_pages_counts_and_the_tiers_are_not_asked_for_it(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        computed = await w.server(tiers=False).serve(REQUESTS, tasks=1)
        await w.server().keep(DOCUMENT)
        lease = await w.room.take(4)
        await w.stepper.prefill(lease.handle, DOCUMENT[:32], 0, Answer("prefix"))
        found = [await w.server().answer(request, prefix=lease.handle) for request in REQUESTS]
        assert same(found, computed)
        lease.release()


@pytest.mark.parametrize("tokens", [64, 60, 24, 9])
@pytest.mark.parametrize("pages", [8, 7, 3, 1])
async def test_of_a_prefix_whole_chunks_count_up_to_the_last_token(
    tmp_path: Path, tokens: int, pages: int
) -> None:
    async with world(tmp_path) as w:
        request = Request("short", tuple(DOCUMENT[:tokens]), 3)
        server = w.server(tiers=False)
        computed = await server.answer(request)
        lease = await w.room.take(8)
        await w.stepper.prefill(lease.handle, DOCUMENT, 0, Answer("prefix"))
        assert same([await server.answer(request, prefix=lease.handle[:pages])], [computed])
        lease.release()


@pytest.mark.parametrize(("tokens", "new"), [((), 3), ((1, 2), 0), ((1, 2), -1)])
def test_a_request_has_a_prompt_and_wants_a_token(tokens: tuple[int, ...], new: int) -> None:
    with pytest.raises(ValueError, match="at least one of each"):
        Request("nothing", tokens, new)
