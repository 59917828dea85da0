"""Waiting for blocks: to lease them in order, and for the proof that nothing touches them."""

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
from tests.transfer.kit import Rig

from transfer._book import Hold
from transfer._errors import CompletionLost, LeaseError, PoolExhausted
from transfer._extent import BlockLayout
from transfer._handle import Blocks, Handle, Lease
from transfer._memory import HostPool

pytestmark = pytest.mark.anyio

RAW = BlockLayout.raw(8)


async def settle() -> None:
    """Let every task run as far as it can."""
    await anyio.wait_all_tasks_blocked()


def keep(
    results: list[Lease[Blocks]], pool: HostPool, count: int
) -> Callable[[], Coroutine[Any, Any, None]]:
    """A task that waits for a lease and keeps it."""

    async def work() -> None:
        results.append(await pool.wait_lease(count))

    return work


async def test_a_lease_is_waited_for_in_order() -> None:
    pool = HostPool(RAW, 2)
    first, second = pool.lease(), pool.lease()
    got: list[Lease[Blocks]] = []
    async with anyio.create_task_group() as group:
        for count in (2, 1):
            group.start_soon(keep(got, pool, count))
            await settle()
        first.release()
        await settle()
        assert got == []  # the second in line would fit, and is second
        second.release()
        await settle()
        assert [len(lease.handle) for lease in got] == [2]
        got[0].release()
    assert [len(lease.handle) for lease in got[1:]] == [1]


async def test_the_end_of_a_hold_frees_a_block_for_whoever_waits() -> None:
    rig = Rig(blocks=1)
    lease = rig.pool.lease()
    op = rig.submit(reads=[lease])
    lease.release()
    got: list[Lease[Blocks]] = []
    async with anyio.create_task_group() as group:
        group.start_soon(keep(got, rig.pool, 1))
        await settle()
        assert got == []
        rig.signal(op)
    assert len(got) == 1


async def test_more_than_there_are_is_refused_at_once() -> None:
    with pytest.raises(PoolExhausted, match="3 blocks wanted"):
        await HostPool(RAW, 2).wait_lease(3)
    assert len((await HostPool(RAW, 2).wait_lease(0)).handle) == 0


async def test_closing_ends_the_wait() -> None:
    pool = HostPool(RAW, 1)
    pool.lease()
    caught = []

    async def work() -> None:
        try:
            await pool.wait_lease(1)
        except LeaseError as error:
            caught.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        group.start_soon(work)
        await settle()
        pool.close()
    assert caught == ["host pool is closed"] * 2


async def test_an_engine_that_closes_forgets_nobody_on_a_living_loop() -> None:
    pool = HostPool(RAW, 1)
    lease = pool.lease()
    pool.adopt("engine")
    got: list[Lease[Blocks]] = []
    async with anyio.create_task_group() as group:
        group.start_soon(keep(got, pool, 1))
        await settle()
        pool.disown("engine")
        lease.release()
    assert len(got) == 1


async def test_whoever_waited_on_a_dead_loop_is_not_woken() -> None:
    pool = HostPool(RAW, 1)
    lease = pool.lease()
    pool.adopt("engine")
    hold = Hold(lease.handle, "operation", False)
    pool.book.take(hold)
    woken: list[str] = []
    pool.book.unheld[0] = [lambda: woken.append("dead loop")]
    async with anyio.create_task_group() as group:
        group.start_soon(pool.wait_lease, 1)
        await settle()
        pool.disown("engine", forget=True)
        pool.end(hold)
        lease.release()
        await settle()
        assert woken == []
        assert pool.counts().free == 1
        group.cancel_scope.cancel()


def waits(handle: Handle, results: list[str]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def work() -> None:
        try:
            await handle.wait_unheld()
        except CompletionLost as error:
            results.append(str(error))
        else:
            results.append("unheld")

    return work


@pytest.mark.parametrize("many", [False, True])
async def test_unheld_is_the_end_of_every_hold(many: bool) -> None:
    rig = Rig()
    blocks = rig.pool.lease(2).handle
    handle: Handle = blocks if many else blocks[1]
    first = rig.submit(reads=[blocks[1]])
    second = rig.submit(reads=[blocks])
    results: list[str] = []
    await blocks[:0].wait_unheld()
    async with anyio.create_task_group() as group:
        group.start_soon(waits(handle, results))
        group.start_soon(waits(handle, results))
        await settle()
        rig.signal(second)
        await settle()
        assert results == []
        rig.signal(first)
    assert results == ["unheld"] * 2
    assert rig.pool.book.unheld == {}
    await handle.wait_unheld()


async def test_a_lost_end_is_said_and_may_be_awaited_again() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.submit(writes=[block], name="copy")
    results: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(waits(block, results))
        await settle()
        rig.signal(op, lost=True)
    words = "block 0 of pool is quarantined; held by [<operation 1 copy, quarantined>]"
    assert results == [words]
    with pytest.raises(CompletionLost, match="quarantined"):
        await block.wait_unheld()
    # Proof comes after all: the same wait, once more, is the permission to reuse.
    rig.signal(op)
    await block.wait_unheld()
    assert rig.pool.counts() == (15, 1, 0, 0)


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.submit(writes=[block])
    with anyio.move_on_after(0):
        await block.wait_unheld()
    assert rig.pool.book.unheld == {}
    rig.signal(op)


async def test_blocks_are_unheld_together_or_not_at_all() -> None:
    rig = Rig(blocks=2)
    blocks = rig.pool.lease(2).handle
    first = rig.submit(writes=[blocks[1]])
    results: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(waits(blocks, results))
        await settle()
        second = rig.submit(writes=[blocks[0]])  # it was quiet when the wait began
        rig.signal(first)
        await settle()
        assert results == []
        rig.signal(second)
    assert results == ["unheld"]
