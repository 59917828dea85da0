"""Admission by count and bytes, first come first served; order recorded at the call."""

import anyio
import pytest
from tests.transfer.gates import (
    LAYOUT,
    HandDevice,
    device_pool,
    hand_launch,
    in_thread,
    turns,
)

from transfer import (
    CompletionLost,
    Copy,
    DevicePoisoned,
    Engine,
    EngineClosed,
    HostDevice,
    HostPool,
    Launch,
    SubmitError,
    WouldBlock,
)

pytestmark = pytest.mark.anyio


def sized(nbytes: int) -> Launch:
    return Launch(lambda: None, on="hand", nbytes=nbytes)


async def test_admission_by_count() -> None:
    device = HandDevice()
    async with Engine(device, in_flight_max=2) as engine, anyio.create_task_group() as group:
        ops = [engine.submit_nowait(hand_launch()) for _ in range(2)]
        with pytest.raises(
            WouldBlock, match="hand has 2 operations and 0 bytes admitted; at most 2"
        ):
            engine.submit_nowait(hand_launch())
        group.start_soon(engine.run, hand_launch())
        await turns()
        assert len(device.posted) == 2
        device.signal(0)
        await ops[0].wait()
        await turns()
        assert len(device.posted) == 3
        device.signal(1)
        device.signal(2)


async def test_admission_by_bytes() -> None:
    device = HandDevice()
    async with Engine(device, in_flight_bytes_max=100) as engine:
        first = engine.submit_nowait(sized(60))
        with pytest.raises(WouldBlock, match="60 bytes"):
            engine.submit_nowait(sized(41))
        second = engine.submit_nowait(sized(40))
        device.signal(0)
        await first.wait()
        third = engine.submit_nowait(sized(60))
        device.signal(1)
        device.signal(2)
        await second.wait()
        await third.wait()


async def test_one_huge_operation_goes_alone() -> None:
    device = HandDevice()
    async with Engine(device, in_flight_bytes_max=100) as engine:
        small = engine.submit_nowait(sized(1))
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run, sized(5000))
            await turns()
            assert len(device.posted) == 1
            device.signal(0)
            await small.wait()
            await turns()
            assert len(device.posted) == 2
            with pytest.raises(WouldBlock):
                engine.submit_nowait(sized(0 + 1))
            device.signal(1)
        await engine.drain()
        after = engine.submit_nowait(sized(100))
        device.signal(2)
        await after.wait()


async def test_waiters_are_served_in_the_order_they_came() -> None:
    device = HandDevice()
    order: list[int] = []
    async with Engine(device, in_flight_bytes_max=100) as engine:
        blocker = engine.submit_nowait(sized(100))

        async def ask(number: int, nbytes: int) -> None:
            op = await engine.submit(sized(nbytes))
            order.append(number)
            device.signal(-1)
            await op.wait()

        async with anyio.create_task_group() as group:
            # The first wants everything; nobody who fits may pass it.
            for number, nbytes in enumerate([100, 1, 1, 100, 1]):
                group.start_soon(ask, number, nbytes)
                await turns()
            with pytest.raises(WouldBlock):
                engine.submit_nowait(sized(0))
            device.signal(0)
            await blocker.wait()
    assert order == [0, 1, 2, 3, 4]


async def test_a_cancelled_waiter_leaves_the_line_and_takes_nothing() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 2) as pool, pool.lease() as first, pool.lease() as second:
        async with Engine(device, in_flight_max=1) as engine:
            blocker = engine.submit_nowait(hand_launch())
            scope = anyio.CancelScope()

            async def leave() -> None:
                with scope:
                    await engine.run(hand_launch(writes=[first]))

            async with anyio.create_task_group() as group:
                group.start_soon(leave)
                await turns()
                group.start_soon(engine.run, hand_launch(writes=[second]))
                await turns()
                scope.cancel()
                await turns()
                assert pool.counts().held == 0
                device.signal(0)
                await blocker.wait()
                await turns()
                # The one behind the cancelled waiter was let in.
                assert engine.holders(second) != []
                device.signal(1)
            assert scope.cancelled_caught
            assert len(device.posted) == 2


