"""Order on a real GPU, in both directions, and the damage that is seen without it."""

import threading
from typing import Any

import pytest
import torch
from tests.gpu.transfer.rig import cu, device, fill_host, host_bytes, layout, pools, sleep

from transfer import BadWork, Copy, Engine, External, Launch, NotPosted, OrderRequired
from transfer.cuda import DevicePool, Way

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.may_block]

ROUNDS = 100


async def stores(after: Any, way: Way) -> int:
    """Rounds of "spin, write a pattern, store" whose stored bytes are the pattern."""
    right = 0
    stream = cu.Stream()
    with pools(4, 4, layout(2)) as (gpu, host):
        page, slot = gpu.lease().handle, host.lease().handle
        cache = gpu.cache("key", 1)
        async with Engine(device(ways=(way,))) as engine:
            for number in range(ROUNDS):
                with torch.cuda.stream(stream):
                    sleep(0.3)
                    cache[page.id].fill_(float(number % 251 + 1))
                await engine.copy(page, slot, after=stream if after else ())
                got = slot.tensor("key", 1)
                right += bool((got == float(number % 251 + 1)).all())
                stream.synchronize()
    return right


@pytest.mark.parametrize("way", [Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED])
async def test_a_store_waits_for_the_producer(way: Way) -> None:  # case 2
    assert await stores(after=True, way=way) == ROUNDS


async def test_a_store_without_order_is_damaged() -> None:
    assert await stores(after=False, way=Way.STAGED) < ROUNDS


async def loads(after: Any, way: Way) -> int:
    """Rounds of "spin, then read the page" during a load, whose reader saw the old bytes."""
    right = 0
    stream = cu.Stream()
    with pools(4, 4, layout(2)) as (gpu, host):
        page, slot = gpu.lease().handle, host.lease().handle
        cache = gpu.cache("key", 1)
        async with Engine(device(ways=(way,))) as engine:
            for number in range(ROUNDS):
                old, new = float(number % 100 + 1), float(number % 100 + 129)
                cache[page.id].fill_(old)
                slot.tensor("key", 1, write=True).fill_(new)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    sleep(0.3)
                    seen = cache[page.id].clone()
                await engine.copy(slot, page, after=stream if after else ())
                stream.synchronize()
                right += bool((seen == old).all()) and bool((cache[page.id] == new).all())
    return right


@pytest.mark.parametrize("way", [Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED])
async def test_a_load_waits_for_readers(way: Way) -> None:  # case 2, the other direction
    assert await loads(after=True, way=way) == ROUNDS


async def test_a_load_without_order_is_damaged() -> None:
    assert await loads(after=False, way=Way.STAGED) < ROUNDS


@pytest.mark.parametrize("ordered", [True, False])
async def test_order_before_holds_the_consumer_back(ordered: bool) -> None:
    """The load itself waits for a busy stream, so a consumer that does not wait is always early."""
    stream, busy = cu.Stream(), cu.Stream()
    right = 0
    with pools(600, 600, layout(2)) as (gpu, host):
        pages, slots = gpu.lease(500).handle, host.lease(500).handle
        fill_host(host)
        where = torch.as_tensor(pages.ids, device="cuda:0")
        want = host_bytes(host, "value", 1, slots.ids[-1:]).cuda()
        async with Engine(device(ways=(Way.STAGED,))) as engine:
            for _ in range(20):
                gpu.cache("value", 1).zero_()
                torch.cuda.synchronize()
                with torch.cuda.stream(busy):
                    sleep(5)
                op = await engine.submit(Copy(slots, pages), after=busy)
                if ordered:
                    op.order_before(stream)
                with torch.cuda.stream(stream):
                    seen = gpu.cache("value", 1)[where[-1:]].clone()
                await op.wait()
                stream.synchronize()
                right += torch.equal(seen.reshape(1, -1).view(torch.uint8), want)
    assert right == (20 if ordered else 0)


