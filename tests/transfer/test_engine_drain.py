"""Leaving an engine: nothing new, everything that is in flight, through every cancellation."""

import threading

import anyio
import pytest
from tests.transfer.gates import (
    LAYOUT,
    PATIENCE,
    HandDevice,
    check_posted,
    foreign_pool,
    gates,
    hand_launch,
    host_engine,
    in_thread,
    turns,
)

from transfer import (
    CompletionLost,
    Engine,
    EngineClosed,
    HostDevice,
    HostPool,
    Launch,
    Operation,
    OperationCancelled,
    OperationFailed,
    PoolBusy,
    State,
)

pytestmark = pytest.mark.anyio


async def test_leaving_waits_for_what_is_in_flight() -> None:
    with HostPool(LAYOUT, 2) as pool, gates(2) as (first, second):
        engine = host_engine()
        engine.start()
        lease = pool.lease(2)
        ops = [
            engine.submit_nowait(Launch(gate, writes=[lease.handle[i]]))
            for i, gate in enumerate((first, second))
        ]
        async with anyio.create_task_group() as group:
            group.start_soon(engine.aclose)
            await first.reached()
            await second.reached()
            with pytest.raises(EngineClosed, match="closing: no new work"):
                engine.submit_nowait(Launch(first))
            first.open()
            await ops[0].wait()
            assert pool.counts().held == 1
            second.open()
        assert [op.state for op in ops] == [State.COMPLETED] * 2
        assert second.passed.is_set()
        lease.release()
    # Its threads are gone too.
    assert not [t for t in threading.enumerate() if t.name.startswith("kvhold-host")]


async def test_abandoned_operations_are_waited_for() -> None:
    with HostPool(LAYOUT, 1) as pool, gates(1) as (gate,):
        lease = pool.lease()
        async with anyio.create_task_group() as group:
            async with host_engine() as engine:
                op = engine.submit_nowait(Launch(gate, writes=[lease]))
                await gate.reached()
                op.cancel()
                assert engine.statistics().devices["host"].abandoned == 1

                async def later() -> None:
                    await turns()
                    assert engine.holders() == [op]
                    gate.open()

                group.start_soon(later)
            assert gate.passed.is_set()
            assert op.state is State.CANCELLED
        lease.release()
    assert pool.counts().free == 1


async def test_prepared_successors_are_still_posted() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 3) as pool, pool.lease(3) as blocks:
        engine = Engine(device)
        engine.start()
        ops = [engine.submit_nowait(hand_launch(writes=[blocks[0]]))]
        for number in (1, 2):
            work = hand_launch(reads=[blocks[number - 1]], writes=[blocks[number]])
            ops.append(engine.submit_nowait(work, after=ops[-1]))
        async with anyio.create_task_group() as group:
            group.start_soon(engine.aclose)
            for number in range(3):
                await turns()
                assert len(device.posted) == number + 1
                device.signal(number)
        assert [op.state for op in ops] == [State.COMPLETED] * 3
        assert engine.statistics().devices["hand"].completed == 3


async def test_an_error_in_the_body_is_not_lost() -> None:
    device = HandDevice()

    async def body(engine: Engine) -> None:
        async with engine:
            ops.append(engine.submit_nowait(hand_launch()))
            raise ValueError("mine")

    ops: list[Operation] = []
    async with anyio.create_task_group() as group:

        async def later() -> None:
            await turns()
            device.signal(0)

        group.start_soon(later)
        with pytest.raises(ValueError, match="mine"):
            await body(Engine(device))
        assert ops[0].state is State.COMPLETED


async def test_a_cancellation_is_raised_again_at_the_end() -> None:
    device = HandDevice()
    engine = Engine(device)
    engine.start()
    op = engine.submit_nowait(hand_launch())
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def strike() -> None:
                with anyio.CancelScope(shield=True):
                    for _ in range(5):
                        await turns(3)
                        scope.cancel()
                        assert not op.settled
                    assert device.running
                    device.signal(0)

            group.start_soon(strike)
            await engine.aclose()
            pytest.fail("the cancellation was swallowed")
    assert scope.cancelled_caught
    assert op.state is State.COMPLETED
    assert not device.running


