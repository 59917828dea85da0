"""FaultyDevice and FaultyCalls: each fault has the consequence that the design gives it."""

import errno
from pathlib import Path

import anyio
import pytest

from transfer import (
    BlockLayout,
    CompletionLost,
    Copy,
    DevicePoisoned,
    Engine,
    FileDevice,
    FileRead,
    FileWrite,
    HostDevice,
    HostPool,
    Operation,
    OperationFailed,
    State,
    SubmitError,
)
from transfer.testing import Fault, FaultPlan, FaultyCalls, FaultyDevice, SimDevice, SimPool, peek

pytestmark = pytest.mark.anyio

LAYOUT = BlockLayout.raw(24)


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


class Bench:
    """One batched copy of three blocks on a device with one fault."""

    def __init__(self, fault: Fault, *, blocks: int = 3) -> None:
        self.sim = SimDevice(kind="host", seed=4)
        self.device = FaultyDevice(self.sim, FaultPlan(5, at={0: fault}))
        self.pool = SimPool(LAYOUT, 2 * blocks, kind="host")
        self.engine = Engine(self.device)
        self.blocks = blocks

    async def submit(self) -> Operation:
        self.source, self.target = self.pool.lease(self.blocks), self.pool.lease(self.blocks)
        for block in self.source.handle:
            block.view(write=True)[:] = b"s" * 24
        return await self.engine.submit(Copy(self.source, self.target))

    async def settle(self) -> None:
        self.sim.run_until_idle()
        await turns()

    def copied(self) -> int:
        return sum(peek(block) == b"s" * 24 for block in self.target.handle)


async def test_refuse_posts_nothing() -> None:
    bench = Bench(Fault.REFUSE)
    async with bench.engine:
        with pytest.raises(SubmitError):
            await bench.submit()
        assert bench.sim.idle
        assert bench.pool.counts().held == 0
    assert bench.device.injected == {Fault.REFUSE: 1}


@pytest.mark.parametrize("fault", [Fault.PARTIAL, Fault.ERROR])
async def test_a_failure_comes_when_the_posted_part_is_quiet(fault: Fault) -> None:
    # case 4, part of a batch is posted; its blocks stay held until that part is quiet
    bench = Bench(fault)
    async with bench.engine:
        op = await bench.submit()
        await turns()
        assert bench.pool.counts().held == 6
        await bench.settle()
        with pytest.raises(OperationFailed):
            await op.wait()
        assert bench.pool.counts().held == 0
        assert bench.copied() == 3 if fault is Fault.ERROR else 0 < bench.copied() < 3


async def test_one_block_cannot_be_partly_posted() -> None:
    bench = Bench(Fault.PARTIAL, blocks=1)
    async with bench.engine:
        op = await bench.submit()
        await bench.settle()
        await op.wait()
    assert not bench.device.injected


async def test_delayed_work_begins_when_released() -> None:
    bench = Bench(Fault.DELAY)
    async with bench.engine:
        op = await bench.submit()
        await bench.settle()
        assert op.state is State.IN_FLIGHT
        assert bench.copied() == 0
        assert bench.device.release() == 1
        await bench.settle()
        await op.wait()
        assert bench.copied() == 3


async def test_a_withheld_signal_keeps_the_blocks() -> None:
    bench = Bench(Fault.WITHHOLD)
    async with bench.engine:
        op = await bench.submit()
        await bench.settle()
        assert bench.copied() == 3
        assert op.state is State.IN_FLIGHT
        assert bench.device.pending == 1
        bench.device.release()
        await op.wait()


async def test_a_second_signal_is_counted_and_dropped() -> None:
    # case 7, the same completion twice
    bench = Bench(Fault.TWICE)
    async with bench.engine:
        op = await bench.submit()
        await bench.settle()
        await op.wait()
        bench.device.release()
        await turns()
        assert op.state is State.COMPLETED
        assert bench.engine.statistics().stray_completions == 1


@pytest.mark.parametrize("fault", [Fault.LOSE, Fault.LATE, Fault.FENCED])
async def test_a_late_proof_ends_a_quarantine(fault: Fault) -> None:
    bench = Bench(fault)
    async with bench.engine:
        if fault is Fault.FENCED:
            with pytest.raises(CompletionLost):
                await bench.submit()
        else:
            op = await bench.submit()
            with pytest.raises(CompletionLost):
                await op.wait()
        assert bench.pool.counts().quarantined == 6
        await bench.settle()
        assert bench.copied() == 3
        if fault is Fault.LOSE:
            assert bench.pool.counts().quarantined == 6
            bench.device.release()
            await turns()
        assert bench.pool.counts().quarantined == 0