async def test_streams_and_events_of_both_libraries() -> None:
    core = pytest.importorskip("cuda.core").Device(0)
    core.set_current()
    with pools(2, 2, layout(1)) as (gpu, host):
        page, slot = gpu.lease().handle, host.lease().handle
        stream = core.create_stream()
        wrapped = cu.ExternalStream(int(stream.handle))
        async with Engine(device()) as engine:
            for number in range(1, 41):
                with torch.cuda.stream(wrapped):
                    sleep(0.3)
                    gpu.cache("key", 0)[page.id].fill_(float(number))
                    event = cu.Event()
                    event.record()
                after = [stream, wrapped, event, stream.record()][number % 4]
                await engine.copy(page, slot, after=after)
                assert bool((slot.tensor("key", 0) == float(number)).all())
            sleep(0.3)
            gpu.cache("key", 0)[page.id].fill_(99.0)
            await engine.copy(page, slot, after=torch.cuda.default_stream())
            assert bool((slot.tensor("key", 0) == 99.0).all())
            with pytest.raises(NotPosted, match="never recorded"):
                await engine.copy(page, slot, after=cu.Event())
            with pytest.raises(OrderRequired):
                await engine.copy(page, slot)


async def test_a_chain_runs_without_the_host() -> None:
    """Load, then a kernel of the caller on the loaded page, then a store: no wait in between."""
    with pools(4, 4, layout(1)) as (gpu, host):
        page, slot, out = gpu.lease().handle, host.lease().handle, host.lease().handle
        stream = cu.Stream()
        slot.tensor("key", 0, write=True).fill_(3.0)

        def double(given: torch.cuda.Stream) -> None:
            with torch.cuda.stream(given):
                gpu.cache("key", 0)[page.id].mul_(2.0)

        async with Engine(device()) as engine:
            load = await engine.submit(Copy(slot, page), after=())
            kernel = await engine.submit(
                Launch(double, writes=(page,), on=gpu.kind, stream=stream), after=load
            )
            again = await engine.submit(Launch(double, writes=(page,), on=gpu.kind), after=kernel)
            store = await engine.submit(Copy(page, out), after=again)
            await store.wait()
        assert bool((out.tensor("key", 0) == 12.0).all())


async def test_external_work_holds_its_pages_until_its_end() -> None:
    with pools(1, 1, layout(1)) as (gpu, _host):
        page = gpu.lease().handle
        stream = cu.Stream()
        async with Engine(device()) as engine:
            op = await engine.submit(External(reads=(page,), on=gpu.kind), after=())
            with torch.cuda.stream(stream):
                sleep(5)
                end = cu.Event()
                end.record()
            op.finish(stream)
            await op.wait()
            assert end.query()


async def test_a_capture_of_another_thread_is_not_disturbed() -> None:
    with pools(64, 64) as (gpu, host):
        pages, slots = gpu.lease(32).handle, host.lease(32).handle
        x = torch.ones(1024, device="cuda:0")
        graphs: list[Any] = []
        faults: list[BaseException] = []
        started, stop = threading.Event(), threading.Event()

        def capture() -> None:
            try:
                while not stop.is_set():
                    graph = cu.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode="global"):
                        y = x * 2
                        for _ in range(50):
                            y = y + 1
                    graphs.append(graph)
                    started.set()
            except RuntimeError as error:
                faults.append(error)
                started.set()

        thread = threading.Thread(target=capture, daemon=True)
        async with Engine(device(spin=50e-6)) as engine:
            await engine.copy(pages, slots, after=())
            thread.start()
            started.wait()
            try:
                for _ in range(60):
                    await engine.copy(pages, slots, after=())
                    await engine.copy(slots, pages, after=())
            finally:
                stop.set()
                thread.join()
            assert not faults
            assert len(graphs) > 2


async def test_a_call_inside_a_capture_is_refused() -> None:
    with pools(2, 2, layout(1)) as (gpu, host):
        page, slot = gpu.lease().handle, host.lease().handle
        async with Engine(device()) as engine:
            graph = cu.CUDAGraph()
            x = torch.ones(8, device="cuda:0")
            with torch.cuda.graph(graph):
                y = x + 1
                with pytest.raises(BadWork, match="captured"):
                    engine.submit_nowait(Copy(page, slot), after=())
            graph.replay()
            torch.cuda.synchronize()
            assert bool((y == 2).all())
            await engine.copy(page, slot, after=())


def test_pages_are_zero_before_they_are_used() -> None:
    pool = DevicePool(layout(1), 3)
    assert not bool(pool.cache("key", 0).any())