async def test_drain_struck_at_every_turn() -> None:
    # case 67 - close, with n-th await cancelled, for every n
    for number in range(20):
        device = HandDevice()
        engine = Engine(device)
        engine.start()
        with HostPool(LAYOUT, 2) as pool:
            lease = pool.lease(2)
            first = engine.submit_nowait(hand_launch(writes=[lease.handle[0]]))
            first.cancel()
            second = engine.submit_nowait(hand_launch(reads=[lease.handle[1]]))
            third = engine.submit_nowait(hand_launch(writes=[lease.handle[1]]), after=second)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def strike(scope: anyio.CancelScope, number: int) -> None:
                        with anyio.CancelScope(shield=True):
                            await turns(number)
                            scope.cancel()

                    async def signals(device: HandDevice) -> None:
                        with anyio.CancelScope(shield=True):
                            for index in (1, 0, 2):
                                await turns(3)
                                device.signal(index)

                    group.start_soon(strike, scope, number)
                    group.start_soon(signals, device)
                    await engine.aclose()
            check_posted([first, second, third], device)
            states = [op.state for op in (first, second, third)]
            assert states == [State.CANCELLED, State.COMPLETED, State.COMPLETED]
            assert not device.running
            lease.release()
            assert pool.counts().free == 2


async def test_at_the_deadline_prepared_goes_first_and_the_rest_is_lost() -> None:
    order: list[tuple[int, State]] = []
    with HostPool(LAYOUT, 4, name="slots") as pool, gates(1) as (gate,):
        engine = Engine(
            HostDevice(threads=1, inline_bytes_max=0),
            drain_deadline=0.05,
            trace=lambda step: order.append((step.serial, step.after)),
        )
        engine.start()
        lease = pool.lease(4)
        blocks = lease.handle
        flying = engine.submit_nowait(Launch(gate, writes=[blocks[0]]), name="stuck")
        behind = engine.submit_nowait(Launch(gate, reads=[blocks[0]]), after=flying)
        last = engine.submit_nowait(Launch(gate, writes=[blocks[1]]), after=behind)
        queued = engine.submit_nowait(Launch(gate, writes=[blocks[2]]))
        await gate.reached()
        with pytest.raises(
            CompletionLost, match=r"2 operations whose end cannot be learnt: .*stuck"
        ):
            await engine.aclose()
        assert [op.state for op in (flying, queued)] == [State.QUARANTINED] * 2
        for op in (behind, last):
            assert op.state is State.CANCELLED
            with pytest.raises(OperationCancelled):
                await op.wait()
        with pytest.raises(CompletionLost, match="drain deadline"):
            await flying.wait()
        ends = [step for step in order if step[1] is not State.IN_FLIGHT]
        assert ends == [
            (last.serial, State.CANCELLED),
            (behind.serial, State.CANCELLED),
            (flying.serial, State.QUARANTINED),
            (queued.serial, State.QUARANTINED),
        ]
        lease.release()
        assert pool.counts() == (2, 0, 0, 2)
        with pytest.raises(CompletionLost):
            await blocks[0].wait_unheld()
        # Late proofs release the blocks.
        gate.open()
        assert await in_thread(lambda: engine.close_sync(PATIENCE) is None)  # type: ignore[func-returns-value]
        assert pool.counts() == (4, 0, 0, 0)
        assert flying.state is State.FAILED
        with pytest.raises(OperationFailed):
            await flying.wait()


async def test_a_pool_with_lost_blocks_is_kept() -> None:
    device = HandDevice()
    pool = HostPool(LAYOUT, 1)
    engine = Engine(device, drain_deadline=0)
    engine.start()
    lease = pool.lease()
    op = engine.submit_nowait(hand_launch(writes=[lease]))
    with pytest.raises(CompletionLost):
        await engine.aclose()
    lease.release()
    with pytest.raises(PoolBusy, match=r"quarantined=1.*held by <operation 1 Launch, quarantined>"):
        pool.close()
    pool.storage.view(pool.address(0, 0), 4)[:] = b"mine"  # the device may still write here
    # A proof that came while nobody listened is taken when the engine is started again.
    device.signal(0)
    async with engine:
        await turns()
        assert op.state is State.FAILED
        assert pool.counts().free == 1


