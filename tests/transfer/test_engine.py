"""The engine's plain uses, on every loop: copy, run, submit, and starting and leaving twice."""

import threading

import anyio
import pytest
from tests.transfer.gates import (
    BYTES,
    LAYOUT,
    HandDevice,
    gates,
    hand_launch,
    host_engine,
    turns,
)

from transfer import (
    BlockLayout,
    Copy,
    Engine,
    EngineClosed,
    External,
    HostDevice,
    HostPool,
    Launch,
    OperationFailed,
    State,
    SubmitError,
    WrongDevice,
)

pytestmark = pytest.mark.anyio


async def test_a_copy_returns_when_the_bytes_are_there() -> None:
    with HostPool(LAYOUT, 2) as pool, pool.lease() as src, pool.lease() as dst:
        src.view(write=True)[:] = bytes(range(256)) * (BYTES // 256)
        async with host_engine() as engine:
            await engine.copy(src, dst)
            assert bytes(dst.view()) == bytes(src.view())
            statistics = engine.statistics().devices["host"]
        assert (statistics.submitted, statistics.completed) == (1, 1)
        assert statistics.bytes_moved == BYTES


async def test_a_batch_is_one_operation() -> None:
    with HostPool(LAYOUT, 128) as pool, pool.lease(64) as src, pool.lease(64) as dst:
        for number, block in enumerate(src):
            block.view(write=True)[:] = bytes([number]) * BYTES
        async with host_engine() as engine:
            op = await engine.submit(Copy(src, dst))
            await op.wait()
            assert engine.statistics().devices["host"].submitted == 1
        assert [block.view()[0] for block in dst] == list(range(64))


async def test_an_operation_is_waited_for_any_number_of_times() -> None:
    async with host_engine() as engine:
        op = await engine.submit(Launch(lambda: None), name="mine")
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(op.wait)
        await op.wait()
        assert op.state is State.COMPLETED
        assert "mine" in repr(op)


async def test_every_waiter_gets_an_exception_of_its_own() -> None:
    def fail() -> None:
        raise OSError(5, "broken")

    caught: list[OperationFailed] = []

    async def wait() -> None:
        with pytest.raises(OperationFailed, match="broken") as failure:
            await op.wait()
        caught.append(failure.value)

    async with host_engine() as engine:
        op = await engine.submit(Launch(fail))
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
    assert caught[0] is not caught[1]
    assert isinstance(caught[0].__cause__, OSError)


async def test_the_work_leaves_the_loops_thread() -> None:
    here = threading.get_ident()
    threads: list[int] = []
    async with host_engine() as engine:
        await engine.run(Launch(lambda: threads.append(threading.get_ident())))
    assert threads != [here]


async def test_a_large_copy_leaves_the_loops_thread() -> None:
    layout = BlockLayout.raw(4 << 20)
    with HostPool(layout, 2) as pool, pool.lease() as src, pool.lease() as dst, gates(1) as (gate,):
        async with Engine(HostDevice(threads=1)) as engine:
            # The only worker stands at the gate: a copy on this thread would be done by now.
            blocker = engine.submit_nowait(Launch(gate))
            await gate.reached()
            op = engine.submit_nowait(Copy(src, dst))
            assert op.state is State.IN_FLIGHT
            gate.open()
            await op.wait()
            await blocker.wait()


async def test_an_engine_is_started_again_after_it_was_closed() -> None:
    engine = host_engine()
    for _ in range(3):
        async with engine:
            await engine.run(Launch(lambda: None))
        await engine.aclose()  # a second close does nothing
    assert engine.statistics().devices["host"].completed == 3


async def test_starting_twice_is_refused() -> None:
    async with host_engine() as engine:
        with pytest.raises(EngineClosed, match="engine is already started"):
            engine.start()
        await engine.run(Launch(lambda: None))


async def test_start_and_aclose_in_different_tasks() -> None:
    engine = host_engine()
    with HostPool(LAYOUT, 2) as pool, pool.lease() as src, pool.lease() as dst:

        async def begin() -> None:
            engine.start()

        async def end() -> None:
            await engine.aclose()

        async with anyio.create_task_group() as group:
            group.start_soon(begin)
        await engine.copy(src, dst)
        async with anyio.create_task_group() as group:
            group.start_soon(end)
        with pytest.raises(EngineClosed, match="not started"):
            await engine.copy(src, dst)


async def test_a_failed_start_leaves_no_device_running() -> None:
    first, second = HandDevice("first"), HandDevice("second")
    second.routes = frozenset()

    def refuse() -> None:
        raise SubmitError("no threads")

    second.on_start = refuse
    engine = Engine(first, second)
    with pytest.raises(SubmitError, match="no threads"):
        engine.start()
    assert [first.running, second.running] == [False, False]
    second.on_start = lambda: None
    async with engine:
        assert [first.running, second.running] == [True, True]


async def test_a_failed_start_leaves_another_engines_device_alone() -> None:
    device = HostDevice(threads=1)
    async with Engine(device) as engine:
        with pytest.raises(RuntimeError, match="started already"):
            Engine(device, name="other").start()
        await engine.run(Launch(lambda: None))


async def test_two_devices_for_one_route_are_refused() -> None:
    with pytest.raises(WrongDevice, match="again and host both serve"):
        Engine(HostDevice(), HostDevice(name="again"))
    with pytest.raises(WrongDevice, match="at least one device"):
        Engine()


async def test_drain_waits_and_still_takes_work() -> None:
    device = HandDevice()
    async with Engine(device) as engine:
        first = engine.submit_nowait(hand_launch())
        drained = anyio.Event()

        async def drain() -> None:
            await engine.drain()
            drained.set()

        async with anyio.create_task_group() as group:
            group.start_soon(drain)
            await turns()
            second = engine.submit_nowait(hand_launch())
            device.signal(0)
            await first.wait()
            await turns()
            assert not drained.is_set()
            device.signal(1)
            await second.wait()
        assert drained.is_set()


async def test_holders_and_who_has_what() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 3) as pool, pool.lease(2) as blocks:
        async with Engine(device) as engine:
            op = engine.submit_nowait(hand_launch(writes=[blocks[:1]]))
            assert engine.holders() == [op]
            assert engine.holders(blocks[0]) == [op]
            assert engine.holders(blocks[1]) == []
            assert pool.counts() == (1, 1, 1, 0)
            device.signal()
            await op.wait()
            assert engine.holders() == []
        assert pool.counts() == (1, 2, 0, 0)


async def test_the_loop_is_free_while_a_worker_stands() -> None:
    with gates(1) as (gate,):
        async with host_engine() as engine:
            op = engine.submit_nowait(Launch(gate))
            await gate.reached()
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert op.state is State.IN_FLIGHT
            gate.open()
            await op.wait()


async def test_work_of_the_host_program_ends_when_it_says_so() -> None:
    # case 12, the CPU twin - the buffer is kept while someone else's work uses it
    with HostPool(LAYOUT, 1) as pool:
        lease = pool.lease()
        async with host_engine() as engine:
            op = engine.submit_nowait(External(reads=[lease]))
            lease.release()
            assert pool.counts().held == 1
            op.finish()
            await op.wait()
            assert pool.counts().free == 1


async def test_an_engine_that_could_admit_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="in_flight_max: found 0, expected at least 1"):
        Engine(HostDevice(), in_flight_max=0)
    with pytest.raises(ValueError, match="in_flight_bytes_max: found -1, expected at least 1"):
        Engine(HostDevice(), in_flight_bytes_max=-1)
