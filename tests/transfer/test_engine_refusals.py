"""Bad input: each kind has its own error, which names what was found and what is expected."""

from pathlib import Path

import anyio
import pytest
from tests.transfer.gates import (
    BYTES,
    LAYOUT,
    HandDevice,
    device_pool,
    hand_launch,
    host_engine,
)

from transfer import (
    AlignmentError,
    BadWork,
    BlockLayout,
    Copy,
    Engine,
    EngineClosed,
    FileDevice,
    FileRead,
    FileWrite,
    HoldConflict,
    HostDevice,
    HostPool,
    Launch,
    LayoutMismatch,
    LeaseError,
    OrderRequired,
    PoolBusy,
    PoolExhausted,
    Span,
    SpanError,
    StaleBlock,
    State,
    WrongDevice,
    WrongPool,
)

pytestmark = pytest.mark.anyio


async def test_unordered_conflicting_holds() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        async with Engine(device) as engine:
            first = engine.submit_nowait(hand_launch(writes=[block]), name="load")
            for work in (hand_launch(reads=[block]), hand_launch(writes=[block])):
                with pytest.raises(HoldConflict, match=r"load, in flight> writes; expected after="):
                    await engine.run(work)
            second = engine.submit_nowait(hand_launch(reads=[block]), after=first)
            third = engine.submit_nowait(hand_launch(reads=[block]), after=first)
            with pytest.raises(HoldConflict, match="would write"):
                engine.submit_nowait(hand_launch(writes=[block]), after=(first, second))
            fourth = engine.submit_nowait(hand_launch(writes=[block]), after=(second, third))
            assert len(engine.holders(block)) == 4
            for number in range(4):
                device.signal(min(number, len(device.posted) - 1))
                await (first, second, third, fourth)[number].wait()
            assert engine.statistics().devices["hand"].submitted == 4


async def test_span_past_its_block() -> None:
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        with pytest.raises(SpanError, match=f"bytes 1 to {BYTES + 1} of a block of {BYTES}"):
            block.span(1, BYTES)
        with pytest.raises(SpanError, match="plane 1 of a block with 1"):
            Span(block, 1, 0, 1)


async def test_misaligned_direct_io(tmp_path: Path) -> None:
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        async with Engine(FileDevice(threads=1, direct=True)) as engine:
            with pytest.raises(
                AlignmentError, match="multiples of 4096 bytes; found span 0 of 100"
            ):
                await engine.run(FileWrite(tmp_path / "f", block.span(0, 100)))
            assert pool.counts().held == 0
            assert [path async for path in anyio.Path(tmp_path).iterdir()] == []


async def test_zero_length_is_a_completed_no_op() -> None:
    layout = BlockLayout.raw(0)
    with HostPool(layout, 2) as pool, pool.lease() as a, pool.lease() as b:
        async with host_engine() as engine:
            op = engine.submit_nowait(Copy(a, b))
            assert op.state is State.COMPLETED
            await op.wait()
            await engine.copy(b, a)
    with HostPool(LAYOUT, 2) as pool, pool.lease(0) as none, pool.lease(0) as nothing:
        async with host_engine() as engine:
            await engine.copy(none, nothing)
            assert engine.statistics().devices["host"].completed == 1


async def test_wrong_pool_of_another_engine() -> None:
    device, other = HandDevice(), HandDevice()
    with HostPool(LAYOUT, 1, name="shared") as pool, pool.lease() as block:
        async with Engine(device, name="first") as first, Engine(other, name="second") as second:
            op = first.submit_nowait(hand_launch(reads=[block]))
            with pytest.raises(
                WrongPool, match=r"shared has operations of .*; <second on hand> cannot"
            ):
                second.submit_nowait(hand_launch(reads=[block]))
            device.signal()
            await op.wait()
            op = second.submit_nowait(hand_launch(reads=[block]))
            other.signal()
            await op.wait()


async def test_an_empty_pool_says_who_has_the_blocks() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 4, name="slots") as pool:
        leased, held, lost = pool.lease(), pool.lease(), pool.lease()
        async with Engine(device) as engine:
            engine.submit_nowait(hand_launch(writes=[lost]))
            device.signal(0, TimeoutError("gone"), lost=True)
            op = engine.submit_nowait(hand_launch(reads=[held]))
            held.release()
            await engine.holders(op.work.reads[0])[0].wait_posted()
            engine._reaper.reap()
            words = "slots: 2 blocks wanted, 1 free; 1 leased, 1 held by operations, 1 quarantined"
            with pytest.raises(PoolExhausted, match=words) as error:
                pool.lease(2)
            assert (error.value.free, error.value.quarantined) == (1, 1)
            with pytest.raises(PoolExhausted, match="5 blocks wanted"):
                await pool.wait_lease(5)
            device.signal(1)
            await op.wait()
            device.signal(0)
        leased.release()
        lost.release()
    assert pool.counts().free == 4


async def test_device_memory_without_after() -> None:
    with device_pool() as pool, pool.lease(2) as pages:
        async with Engine(HandDevice()) as engine:
            with pytest.raises(
                OrderRequired, match="after= is not given: expected a stream"
            ) as error:
                await engine.copy(pages[:1], pages[1:])
            assert isinstance(error.value, TypeError)
            with pytest.raises(OrderRequired):
                engine.submit_nowait(hand_launch(reads=[pages]))
            assert pool.counts().held == 0
    async with Engine(HandDevice(ordered=True)) as engine:
        with pytest.raises(OrderRequired):
            engine.submit_nowait(hand_launch())


