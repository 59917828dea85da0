"""Fail the Nth call, cancel at the Nth stop: N = 1, 2, … until nothing is left to fail."""

import asyncio
from contextlib import suppress

import anyio
import pytest
from tests.sim.stepping import at_stop

from transfer import (
    BlockLayout,
    CompletionLost,
    Copy,
    Engine,
    Launch,
    LeaseError,
    TransferError,
)
from transfer.testing import (
    CALL_FAULTS,
    Fault,
    FaultPlan,
    FaultyDevice,
    PoisonedPool,
    SimDevice,
    broken_invariants,
    peek,
)

pytestmark = pytest.mark.anyio

LAYOUT = BlockLayout.raw(12)
FAULTS = sorted(set(Fault) - CALL_FAULTS, key=lambda fault: fault.name)


EXPECTED = (TransferError, LeaseError)  # blocks of a lost copy cannot be named without it


class Rig:
    """An engine on a pretend GPU and a pretend host, both stepped by the loop."""

    def __init__(self, plan: FaultPlan) -> None:
        self.gpu_device = SimDevice(auto=True, chunk=(1, 5), seed=plan.seed)
        self.host_device = SimDevice(kind="host", auto=True, chunk=(1, 5), seed=plan.seed)
        self.gpu = FaultyDevice(self.gpu_device, plan)
        self.host = FaultyDevice(self.host_device, FaultPlan())
        self.pages = PoisonedPool(LAYOUT, 3, kind="sim:0", name="pages")
        self.slots = PoisonedPool(LAYOUT, 3, name="slots")
        self.engine = Engine(self.gpu, self.host, in_flight_max=1)
        self.failures: list[BaseException] = []

    async def story(self) -> None:
        """Lease, copy there and back, chain, launch, wait, drain; errors of devices go on."""
        with self.pages.lease(2) as pages, self.slots.lease(2) as slots:
            slots[0].view(write=True)[:] = b"a" * 12
            slots[1].view(write=True)[:] = b"b" * 12
            with suppress(*EXPECTED):
                await self.engine.copy(slots, pages, after=())
            with suppress(*EXPECTED):
                first = await self.engine.submit(Copy(pages[0], slots[1]), after=())
                second = await self.engine.submit(Copy(slots[1], pages[1]), after=first)
                await second.wait()
                assert peek(pages[1]) == peek(slots[1])
            with suppress(*EXPECTED):
                await self.engine.run(Launch(lambda: None, reads=[slots[0]]), after=())
                await pages.wait_unheld()
        spare = await self.slots.wait_lease(1)
        with spare, self.pages.lease(1) as page, suppress(*EXPECTED):
            await self.engine.submit(Copy(spare, page), after=())
        await self.engine.drain()

    async def check(self) -> None:
        """After everything: nothing in flight, nothing leaked, nothing damaged."""
        while self.gpu.release() + self.host.release():
            await anyio.lowlevel.checkpoint()
        for _ in range(200):
            await anyio.lowlevel.checkpoint()
        assert self.gpu_device.idle
        pools = [self.pages, self.slots]
        assert broken_invariants(self.engine._lanes, pools) == []
        for pool in pools:
            assert pool.damage() == []
            counts = pool.counts()
            assert counts.held == counts.leased == 0
            assert counts.free + counts.quarantined == pool.blocks


async def releasing(rig: Rig) -> None:
    """Release whatever a plan holds back, all the time."""
    while True:
        rig.gpu.release()
        await anyio.lowlevel.checkpoint()


PROVEN = set(FAULTS) - {Fault.UNFENCED, Fault.INTERRUPT, Fault.INTERRUPT_EARLY, Fault.POISON}


@pytest.mark.parametrize("fault", FAULTS)
async def test_fail_the_nth_call(fault: Fault) -> None:
    number = struck = 0
    while number == struck:
        rig = Rig(FaultPlan(3, at={number: fault}))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(releasing, rig)
            async with rig.engine:
                with suppress(KeyboardInterrupt):
                    await rig.story()
            tasks.cancel_scope.cancel()
        async with rig.engine:
            await rig.check()
        if fault in PROVEN:
            assert rig.pages.counts().quarantined == 0
        struck += rig.gpu.injected[fault]
        number += 1
    assert struck >= (1 if fault is Fault.PARTIAL else 2)


async def test_cancel_at_the_nth_stop() -> None:
    # case 67
    number = 1
    reached = True
    while reached:
        rig = Rig(FaultPlan(number))
        async with rig.engine:
            with anyio.CancelScope() as scope:
                reached = await at_stop(rig.story(), number, scope.cancel)
        async with rig.engine:
            await rig.check()
            assert rig.pages.counts().quarantined == 0
            await rig.story()
        number += 1
    assert number > 6


async def cancelling_itself(rig: Rig, number: int) -> None:
    task = asyncio.current_task()
    assert task is not None

    def strike() -> None:
        task.cancel()

    async with rig.engine:
        await at_stop(rig.story(), number, strike)


async def test_cancel_natively_at_the_nth_stop(anyio_backend_name: str) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("Task.cancel() is asyncio's own")
    number = 1
    reached = True
    while reached:
        rig = Rig(FaultPlan(number))
        task = asyncio.create_task(cancelling_itself(rig, number))
        await asyncio.wait((task,))
        reached = task.cancelled()
        async with rig.engine:
            await rig.check()
            assert rig.pages.counts().quarantined == 0
        number += 1
    assert number > 6


async def test_cancel_at_the_nth_stop_while_the_nth_call_fails() -> None:
    for number in range(1, 9):
        for fault in (Fault.WITHHOLD, Fault.LATE, Fault.ERROR):
            rig = Rig(FaultPlan(number, at={number % 3: fault}))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(releasing, rig)
                async with rig.engine:
                    with anyio.CancelScope() as scope:
                        await at_stop(rig.story(), number, scope.cancel)
                tasks.cancel_scope.cancel()
            async with rig.engine:
                await rig.check()
                assert rig.pages.counts().quarantined == 0


async def test_a_loss_that_is_never_proven_does_not_hold_up_closing() -> None:
    rig = Rig(FaultPlan(at={0: Fault.UNFENCED}))
    async with rig.engine:
        with rig.pages.lease() as page, rig.slots.lease() as slot, pytest.raises(CompletionLost):
            await rig.engine.copy(slot, page, after=())
    assert rig.pages.counts().quarantined == 1
