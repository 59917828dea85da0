"""What only asyncio has, and what goes through shields: Task.cancel, timeouts, task groups.

Plain asyncio tests, each on asyncio's own loop and on uvloop.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import anyio
import pytest
from tests.transfer.gates import (
    LAYOUT,
    Gate,
    HandDevice,
    check_posted,
    foreign_pool,
    gates,
    hand_launch,
    host_engine,
    turns,
)

from transfer import (
    CompletionLost,
    Engine,
    EngineClosed,
    HostPool,
    Launch,
    Operation,
    Pool,
    State,
)

pytestmark = pytest.mark.asyncio


Strike = Callable[[Coroutine[Any, Any, None], Callable[[], Awaitable[None]]], Awaitable[None]]


async def by_task_cancel(
    work: Coroutine[Any, Any, None], ready: Callable[[], Awaitable[None]]
) -> None:
    task = asyncio.create_task(work)
    await ready()
    task.cancel("mine")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def by_second_cancel(
    work: Coroutine[Any, Any, None], ready: Callable[[], Awaitable[None]]
) -> None:
    task = asyncio.create_task(work)
    await ready()
    task.cancel()
    await turns(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def by_timeout(work: Coroutine[Any, Any, None], ready: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(TimeoutError):  # noqa: PT012 - the limit is moved once the work is there
        async with asyncio.timeout(None) as limit:
            task = asyncio.create_task(reschedule(ready, limit))
            await work
    await task
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def reschedule(ready: Callable[[], Awaitable[None]], limit: asyncio.Timeout) -> None:
    await ready()
    limit.reschedule(asyncio.get_running_loop().time())


async def by_wait_for(
    work: Coroutine[Any, Any, None], ready: Callable[[], Awaitable[None]]
) -> None:
    task = asyncio.create_task(work)
    await ready()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0.001)
    assert task.cancelled()


async def by_failing_sibling(
    work: Coroutine[Any, Any, None], ready: Callable[[], Awaitable[None]]
) -> None:
    async def fail() -> None:
        await ready()
        raise ValueError("sibling")

    with pytest.raises(ExceptionGroup, match="unhandled errors") as error:  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            group.create_task(fail())
    assert error.group_contains(ValueError, match="sibling")
    assert task.cancelled()


STRIKES = [
    pytest.param(strike, id=strike.__name__)
    for strike in (by_task_cancel, by_second_cancel, by_timeout, by_wait_for, by_failing_sibling)
]


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gates(1) as (made,):
        yield made


@pytest.mark.parametrize("strike", STRIKES)
async def test_on_own_memory_the_caller_leaves_at_once(strike: Strike, gate: Gate) -> None:
    with HostPool(LAYOUT, 2) as pool:
        lease = pool.lease()
        async with host_engine() as engine:
            await strike(engine.run(Launch(gate, writes=[lease])), gate.reached)
            assert not gate.passed.is_set()
            (op,) = engine.holders()
            assert op.state is State.ABANDONED
            lease.release()
            assert pool.counts() == (1, 0, 1, 0)
            gate.open()
            await engine.drain()
            assert pool.counts().free == 2


@pytest.mark.parametrize("strike", STRIKES)
async def test_on_foreign_memory_it_is_held_back_until_quiet(strike: Strike, gate: Gate) -> None:
    pool = foreign_pool()
    loop = asyncio.get_running_loop()

    async def work() -> None:
        try:
            await engine.run(Launch(gate, writes=[pool.block(0)]))
        finally:
            assert gate.passed.is_set()
            assert pool.counts().held == 0

    async def ready() -> None:
        await gate.reached()
        # Long enough in the loop's own measure for every strike to have been delivered.
        loop.call_later(0.02, gate.open)

    async with host_engine() as engine:
        await strike(work(), ready)
    pool.close()


@pytest.mark.parametrize("strike", STRIKES)
async def test_a_drain_goes_on(strike: Strike, gate: Gate) -> None:
    loop = asyncio.get_running_loop()
    ops: list[Operation] = []
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        engine = host_engine()

        async def work() -> None:
            async with engine:
                ops.append(engine.submit_nowait(Launch(gate, writes=[block])))
                ops.append(engine.submit_nowait(Launch(lambda: None, reads=[block]), after=ops[0]))

        async def ready() -> None:
            await gate.reached()
            await turns()
            loop.call_later(0.02, gate.open)

        await strike(work(), ready)
        assert [op.state for op in ops] == [State.COMPLETED] * 2
        with pytest.raises(EngineClosed):
            engine.submit_nowait(Launch(gate))


async def test_a_drain_struck_again_and_again() -> None:
    device = HandDevice()
    engine = Engine(device)
    engine.start()
    op = engine.submit_nowait(hand_launch())
    task = asyncio.create_task(engine.aclose())
    await turns(1)
    for number in range(50):
        await turns(number % 4)
        task.cancel(f"strike {number}")
        assert not task.done()
    device.signal(0)
    with pytest.raises(asyncio.CancelledError, match="strike 49"):
        await task
    assert op.state is State.COMPLETED
    assert not device.running


@pytest.mark.parametrize("foreign", [False, True])
async def test_cancelled_at_every_turn(foreign: bool) -> None:
    # case 67 - Task.cancel at every turn between the call and its end, and once more after
    pool: Pool = foreign_pool() if foreign else HostPool(LAYOUT, 2)
    block = pool.block(0) if foreign else pool.lease().handle
    start = pool.counts()
    device = HandDevice()
    outcomes = set()
    async with Engine(device, in_flight_max=1) as engine:
        for number in range(20):
            blocker = engine.submit_nowait(hand_launch())
            mine = len(device.posted)

            async def signals(mine: int) -> None:
                await turns(3)
                device.signal(mine - 1)
                await turns(6)
                for later in range(mine, len(device.posted)):
                    device.signal(later)

            task = asyncio.create_task(engine.run(hand_launch(writes=[block])))
            other = asyncio.create_task(signals(mine))
            await turns(number)
            task.cancel()
            await turns(number % 3)
            task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            outcomes.add(type(outcome))
            if foreign:
                assert pool.counts() == start
            await other
            await engine.drain()
            check_posted([blocker], device)
            assert pool.counts() == start
    assert outcomes == {asyncio.CancelledError, type(None)}
    pool.close()


async def test_cancel_against_completion_in_one_turn(seed: int) -> None:
    # case 66 - with native cancels and a native time limit
    chance = random.Random(seed)
    device = HandDevice()
    outcomes = {"done": 0, "late": 0, "cancelled": 0}
    loop = asyncio.get_running_loop()
    with HostPool(LAYOUT, 1) as pool:
        async with Engine(device) as engine:

            async def call(lease: object, limits: list[asyncio.Timeout]) -> str:
                assert lease is not None
                try:
                    async with asyncio.timeout(None) as limit:
                        limits.append(limit)
                        await engine.run(hand_launch(writes=[block]))
                except TimeoutError:
                    return "late"
                return "done"

            for _ in range(1000):
                lease = pool.lease()
                block = lease.handle
                limits: list[asyncio.Timeout] = []
                task = asyncio.create_task(call(lease, limits))
                await turns(2)
                events: list[Callable[[], object]] = [
                    lambda: device.signal(-1),
                    task.cancel,
                    lambda limit=limits[0]: limit.reschedule(loop.time()) if not done() else None,  # type: ignore[misc]
                ]

                def done(task: asyncio.Task[str] = task) -> bool:
                    return task.done()

                chance.shuffle(events)
                for event in events:
                    if not task.done():
                        event()
                    await turns(chance.randrange(3))
                if device.completions.items or engine.holders() != []:
                    device.signal(-1)
                result = (await asyncio.gather(task, return_exceptions=True))[0]
                outcomes[result if isinstance(result, str) else "cancelled"] += 1
                lease.release()
                await engine.drain()
                assert pool.counts() == (1, 0, 0, 0)
    assert min(outcomes.values()) > 20, outcomes


async def test_a_native_cancel_goes_through_the_scope_that_struck_first(gate: Gate) -> None:
    pool = foreign_pool()
    reached: list[str] = []

    async def call() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await engine.run(Launch(gate, writes=[pool.block(0)]))
        reached.append("after the scope")
        await asyncio.sleep(3600)

    scopes: list[anyio.CancelScope] = []
    async with host_engine() as engine:
        task = asyncio.create_task(call())
        await gate.reached()
        scopes[0].cancel()
        await turns()
        task.cancel()
        await turns()
        assert not task.done()
        gate.open()
        # Swallowed by the scope, the cancellation would leave the task asleep.
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
    assert reached == []
    pool.close()


async def test_a_loss_replaces_a_native_cancellation() -> None:
    pool = foreign_pool()
    device = HandDevice()
    async with Engine(device) as engine:
        task = asyncio.create_task(engine.run(hand_launch(writes=[pool.block(0)])))
        await turns()
        task.cancel()
        await turns()
        assert not task.done()
        device.signal(0, TimeoutError("gone"), lost=True)
        with pytest.raises(CompletionLost):
            await task
        device.signal(0)
        await turns()
        assert pool.counts().held == 0
    pool.close()


async def test_waiters_of_every_kind_are_cancelled_by_the_loop() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool:
        lease = pool.lease()
        async with Engine(device, in_flight_max=1) as engine:
            op = engine.submit_nowait(hand_launch(writes=[lease]))
            waits = [op.wait(), engine.drain(), engine.submit(hand_launch()), pool.wait_lease(1)]
            tasks = [asyncio.ensure_future(wait) for wait in (*waits, lease.handle.wait_unheld())]
            await turns()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError] * 5
            assert op.state is State.IN_FLIGHT
            assert op.watchers == ()
            assert len(engine._lines[op.lane]) == 0
            device.signal(0)
            await op.wait()
        lease.release()
        assert pool.counts().free == 1
