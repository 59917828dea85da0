"""Cancellation: the caller leaves, the bytes stay owned until the device is quiet."""

import random
from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from tests.transfer.gates import (
    BYTES,
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
    Block,
    Blocks,
    CompletionLost,
    Copy,
    Engine,
    FileDevice,
    FileRead,
    HostPool,
    Launch,
    Lease,
    LeaseError,
    OperationCancelled,
    Pool,
    PoolExhausted,
    State,
)
from transfer.files import SystemCalls

pytestmark = pytest.mark.anyio


async def test_a_cancelled_call_leaves_and_its_block_stays() -> None:
    # case 65 - every free buffer is taken while the worker still writes
    with HostPool(LAYOUT, 3) as pool:
        lease = pool.lease()
        block = lease.handle
        target = pool.storage.view(pool.address(0, block.id), BYTES)

        def write() -> None:
            target[:] = b"\xff" * BYTES

        gate = Gate(write)
        async with host_engine() as engine:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel_when, gate.reached, scope)
                    await engine.run(Launch(gate, writes=[lease]))
            assert scope.cancelled_caught
            (op,) = engine.holders()
            assert op.state is State.ABANDONED
            with pytest.raises(LeaseError):
                block.view()
            lease.release()
            others = pool.lease(2)
            with pytest.raises(PoolExhausted):
                pool.lease()
            assert block.id not in others.handle.ids
            gate.open()
            await block.wait_unheld()
            with pytest.raises(OperationCancelled):
                await op.wait()
            assert pool.counts() == (1, 2, 0, 0)
            for other in others.handle:
                assert bytes(other.view()) == bytes(BYTES)
            others.release()
            target.release()
        assert engine.statistics().devices["host"].cancelled == 1


