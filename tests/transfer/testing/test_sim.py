"""SimDevice: bytes move only when stepped, in stream order, the same way for the same seed."""

from typing import Any

import anyio
import pytest
import trio.testing

from transfer import (
    BadWork,
    BlockLayout,
    CompletionLost,
    Copy,
    Engine,
    External,
    Launch,
    NotPosted,
    OperationFailed,
    OrderRequired,
    State,
    SubmitError,
    WrongDevice,
)
from transfer.testing import PoisonedPool, SimDevice, SimPool, peek, poke

pytestmark = pytest.mark.anyio

LAYOUT = BlockLayout.raw(40)


async def turns(count: int = 6) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def test_bytes_move_one_by_one_between_submit_and_signal() -> None:
    device = SimDevice(kind="host", chunk=(1, 1), parts=1)
    pool = SimPool(LAYOUT, 2, kind="host")
    async with Engine(device) as engine:
        with pool.lease() as a, pool.lease() as b:
            poke(a, b"x" * 40)
            op = await engine.submit(Copy(a, b))
            assert peek(b) == bytes(40)
            for moved in range(1, 41):
                device.step()
                assert peek(b) == b"x" * moved + bytes(40 - moved)
                assert op.state is State.IN_FLIGHT
            device.step()
            await op.wait()


async def test_lost_work_goes_on_and_is_proven_quiet() -> None:
    device = SimDevice(kind="host", chunk=(1, 1))
    pool = SimPool(LAYOUT, 2, kind="host")
    engine = Engine(device, drain_deadline=0)
    async with anyio.create_task_group():
        engine.start()
        with pool.lease() as a, pool.lease() as b:
            poke(a, b"x" * 40)
            await engine.submit(Copy(a, b))
            device.step(3)
            with pytest.raises(CompletionLost):
                await engine.aclose()
        assert pool.counts().quarantined == 2
        device.run_until_idle()
        assert peek(b) == b"x" * 40


async def test_order_is_needed_on_a_pretend_device() -> None:
    device, pool = SimDevice(), SimPool(LAYOUT, 2)
    async with Engine(device) as engine:
        with pool.lease() as a, pool.lease() as b:
            with pytest.raises(OrderRequired):
                await engine.copy(a, b)
            with pytest.raises(WrongDevice):
                a.view()
            with pytest.raises(WrongDevice):
                await engine.copy(a, b, after=object())


async def test_a_copy_follows_its_producer_and_the_consumer_follows_it() -> None:
    # case 2 on CPU, where the stored bytes are the producer's, not what the consumer writes later
    for seed in range(20):
        device = SimDevice(seed=seed, auto=True, lanes=3)
        gpu, host = SimPool(LAYOUT, 1), PoisonedPool(LAYOUT, 1)
        async with Engine(device) as engine:
            with gpu.lease() as page, host.lease() as slot:
                stream, later = device.stream(), device.stream()
                stream.fill(page, b"1" * 40)
                op = await engine.submit(Copy(page, slot), after=stream)
                op.order_before(later)
                later.fill(page, b"2" * 40)
                await op.wait()
                assert bytes(slot.view()) == b"1" * 40


async def test_a_bare_event_orders_and_covers_nothing() -> None:
    device = SimDevice(auto=True)
    gpu, host = SimPool(LAYOUT, 1), PoisonedPool(LAYOUT, 1)
    async with Engine(device) as engine:
        with gpu.lease() as page, host.lease() as slot:
            stream = device.stream()
            with pytest.raises(BadWork):
                await engine.copy(page, slot, after=device.event())
            stream.fill(page, b"1" * 40)
            event = stream.event()
            stream.fill(page, b"1" * 40)
            await engine.copy(page, slot, after=event)
            assert bytes(slot.view()) == b"1" * 40
    assert device.stream_key(event) is None


async def test_a_wait_for_an_event_never_recorded_waits_for_nothing() -> None:
    device, pool = SimDevice(), SimPool(LAYOUT, 1)
    stream = device.stream()
    stream.wait(device.event())
    with pool.lease() as page:
        stream.fill(page, b"1" * 40)
        device.run_until_idle()
        assert peek(page) == b"1" * 40


