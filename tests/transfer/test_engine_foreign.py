"""Memory of a host program: a cancellation is delivered only once it is quiet."""

from collections.abc import Awaitable, Callable

import anyio
import pytest
from tests.transfer.gates import (
    HandDevice,
    foreign_pool,
    gates,
    hand_launch,
    host_engine,
    turns,
)

from transfer import (
    CompletionLost,
    Engine,
    Launch,
)

pytestmark = pytest.mark.anyio


async def cancel_when(ready: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
    await ready()
    scope.cancel()


async def test_on_foreign_memory_a_cancellation_waits_for_quiet() -> None:
    pool = foreign_pool()
    block = pool.block(0)
    left = anyio.Event()
    with gates(1) as (gate,):
        async with host_engine() as engine:
            with anyio.CancelScope() as scope:

                async def call() -> None:
                    try:
                        await engine.run(Launch(gate, writes=[block]))
                    finally:
                        assert gate.passed.is_set()
                        left.set()

                async with anyio.create_task_group() as group:
                    group.start_soon(call)
                    await gate.reached()
                    scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await turns()
                        assert not left.is_set()
                        gate.open()
            assert scope.cancelled_caught
            assert left.is_set()
    pool.close()


async def test_leave_gives_the_caller_the_duty_to_wait() -> None:
    pool = foreign_pool()
    blocks = pool.blocks_of([0, 1])
    with gates(1) as (gate,):
        async with host_engine() as engine:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel_when, gate.reached, scope)
                    await engine.run(Launch(gate, writes=[blocks]), leave=True)
            assert scope.cancelled_caught
            assert not gate.passed.is_set()
            with anyio.CancelScope() as impatient:
                impatient.cancel()
                await blocks.wait_unheld()
            gate.open()
            await blocks.wait_unheld()  # awaited again
            assert gate.passed.is_set()
    pool.close()


async def test_a_prepared_operation_on_foreign_memory_is_left_at_once() -> None:
    pool = foreign_pool()
    device = HandDevice()
    async with Engine(device) as engine:
        first = engine.submit_nowait(hand_launch())
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(cancel_when, turns, scope)
                await engine.run(hand_launch(writes=[pool.block(0)]), after=first)
        assert scope.cancelled_caught
        assert pool.counts().held == 0
        assert len(device.posted) == 1
        device.signal(0)
    pool.close()


async def test_a_loss_replaces_a_cancellation_that_was_held_back() -> None:
    pool = foreign_pool()
    block = pool.block(0)
    device = HandDevice()
    async with Engine(device) as engine:
        scope = anyio.CancelScope()
        raised = []

        async def call() -> None:
            with scope:
                try:
                    await engine.run(hand_launch(writes=[block]))
                except CompletionLost as lost:
                    raised.append(lost)

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await turns()
            scope.cancel()
            await turns()
            assert not raised
            device.signal(0, TimeoutError("gone"), lost=True)
        assert len(raised) == 1
        for _ in range(2):
            with pytest.raises(CompletionLost, match="block 0 of foreign is quarantined"):
                await block.wait_unheld()
        device.signal(0)
        await turns()
        await block.wait_unheld()
    pool.close()