async def cancel_when(ready: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
    await ready()
    scope.cancel()


class SlowFiles(SystemCalls):
    """Reads stop at a gate, already inside the system call's place."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Wait, then read."""
        self.gate()
        return super().preadv(fd, buffers, offset)


async def test_a_cancelled_file_read_lands_in_its_own_block_only(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # case 65 - the thread goes on reading into memory that must still be its own
    path = tmp_path_factory.mktemp("read") / "value"
    await anyio.Path(path).write_bytes(b"\xee" * BYTES)
    with HostPool(LAYOUT, 4) as pool, gates(1) as (gate,):
        lease = pool.lease()
        block = lease.handle
        async with Engine(FileDevice(threads=1, direct=False, calls=SlowFiles(gate))) as engine:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel_when, gate.reached, scope)
                    await engine.run(FileRead(path, block))
            lease.release()
            with pool.lease(3) as rest:
                gate.open()
                await block.wait_unheld()
                assert all(bytes(other.view()) == bytes(BYTES) for other in rest)
        assert pool.counts().free == 4


async def test_waiting_is_not_owning() -> None:
    with gates(1) as (gate,):
        async with host_engine() as engine:
            op = engine.submit_nowait(Launch(gate))
            await gate.reached()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await op.wait()
            assert scope.cancelled_caught
            assert op.state is State.IN_FLIGHT
            gate.open()
            await op.wait()


async def test_cancel_is_total_and_idempotent() -> None:
    device = HandDevice()
    engine = Engine(device)
    async with engine:
        op = engine.submit_nowait(hand_launch())
        behind = engine.submit_nowait(hand_launch(), after=op)
        behind.cancel()
        assert behind.state is State.CANCELLED
        for _ in range(3):
            op.cancel()
            assert op.state is State.ABANDONED
        device.signal(0)
        with pytest.raises(OperationCancelled):
            await op.wait()
        lost = engine.submit_nowait(hand_launch())
        device.signal(1, TimeoutError("gone"), lost=True)
        with pytest.raises(CompletionLost):
            await lost.wait()
    for ended, state in ((op, State.CANCELLED), (lost, State.QUARANTINED)):
        ended.cancel()  # also when the engine is closed
        assert ended.state is state
    with pytest.raises(OperationCancelled):
        await op.wait()


async def test_a_deadline_is_a_cancel() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        async with Engine(device) as engine:
            with anyio.move_on_after(0) as nothing:
                await engine.submit(hand_launch(writes=[block]))
            assert nothing.cancelled_caught
            assert device.posted == []
            with anyio.move_on_after(0.001) as scope:
                await engine.run(hand_launch(writes=[block]))
            assert scope.cancelled_caught
            assert engine.statistics().devices["hand"].abandoned == 1
            device.signal(0)
            await block.wait_unheld()


# Every await, for every n (case 67)


def nth_checkpoint(
    work: Callable[[], Awaitable[None]], number: int
) -> Callable[[], Awaitable[bool]]:
    """Run `work` in a scope that is cancelled after `number` turns of the loop; whether it was."""

    async def run() -> bool:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def strike() -> None:
                    await turns(number)
                    scope.cancel()

                group.start_soon(strike)
                await work()
                group.cancel_scope.cancel()
        return scope.cancelled_caught

    return run


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("leave", [False, True])
async def test_cancelled_at_every_turn(foreign: bool, leave: bool) -> None:
    # case 67 - one call through admission, posting, waiting and ending, struck at every turn
    pool: Pool = foreign_pool() if foreign else HostPool(LAYOUT, 4)
    blocks = pool.blocks_of([0, 1]) if foreign else pool.lease(2).handle
    start = pool.counts()
    device = HandDevice()
    struck = []
    async with Engine(device, in_flight_max=1) as engine:
        for number in range(24):
            blocker = engine.submit_nowait(hand_launch())

            async def signals(blocker: int) -> None:
                await turns(4)
                device.signal(blocker)
                await turns(8)
                for later in range(blocker + 1, len(device.posted)):
                    device.signal(later)

            async def work() -> None:
                await engine.run(hand_launch(reads=[blocks[0]], writes=[blocks[1]]), leave=leave)
                assert pool.counts() == start

            async with anyio.create_task_group() as group:
                group.start_soon(signals, len(device.posted) - 1)
                struck.append(await nth_checkpoint(work, number)())
                if not leave and foreign:
                    assert pool.counts().held == 0  # delivered only once they are quiet
            await blocker.wait()
            await engine.drain()
            assert pool.counts() == start
            check_posted([blocker], device)
            # The next operation works.
            op = engine.submit_nowait(hand_launch(writes=[blocks]))
            device.signal(-1)
            await op.wait()
    assert struck[0]
    assert not struck[-1]
    assert engine.statistics().stray_completions == 0
    pool.close()


async def test_wait_lease_cancelled_at_every_turn() -> None:
    # case 67
    with HostPool(LAYOUT, 2) as pool:
        async with host_engine() as engine:
            for number in range(12):
                lease = pool.lease(2)

                async def release(lease: Lease[Blocks] = lease) -> None:
                    await turns(4)
                    lease.release()

                async def work() -> None:
                    with await pool.wait_lease(2) as got:
                        await engine.run(Launch(lambda: None, writes=[got]))

                async with anyio.create_task_group() as group:
                    group.start_soon(release)
                    await nth_checkpoint(work, number)()
                await engine.drain()
                assert pool.counts() == (2, 0, 0, 0)


async def test_timeout_against_completion_in_one_turn(seed: int) -> None:
    # case 66 - completion, time limit and outer cancel in the same turn, in every order
    chance = random.Random(seed)
    device = HandDevice()
    outcomes = {"done": 0, "cancelled": 0}

    async def call(
        inner: anyio.CancelScope, outer: anyio.CancelScope, result: list[str], block: Block
    ) -> None:
        with outer, inner:
            await engine.run(hand_launch(writes=[block]))
            result.append("done")
        if not result:
            result.append("cancelled")

    with HostPool(LAYOUT, 1) as pool:
        async with Engine(device) as engine:
            for _ in range(1000):
                lease = pool.lease()
                inner, outer = anyio.CancelScope(), anyio.CancelScope()
                events: list[Callable[[], None]] = [
                    lambda: device.signal(-1),
                    lambda inner=inner: inner.cancel(),  # type: ignore[misc]
                    lambda outer=outer: outer.cancel(),  # type: ignore[misc]
                ]
                chance.shuffle(events)
                gaps = [chance.randrange(3) for _ in events]
                result: list[str] = []

                async with anyio.create_task_group() as group:
                    group.start_soon(call, inner, outer, result, lease.handle)
                    await turns(2)
                    for event, gap in zip(events, gaps, strict=True):
                        event()
                        await turns(gap)
                assert len(result) == 1
                outcomes[result[0]] += 1
                lease.release()
                await engine.drain()
                assert pool.counts() == (1, 0, 0, 0)
    assert min(outcomes.values()) > 50
    done = engine.statistics().devices["hand"]
    assert done.completed + done.cancelled == 1000


async def test_a_completed_operation_is_no_longer_cancelled() -> None:
    with HostPool(LAYOUT, 2) as pool, pool.lease() as a, pool.lease() as b:
        async with host_engine() as engine:
            op = engine.submit_nowait(Copy(a, b))
            await op.wait()
            op.cancel()
            await op.wait()
            assert op.state is State.COMPLETED