async def test_a_waiter_cancelled_as_its_turn_comes_wakes_the_next() -> None:
    device = HandDevice()
    async with Engine(device, in_flight_max=1) as engine:
        blocker = engine.submit_nowait(hand_launch())
        scope = anyio.CancelScope()

        async def leave() -> None:
            with scope:
                await engine.run(hand_launch())

        async with anyio.create_task_group() as group:
            group.start_soon(leave)
            await turns()
            group.start_soon(engine.run, hand_launch())
            await turns()
            device.signal(0)
            scope.cancel()  # the room and the cancellation meet in one turn of the loop
            await blocker.wait()
            await turns()
            while engine.statistics().devices["hand"].in_flight:
                device.signal(-1)
                await turns()
        assert len(device.posted) in (2, 3)


async def test_in_flight_stays_bounded() -> None:
    most = 0

    def note() -> None:
        nonlocal most
        most = max(most, engine.statistics().devices["host"].in_flight)

    async with Engine(HostDevice(threads=2), in_flight_max=5) as engine:

        async def many() -> None:
            for _ in range(40):
                op = await engine.submit(Launch(lambda: None))
                note()
                await op.wait()

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(many)
    assert 1 < most <= 5
    assert engine.statistics().devices["host"].completed == 400


async def test_a_refusal_gives_everything_back_and_may_be_retried() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        async with Engine(device, in_flight_max=1) as engine:

            def refuse() -> None:
                raise SubmitError("queue full")

            device.on_enqueue = refuse
            for _ in range(3):
                with pytest.raises(SubmitError, match="queue full"):
                    await engine.run(hand_launch(writes=[block]))
                assert pool.counts().held == 0
            device.on_enqueue = lambda: None
            op = await engine.submit(hand_launch(writes=[block]))
            device.signal()
            await op.wait()


async def test_waiters_of_a_poisoned_device_are_told() -> None:
    device = HandDevice()
    async with Engine(device, in_flight_max=1) as engine:
        op = engine.submit_nowait(hand_launch())
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with pytest.raises(DevicePoisoned):
                    await engine.submit(hand_launch())

            for _ in range(3):
                group.start_soon(ask)
            await turns()
            engine._ledger.poison(op.lane, OSError("context lost"))
        with pytest.raises(CompletionLost):
            await op.wait()
        with pytest.raises(DevicePoisoned, match="context lost"):
            engine.submit_nowait(hand_launch())


async def test_a_full_quarantine_refuses_work() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 2) as pool, pool.lease() as first, pool.lease() as second:
        async with Engine(device, quarantine_bytes_max=4096) as engine:
            for block in (first, second):
                op = engine.submit_nowait(hand_launch(writes=[block]))
                device.signal(-1, TimeoutError("gone"), lost=True)
                with pytest.raises(CompletionLost):
                    await op.wait()
            with pytest.raises(DevicePoisoned, match="8192 bytes are quarantined, at most 4096"):
                engine.submit_nowait(hand_launch())
            # The proof comes late: the blocks are back.
            device.signal(0)
            device.signal(1)
            await turns()
            assert pool.counts().quarantined == 0


async def test_a_poisoned_device_does_not_stop_another() -> None:
    device = HandDevice()
    async with Engine(device, HostDevice(threads=1)) as engine:
        op = engine.submit_nowait(hand_launch())
        engine._ledger.poison(op.lane, OSError("context lost"))
        await engine.run(Launch(lambda: None))
        assert engine.statistics().devices["hand"].poisoned == "hand: context lost"
        assert engine.statistics().devices["host"].poisoned is None


async def test_device_memory_is_routed_by_its_kind() -> None:
    device = HandDevice()
    with device_pool() as pool, HostPool(LAYOUT, 1) as host, pool.lease(2) as pages:
        async with Engine(device, HostDevice(threads=1)) as engine:
            op = engine.submit_nowait(Copy(pages[:1], pages[1:]), after=())
            with host.lease() as slot:
                out = engine.submit_nowait(Copy(pages[1], slot), after=op)
                device.signal(0)
                await out.wait_posted()
                device.signal(1)
                await out.wait()
            assert await in_thread(lambda: True)


async def test_submit_waits_for_admission_and_refuses_at_close() -> None:
    device = HandDevice()
    engine = Engine(device, in_flight_max=1)
    engine.start()
    op = engine.submit_nowait(hand_launch())
    refused: list[str] = []
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            with pytest.raises(EngineClosed, match="closing") as error:
                await engine.submit(hand_launch())
            refused.append(str(error.value))

        for _ in range(4):
            group.start_soon(ask)
        await turns()
        group.start_soon(engine.aclose)
        await turns()
        assert len(refused) == 4
        assert not op.settled
        device.signal(0)
    assert len(device.posted) == 1