async def test_posted_without_a_fence_is_quarantined_for_ever() -> None:
    bench = Bench(Fault.UNFENCED)
    async with bench.engine:
        with pytest.raises(CompletionLost):
            await bench.submit()
        await bench.settle()
        bench.device.release()
        await turns()
        assert bench.copied() == 3
        assert bench.pool.counts().quarantined == 6
        assert bench.engine.statistics().stray_completions == 1


async def test_a_lost_context_poisons_the_device() -> None:
    # case 11, everything in flight is lost with it, and later submits are refused
    bench = Bench(Fault.POISON, blocks=1)
    async with bench.engine:
        other = SimPool(LAYOUT, 2, kind="host")
        op = await bench.submit()
        second = await bench.engine.submit(Copy(other.lease(), other.lease()))
        for lost in (op, second):
            with pytest.raises(CompletionLost):
                await lost.wait()
        third = SimPool(LAYOUT, 2, kind="host")
        with pytest.raises(DevicePoisoned):
            await bench.engine.submit(Copy(third.lease(), third.lease()))


@pytest.mark.parametrize("fault", [Fault.INTERRUPT, Fault.INTERRUPT_EARLY])
async def test_an_interrupt_out_of_posting_quarantines(fault: Fault) -> None:
    bench = Bench(fault)
    async with bench.engine:
        with pytest.raises(KeyboardInterrupt):
            await bench.submit()
        assert bench.pool.counts().quarantined == 6
        await bench.settle()
        assert bench.copied() == (3 if fault is Fault.INTERRUPT else 0)
        assert bench.pool.counts().quarantined == 6


@pytest.mark.may_block
async def test_any_device_can_be_wrapped() -> None:
    pool = HostPool(LAYOUT, 8)
    device = FaultyDevice(HostDevice(inline_bytes_max=0), FaultPlan(rates={Fault.DELAY: 1.0}))
    async with Engine(device) as engine:
        with pool.lease(4) as a, pool.lease(4) as b:
            a[3].view(write=True)[:] = b"z" * 24
            op = await engine.submit(Copy(a, b))
            device.release()
            await op.wait()
            assert bytes(b[3].view()) == b"z" * 24


SIZE = 3 * 4096


async def write_and_read(folder: Path, faults: dict[int, Fault]) -> tuple[FaultyCalls, int]:
    """Write a file and read it back under faults; how many of the two failed."""
    calls = FaultyCalls(FaultPlan(2, at=faults))
    with HostPool(BlockLayout.raw(SIZE), 2) as pool:
        async with Engine(FileDevice(threads=1, calls=calls)) as engine:
            with pool.lease() as a, pool.lease() as b:
                a.view(write=True)[:] = bytes(range(256)) * 48
                name = folder / "name"
                causes: list[object] = []
                try:
                    await engine.run(FileWrite(folder / "new", a, publish=name, sync="full"))
                    await engine.run(FileRead(name, b))
                    assert bytes(b.view()) == bytes(range(256)) * 48
                except OperationFailed as error:
                    causes.append(error.__cause__)
    assert all(isinstance(cause, OSError) for cause in causes)
    assert {path.name for path in folder.iterdir()} <= {"name"}  # noqa: ASYNC240 - a test
    return calls, len(causes)


@pytest.mark.parametrize(
    "fault", [Fault.SHORT, Fault.NOTHING, Fault.EINTR, Fault.ENOSPC, Fault.EIO]
)
async def test_fail_the_nth_system_call(tmp_path: Path, fault: Fault) -> None:
    # case 27, at the first, the second, ... call, until none is left to fail
    struck = 0
    number = 0
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        calls, failed = await write_and_read(folder, {number: fault})
        if number >= calls.calls:
            break
        struck += calls.injected[fault]
        if fault in (Fault.SHORT, Fault.EINTR):
            assert failed == 0
        elif calls.injected[fault]:
            assert failed == 1
        number += 1
    assert struck >= 2
    assert number >= 8


async def test_every_count_is_short(tmp_path: Path) -> None:
    calls, failed = await write_and_read(tmp_path, dict.fromkeys(range(200), Fault.SHORT))
    assert failed == 0
    assert calls.injected[Fault.SHORT] > 4


def test_errors_are_the_systems_own() -> None:
    calls = FaultyCalls(FaultPlan(at={0: Fault.ENOSPC}))
    with pytest.raises(OSError, match="injected into fsync") as caught:
        calls.fsync(0)
    assert caught.value.errno == errno.ENOSPC
