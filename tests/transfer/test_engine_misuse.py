"""What callers must not be able to do to others: end foreign work, cross engines, outrun a close."""

from __future__ import annotations

import gc
import threading
import weakref

import anyio
import anyio.lowlevel
import pytest
from tests.transfer.gates import LAYOUT, Gate, HandDevice, hand_launch

from transfer import (
    BadWork,
    CompletionLost,
    Engine,
    FileDevice,
    FileRead,
    HostDevice,
    HostPool,
    Launch,
    OperationFailed,
    State,
    WrongDevice,
)

pytestmark = pytest.mark.anyio


async def test_nobody_says_that_a_devices_work_has_ended() -> None:
    gate = Gate()
    pool = HostPool(LAYOUT, 1)
    async with Engine(HostDevice(threads=1)) as engine:
        op = await engine.submit(Launch(gate, writes=[pool.lease()]))
        with pytest.raises(BadWork, match="expected an External"):
            op.finish()
        await anyio.lowlevel.checkpoint()
        assert op.state is State.IN_FLIGHT
        gate.open()
        await op.wait()


async def test_order_behind_another_engines_operation_is_refused() -> None:
    device, other = HandDevice(), HandDevice()
    async with Engine(device, name="first") as first, Engine(other, name="second") as second:
        op = first.submit_nowait(hand_launch())
        with pytest.raises(WrongDevice, match="of <first on hand>, expected one of <second"):
            second.submit_nowait(hand_launch(), after=op)
        device.signal()
        await op.wait()


async def test_an_engine_that_closes_leaves_pools_that_another_uses() -> None:
    mine, other = HandDevice(), HandDevice()
    pool = HostPool(LAYOUT, 2)
    one, two = pool.lease(), pool.lease()
    async with Engine(mine) as engine:
        late = Engine(other)
        late.start()
        op = late.submit_nowait(hand_launch(writes=[one]))
        other.signal()
        await op.wait()
        op = engine.submit_nowait(hand_launch(writes=[one]))
        async with anyio.create_task_group() as group:
            group.start_soon(one.handle.wait_unheld)
            await anyio.wait_all_tasks_blocked()
            await late.aclose()
            assert pool.user is engine
            engine.submit_nowait(hand_launch(writes=[two]))
            mine.signal(0)
            mine.signal(1)


async def test_an_engine_that_closes_leaves_those_who_wait_for_blocks() -> None:
    device = HandDevice()
    pool = HostPool(LAYOUT, 1)
    lease = pool.lease()
    async with anyio.create_task_group() as group:
        async with Engine(device) as engine:
            engine.submit_nowait(hand_launch(writes=[lease]))
            device.signal()
            group.start_soon(pool.wait_lease, 1)
            await anyio.wait_all_tasks_blocked()
        lease.release()
    assert pool.counts().leased == 1


async def test_lost_memory_outlives_engine_and_pool() -> None:
    device = HandDevice()
    pool = HostPool(LAYOUT, 1)
    engine = Engine(device, drain_deadline=0)
    engine.start()
    op = engine.submit_nowait(hand_launch(writes=[pool.lease()]))
    with pytest.raises(CompletionLost):
        await engine.aclose()
    storage = weakref.ref(pool.storage)
    device.posted.clear()
    del engine, pool, op
    gc.collect()
    assert storage() is not None


async def test_memory_proven_quiet_is_let_go() -> None:
    device = HandDevice()
    pool = HostPool(LAYOUT, 1)
    async with Engine(device) as engine:
        op = engine.submit_nowait(hand_launch(writes=[pool.lease()]))
        device.signal(lost=True)
        with pytest.raises(CompletionLost):
            await op.wait()
        assert op.fence is not None
        device.completions.post(op.fence)
    with pytest.raises(OperationFailed):
        await op.wait()
    storage = weakref.ref(pool.storage)
    device.posted.clear()
    del engine, pool, op
    gc.collect()
    assert storage() is None


async def test_a_wake_up_from_before_the_close_reaps_nothing() -> None:
    device = HandDevice()
    engine = Engine(device, drain_deadline=0)
    engine.start()
    op = engine.submit_nowait(hand_launch())
    device.completions.ring()
    with pytest.raises(CompletionLost):
        await engine.aclose()
    assert op.fence is not None
    device.completions.post(op.fence)
    await anyio.wait_all_tasks_blocked()
    assert not op.settled  # another thread may have started the engine by now
    engine.start()
    await engine.aclose()
    assert op.settled


def test_closing_from_two_threads_at_once_takes_each_proof_once() -> None:
    device = HandDevice()
    engine = Engine(device, drain_deadline=0)
    inside, go_on = threading.Event(), threading.Event()

    async def lose() -> list[object]:
        engine.start()
        ops = [engine.submit_nowait(hand_launch()) for _ in range(2)]
        with pytest.raises(CompletionLost):
            await engine.aclose()
        for op in ops:
            assert op.fence is not None
            device.completions.post(op.fence)
            op.append(lambda: None)
        return list(ops)

    ops = anyio.run(lose)
    complete = engine._ledger.complete
    errors: list[BaseException] = []

    def slow(completion: object) -> None:
        inside.set()
        assert go_on.wait(60)
        complete(completion)  # type: ignore[arg-type]

    def close() -> None:
        try:
            engine.close_sync(60)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    engine._ledger.complete = slow  # type: ignore[method-assign]
    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    go_on.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [getattr(op, "state", None) for op in ops] == [State.FAILED] * 2
    assert engine.statistics().stray_completions == 0


async def test_a_read_of_a_part_leaves_the_rest_undefined() -> None:
    device = HandDevice()
    pool = HostPool(LAYOUT, 1)
    block = pool.lease().handle
    async with Engine(device, FileDevice(threads=1)) as engine:
        bad = engine.submit_nowait(hand_launch(writes=[block]))
        part = engine.submit_nowait(FileRead("/dev/zero", block.span(0, 16)), after=bad)
        reader = engine.submit_nowait(hand_launch(reads=[block]), after=part)
        device.signal(error=ValueError("half done"))
        await part.wait()
        with pytest.raises(OperationFailed, match="did not complete"):
            await reader.wait()
