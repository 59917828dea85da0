"""A loss and a cancellation in one turn of the loop, on foreign memory."""

import asyncio

import pytest

from transfer import BlockLayout, CompletionLost, Copy, Engine
from transfer.testing import Fault, FaultPlan, FaultyDevice, SimDevice, SimPool

LAYOUT = BlockLayout.raw(8)


def test_a_loss_replaces_a_cancellation_that_comes_in_the_same_turn() -> None:
    async def main() -> None:
        sim = SimDevice(kind="sim:0")
        device = FaultyDevice(sim, FaultPlan(at={0: Fault.LATE}))
        pool = SimPool(LAYOUT, 2, foreign=True)
        async with Engine(device) as engine:
            work = Copy(pool.block(0), pool.block(1))
            task = asyncio.ensure_future(engine.run(work, after=()))
            while not pool.counts().quarantined:  # noqa: ASYNC110 - turn by turn
                await asyncio.sleep(0)
            task.cancel()  # the waiter is woken and has not run yet
            with pytest.raises(CompletionLost):
                await task
            sim.run_until_idle()

    asyncio.run(main())