async def test_after_something_that_no_device_knows() -> None:
    async with host_engine() as engine:
        with pytest.raises(WrongDevice, match="7 is no Operation and no stream or event of host"):
            await engine.run(Launch(lambda: None), after=7)
        with pytest.raises(WrongDevice, match="None is no Operation"):
            await engine.run(Launch(lambda: None), after=None)


async def test_wrong_device_for_a_memory_kind() -> None:
    with device_pool() as pages, HostPool(LAYOUT, 1) as pool, pages.lease() as page:
        async with Engine(HostDevice(threads=1)) as engine:
            with pool.lease() as slot:
                words = "no device for Copy fake:0 host; there are: Copy host host, External host"
                with pytest.raises(WrongDevice, match=words):
                    await engine.copy(page, slot, after=())
            with pytest.raises(WrongDevice, match="no device for FileRead"):
                await engine.run(FileRead("/nowhere", ()))
            with pytest.raises(WrongDevice, match="host has no streams"):
                await engine.run(Launch(lambda: None, stream="s"))


async def test_stale_generation() -> None:
    with HostPool(LAYOUT, 2) as pool, pool.lease() as other:
        lease = pool.lease()
        block = lease.handle
        lease.release()
        async with host_engine() as engine:
            for stale in (Copy(block, other), Copy(other, block)):
                with pytest.raises(StaleBlock, match="stale: the block is at generation 1"):
                    await engine.run(stale)
            with pytest.raises(StaleBlock, match="used after release"):
                await engine.copy(lease, other)
            with pytest.raises(StaleBlock):
                block.view()


async def test_a_lease_that_ends_while_its_owner_waits_for_admission() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool:
        lease = pool.lease()
        async with Engine(device, in_flight_max=1) as engine, anyio.create_task_group() as group:
            blocker = engine.submit_nowait(hand_launch())

            async def ask() -> None:
                with pytest.raises(StaleBlock):
                    await engine.run(hand_launch(writes=[lease]))

            group.start_soon(ask)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            lease.release()
            device.signal(0)
            await blocker.wait()
        assert len(device.posted) == 1


async def test_double_release_is_counted_and_changes_nothing() -> None:
    with HostPool(LAYOUT, 2) as pool:
        async with host_engine() as engine:
            lease, other = pool.lease(), pool.lease()
            await engine.copy(lease, other)
            lease.release()
            for count in (1, 2):
                with pytest.raises(LeaseError, match="released a second time"):
                    lease.release()
                assert engine.statistics().double_releases == count
                assert pool.counts() == (1, 1, 0, 0)
            other.release()


async def test_submit_after_close() -> None:
    engine = host_engine()
    with HostPool(LAYOUT, 2) as pool, pool.lease() as a, pool.lease() as b:
        with pytest.raises(EngineClosed, match="engine is not started"):
            engine.submit_nowait(Copy(a, b))
        async with engine:
            await engine.copy(a, b)
        for _ in range(2):
            with pytest.raises(EngineClosed, match="engine is not started"):
                await engine.copy(a, b)
        with pytest.raises(EngineClosed):
            await engine.drain()
        assert pool.counts().held == 0


async def test_a_pool_closed_while_held() -> None:
    device = HandDevice()
    pool = HostPool(LAYOUT, 2, name="slots")
    lease = pool.lease()
    async with Engine(device) as engine:
        op = engine.submit_nowait(hand_launch(writes=[lease]), name="load")
        with pytest.raises(
            PoolBusy, match=r"slots closed with .*held=1.*held by .*load, in flight"
        ):
            pool.close()
        assert pool.storage.planes
        lease.handle.pool.storage.view(pool.address(0, 0), 4)[:] = b"mine"  # still mapped
        pool.close()  # once is enough
        device.signal()
        await op.wait()
        with pytest.raises(LeaseError, match="slots is closed"):
            pool.lease()


async def test_a_copy_onto_itself_and_of_different_numbers() -> None:
    with HostPool(LAYOUT, 3) as pool, pool.lease(2) as two, pool.lease() as one:
        with pytest.raises(BadWork, match="copied onto itself"):
            Copy(one, one)
        with pytest.raises(LayoutMismatch, match="2 blocks cannot fill 1"):
            Copy(two, one)
        other = HostPool(BlockLayout.raw(100), 1)
        with pytest.raises(LayoutMismatch), other.lease() as small:
            Copy(one, small)
        other.close()


async def test_looking_at_bytes_that_an_operation_may_change() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 2) as pool, pool.lease() as read, pool.lease() as written:
        async with Engine(device) as engine:
            op = engine.submit_nowait(hand_launch(reads=[read], writes=[written]), name="load")
            read.view()
            with pytest.raises(LeaseError, match="held by <operation 1 load"):
                read.view(write=True)
            with pytest.raises(LeaseError, match="held by <operation 1 load"):
                written.view()
            device.signal()
            await op.wait()
            written.view(write=True)