async def test_a_deadline_of_zero_still_takes_what_has_ended() -> None:
    device = HandDevice()
    engine = Engine(device, drain_deadline=0)
    engine.start()
    op = engine.submit_nowait(hand_launch())
    device.signal(0)
    await engine.aclose()
    assert op.state is State.COMPLETED


async def test_late_proofs_by_close_sync_repeated() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 2) as pool, pool.lease(2) as blocks:
        engine = Engine(device, drain_deadline=0)
        engine.start()
        for block in blocks:
            engine.submit_nowait(hand_launch(writes=[block]))
        with pytest.raises(CompletionLost, match="2 operations"):
            await engine.aclose()
        with pytest.raises(CompletionLost, match="2 operations"):
            engine.close_sync(0)
        device.signal(1)
        with pytest.raises(CompletionLost, match="1 operations"):
            engine.close_sync(0)
        assert pool.counts() == (0, 1, 0, 1)
        device.signal(1)  # twice: counted, nothing changes
        device.signal(0)
        engine.close_sync(0)
        engine.close_sync(0)
        assert pool.counts() == (0, 2, 0, 0)
        assert engine.statistics().stray_completions == 1


async def test_close_sync_while_the_loop_runs_is_refused() -> None:
    async with host_engine() as engine:
        with pytest.raises(
            EngineClosed, match=r"the loop of .* still runs; expected `await aclose"
        ):
            engine.close_sync()
        problems: list[BaseException] = []

        def elsewhere() -> bool:
            try:
                engine.close_sync()
            except EngineClosed as error:
                problems.append(error)
            return True

        await in_thread(elsewhere)
        assert len(problems) == 1
        await engine.run(Launch(lambda: None))


async def test_two_closers() -> None:
    device = HandDevice()
    engine = Engine(device)
    engine.start()
    op = engine.submit_nowait(hand_launch())
    async with anyio.create_task_group() as group:
        group.start_soon(engine.aclose)
        group.start_soon(engine.aclose)
        await turns()
        device.signal(0)
    assert op.settled
    assert not device.running


async def test_a_foreign_call_is_held_back_until_the_drain_gives_up() -> None:
    pool = foreign_pool()
    device = HandDevice()
    engine = Engine(device, drain_deadline=0.02)
    engine.start()
    lost: list[CompletionLost] = []

    async def call() -> None:
        with pytest.raises(CompletionLost) as error:
            await engine.run(hand_launch(writes=[pool.block(0)]))
        lost.append(error.value)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await turns()
        with pytest.raises(CompletionLost):
            await engine.aclose()
    assert len(lost) == 1


async def test_every_operation_of_a_drain_is_settled_once() -> None:
    ended: list[int] = []
    settled = (State.COMPLETED, State.CANCELLED, State.FAILED)
    engine = Engine(
        HostDevice(threads=2),
        trace=lambda step: ended.append(step.serial) if step.after in settled else None,
    )
    engine.start()
    ops = [engine.submit_nowait(Launch(lambda: None)) for _ in range(500)]
    for op in ops[::3]:
        op.cancel()
    await engine.aclose()
    assert sorted(ended) == [op.serial for op in ops]
    assert engine.statistics().devices["host"].in_flight == 0


async def test_who_waits_for_blocks_still_gets_them_when_the_engine_is_closed() -> None:
    got: list[int] = []
    with HostPool(LAYOUT, 2) as pool:
        lease = pool.lease(2)
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with await pool.wait_lease(2) as blocks:
                    got.append(len(blocks))

            async with host_engine() as engine:
                await engine.run(Launch(lambda: None, writes=[lease]))
                group.start_soon(wait)
                await turns()
            assert got == []
            lease.release()
        assert got == [2]
