"""Order: recorded at the call, kept by fences or by waiting, and who is told what."""

from collections.abc import Callable

import anyio
import pytest
from tests.transfer.gates import (
    LAYOUT,
    HandDevice,
    check_posted,
    gates,
    hand_launch,
    turns,
)

from transfer import (
    CompletionLost,
    Engine,
    HostDevice,
    HostPool,
    Launch,
    NotPosted,
    Operation,
    OperationCancelled,
    OperationFailed,
    State,
)

pytestmark = pytest.mark.anyio


async def test_order_is_recorded_at_the_call_before_admission() -> None:
    device = HandDevice(ordered=True)
    async with Engine(device, in_flight_max=1) as engine:
        blocker = engine.submit_nowait(hand_launch(), after=())
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                await engine.run(hand_launch(), after="stream")

            group.start_soon(ask)
            await turns()
            # It waits for room, and the place in its stream is taken already.
            assert [stream for stream, _ in device.marks] == ["stream"]
            assert len(device.posted) == 1
            device.signal(0)
            await blocker.wait()
            await turns()
            assert len(device.posted) == 1
            device.completions.post(device.marks[0][1])
            await turns()
            assert len(device.posted) == 2
            device.signal(1)


async def test_a_successor_is_posted_when_its_predecessor_has_settled() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 3) as pool, pool.lease() as a, pool.lease() as b:
        async with Engine(device) as engine:
            first = engine.submit_nowait(hand_launch(writes=[a]))
            second = engine.submit_nowait(hand_launch(reads=[a], writes=[b]), after=first)
            assert second.state is State.PREPARED
            assert len(device.posted) == 1
            device.signal(0)
            await second.wait_posted()
            assert len(device.posted) == 2
            check_posted([first, second], device)
            assert first.settled
            device.signal(1)
            await second.wait()


async def test_a_device_that_can_wait_gets_the_fence() -> None:
    device = HandDevice(chained=True)
    async with Engine(device) as engine:
        first = engine.submit_nowait(hand_launch())
        second = engine.submit_nowait(hand_launch(), after=first)
        assert device.posted[1].waits == (device.posted[0].fence,)
        # Its own end may be heard of first; it still settles behind its predecessor.
        device.signal(1)
        await turns()
        assert not second.settled
        device.signal(0)
        await second.wait()
        assert first.settled


async def test_order_before_needs_posted_work() -> None:
    device = HandDevice(chained=True)
    async with Engine(device, HostDevice(threads=1)) as engine:
        with gates(1) as (gate,):
            first = engine.submit_nowait(Launch(gate))
            second = engine.submit_nowait(hand_launch(), after=first)
            with pytest.raises(NotPosted, match=r"second|Launch, prepared.*wait_posted"):
                second.order_before("stream")
            gate.open()
            await second.wait_posted()
            second.order_before("stream")
            assert device.joined == [("stream", device.posted[0].fence)]
            # From now on the stream covers it: what is behind the stream is behind it.
            third = engine.submit_nowait(hand_launch(), after="stream")
            assert device.posted[0].fence in device.posted[1].waits or third.before
            device.signal(0)
            device.completions.post(device.marks[0][1])
            device.signal(1)
            await third.wait()
            second.order_before("stream")  # settled: nothing to wait for
            assert len(device.joined) == 1


async def test_order_before_a_host_operation_is_not_possible() -> None:
    with gates(1) as (gate,):
        async with Engine(HandDevice(chained=True), HostDevice(threads=1)) as engine:
            op = engine.submit_nowait(Launch(gate))
            with pytest.raises(NotPosted, match="of host"):
                op.order_before("stream")
            gate.open()


async def test_order_before_a_lost_operation_says_that_it_is_lost() -> None:
    device = HandDevice(chained=True)
    async with Engine(device) as engine:
        op = engine.submit_nowait(hand_launch())
        device.signal(0, TimeoutError("gone"), lost=True)
        with pytest.raises(CompletionLost):
            await op.wait()
        await op.wait_posted()
        with pytest.raises(CompletionLost):
            op.order_before("stream")


@pytest.mark.parametrize(
    ("end", "error"),
    [
        pytest.param(lambda op: op.cancel(), OperationCancelled, id="cancelled"),
        pytest.param(None, OperationFailed, id="predecessor-failed"),
    ],
)
async def test_wait_posted_of_what_never_is(
    end: Callable[[Operation], None] | None, error: type[Exception]
) -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        async with Engine(device) as engine:
            first = engine.submit_nowait(hand_launch(writes=[block]))
            second = engine.submit_nowait(hand_launch(reads=[block]), after=first)
            async with anyio.create_task_group() as group:

                async def wait() -> None:
                    with pytest.raises(error):
                        await second.wait_posted()

                group.start_soon(wait)
                await turns()
                if end is not None:
                    end(second)
                device.signal(0, OSError("broken"))
            assert len(device.posted) == 1