@pytest.mark.parametrize("peers", [False, True])
async def test_order_across_devices(peers: bool) -> None:
    first = SimDevice(kind="sim:0", seed=1)
    second = SimDevice(kind="sim:1", seed=2, peers=[first] if peers else ())
    a, b = SimPool(LAYOUT, 1, kind="sim:0"), SimPool(LAYOUT, 1, kind="sim:1")
    host = PoisonedPool(LAYOUT, 1)
    async with Engine(first, second) as engine:
        with a.lease() as x, b.lease() as y, host.lease() as slot:
            poke(x, b"1" * 40)
            one = await engine.submit(Copy(x, slot), after=())
            two = await engine.submit(Copy(slot, y), after=one)
            assert two.posted is peers
            if not peers:
                with pytest.raises(NotPosted):
                    two.order_before(second.stream())
            assert second.run_until_idle() == 0
            first.run_until_idle()
            await one.wait()
            await two.wait_posted()
            second.run_until_idle()
            await two.wait()
            assert peek(y) == b"1" * 40


async def test_external_work_ends_behind_its_stream() -> None:
    device, pool = SimDevice(), SimPool(LAYOUT, 1)
    async with Engine(device) as engine:
        with pool.lease() as page:
            op = await engine.submit(External(writes=[page], on="sim:0"), after=())
            assert op.fence is not None
            assert not device.can_wait(op.fence)
            stream = device.stream()
            stream.fill(page, b"1" * 40)
            with pytest.raises(TypeError):
                op.finish()
            op.finish(stream)
            assert op.state is State.IN_FLIGHT
            device.run_until_idle()
            await op.wait()


async def test_a_launch_runs_in_steps_and_its_error_is_the_operations() -> None:
    device, pool = SimDevice(), SimPool(LAYOUT, 1)
    seen: list[object] = []

    def kernel(stream: object) -> Any:
        seen.append(stream)
        yield
        seen.append("half")
        yield
        raise ValueError("bad kernel")

    async with Engine(device) as engine:
        with pool.lease() as page:
            stream = device.stream()
            work = Launch(kernel, writes=[page], on="sim:0", stream=stream)
            op = await engine.submit(work, after=())
            device.step(2)
            assert seen in ([stream, "half"], [stream])
            device.run_until_idle()
            with pytest.raises(OperationFailed) as caught:
                await op.wait()
            assert isinstance(caught.value.__cause__, ValueError)
    assert seen == [stream, "half"]


async def test_memory_given_back_and_still_touched_is_counted() -> None:
    device, pool = SimDevice(), SimPool(LAYOUT, 1)
    with pool.lease() as page:
        device.stream().fill(page, b"1" * 40)
        pool.storage.close()
        device.run_until_idle()
    assert device.touched_unmapped > 0


async def test_a_device_that_is_not_started_refuses() -> None:
    device, pool = SimDevice(), SimPool(LAYOUT, 2)
    with pool.lease() as a, pool.lease() as b, pytest.raises(SubmitError):
        device.enqueue(Copy(a, b), ())
    device.start()
    with pytest.raises(RuntimeError):
        device.start()
    device.close()
    device.close()
    device.start()


def story(seed: int) -> list[tuple[str, str]]:
    """What the device did to two copies, step by step, on a loop of its own."""
    seen = []

    async def main() -> None:
        device, pool = SimDevice(seed=seed), SimPool(LAYOUT, 4)
        async with Engine(device, trace=lambda t: seen.append((t.name, t.after.name))) as engine:
            with pool.lease(2) as source, pool.lease(2) as target:
                for i in range(2):
                    poke(source[i], bytes([65 + i]) * 40)
                    await engine.submit(Copy(source[i], target[i]), after=(), name=str(i))
                while device.step():
                    seen.append((peek(target[0]).hex(), peek(target[1]).hex()))
                await turns()

    trio.run(main)
    return seen


def test_same_seed_same_bytes_at_every_step() -> None:
    assert story(7) == story(7)
    assert story(7) != story(8)


def test_a_clock_that_jumps_lets_an_hour_of_copies_pass_at_once() -> None:
    async def main() -> float:
        device, pool = SimDevice(chunk=(1, 1)), SimPool(LAYOUT, 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: device.run(tick=60.0))
            async with Engine(device, drain_deadline=1e6) as engine:
                with pool.lease() as a, pool.lease() as b:
                    with anyio.move_on_after(600):
                        await engine.copy(a, b, after=())
                    assert pool.counts().held == 2
                    await b.wait_unheld()
            nursery.cancel_scope.cancel()
        return trio.current_time()

    clock = trio.testing.MockClock(autojump_threshold=0)
    begun = clock.current_time()
    assert trio.run(main, clock=clock) - begun >= 40 * 60
