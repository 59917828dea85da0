"""Pools: leases, waiting for blocks, addresses that do not wrap, whose a pool is, closing."""

import gc
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.transfer.kit import Rig, move, states

from transfer._book import Hold
from transfer._errors import (
    ForkDetected,
    LayoutMismatch,
    LeaseError,
    PoolBusy,
    PoolExhausted,
    StaleBlock,
    WrongPool,
    WrongThread,
)
from transfer._extent import BlockLayout, Extent
from transfer._handle import Block, Blocks, Lease
from transfer._memory import HostPool, Pool
from transfer._state import State
from transfer._storage import PAGE, Plane
from transfer._work import Copy

RAW = BlockLayout.raw(64)


class FakeStorage:
    """Planes anywhere, with no memory behind them: for arithmetic."""

    kind = "host"
    pinned = False

    def __init__(self, *planes: Plane) -> None:
        self.planes = planes
        self.closed = 0

    def view(self, address: int, nbytes: int) -> memoryview:
        raise AssertionError

    def tensor(self, address: int, extent: Extent) -> object:
        raise AssertionError

    def close(self) -> None:
        self.closed += 1


def fake_pool(*planes: Plane, blocks: int = 8) -> Pool:
    layout = BlockLayout((), tuple(plane.nbytes for plane in planes))
    return Pool(layout, blocks, FakeStorage(*planes))  # type: ignore[arg-type]


class Owners(RuleBasedStateMachine):
    """Callers that lease, release and release again, and write their names into their blocks."""

    blocks = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(RAW, self.blocks)
        self.mine: dict[int, tuple[Lease[Block] | Lease[Blocks], bytes]] = {}
        self.gone: list[Lease[Block] | Lease[Blocks]] = []
        self.serial = 0
        self.refused = 0

    def members(self, lease: Lease[Block] | Lease[Blocks]) -> list[Block]:
        handle = lease.handle
        return [handle] if isinstance(handle, Block) else list(handle)

    @rule(count=st.none() | st.integers(0, 5))
    def lease(self, count: int | None) -> None:
        left = self.blocks - sum(len(self.members(lease)) for lease, _ in self.mine.values())
        if (1 if count is None else count) > left:
            with pytest.raises(PoolExhausted):
                self.pool.lease() if count is None else self.pool.lease(count)
            return
        lease = self.pool.lease() if count is None else self.pool.lease(count)
        self.serial += 1
        name = self.serial.to_bytes(8, "little") * 8
        for block in self.members(lease):
            block.view(write=True)[:] = name
        self.mine[self.serial] = (lease, name)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.mine:
            lease, _ = self.mine.pop(data.draw(st.sampled_from(sorted(self.mine))))
            lease.release()
            self.gone.append(lease)

    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        if self.gone:
            with pytest.raises(LeaseError, match="second time"):
                data.draw(st.sampled_from(self.gone)).release()
            self.refused += 1

    @invariant()
    def no_two_owners_share_a_byte(self) -> None:
        for lease, name in self.mine.values():
            assert all(bytes(block.view()) == name for block in self.members(lease))

    @invariant()
    def the_counts_are_right(self) -> None:
        leased = sum(len(self.members(lease)) for lease, _ in self.mine.values())
        assert self.pool.counts() == (self.blocks - leased, leased, 0, 0)
        assert self.pool.double_releases == self.refused


def test_owners_never_share_a_block() -> None:  # case 5, double release
    run_state_machine_as_test(Owners, settings=settings(max_examples=40, stateful_step_count=30))


def test_an_empty_pool_says_who_has_its_blocks() -> None:
    pool = HostPool(RAW, 5, name="slots")
    blocks = pool.lease(4).handle
    read, lost = Hold(blocks[:2], "reader", False), Hold(blocks[1:2], "gone", True)
    pool.book.take(read)
    pool.book.take(lost)
    pool.book.quarantine(lost)
    with pytest.raises(PoolExhausted) as caught:
        pool.lease(2)
    error = caught.value
    assert str(error) == (
        "slots: 2 blocks wanted, 1 free; 2 leased, 1 held by operations, 1 quarantined"
    )
    assert (error.wanted, error.free, error.leased, error.held, error.quarantined) == (
        2,
        1,
        2,
        1,
        1,
    )
    with pytest.raises(PoolExhausted):
        pool.lease(-1)
    assert repr(pool) == (
        "<slots: 5 blocks of 64 bytes, PoolCounts(free=1, leased=2, held=1, quarantined=1)>"
    )


def test_a_released_block_stays_away_while_it_is_held() -> None:  # case 1, reuse under a store
    pool = HostPool(RAW, 2)
    lease, other = pool.lease(), pool.lease()
    hold = Hold(lease.handle, "store", False)
    pool.book.take(hold)
    lease.release()
    assert pool.counts() == (0, 1, 1, 0)
    with pytest.raises(PoolExhausted):
        pool.lease()
    pool.end(hold)
    assert pool.lease().handle.id != other.handle.id


def test_looking_is_refused_while_an_operation_may_write() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    reader = rig.submit(reads=[block], name="reader")
    block.view()
    with pytest.raises(LeaseError, match="is held by <operation 1 reader, in flight>"):
        block.view(write=True)
    writer = rig.submit(writes=[block], after=[reader], name="writer")
    with pytest.raises(LeaseError, match=r"held by <operation 1 reader.*<operation 2 writer"):
        block.tensor("bytes")
    rig.signal(reader)
    rig.ledger.cancel(writer)
    with pytest.raises(LeaseError, match="abandoned"):
        block.view()
    rig.signal(writer)
    block.view(write=True)
    block.tensor("bytes", write=True)


# Addresses


@pytest.mark.parametrize("boundary", [1 << 31, 1 << 32])
@pytest.mark.parametrize("stride", [4096, 1 << 20, (1 << 20) + 512])
def test_addresses_beyond_32_bits(boundary: int, stride: int) -> None:
    # case 18, offsets that wrap. Ids just below and above 2 GiB and 4 GiB, no memory behind them.
    base = 0x7F00_0000_0000
    last = boundary // stride
    pool = fake_pool(Plane(base, stride, 512), Plane(base + 256, stride, 256), blocks=last + 3)
    for ids in ([last - 1, last, last + 1, last + 2], [0]):
        for plane, start in enumerate((base, base + 256)):
            wanted = [start + block_id * stride for block_id in ids]
            assert [pool.address(plane, block_id) for block_id in ids] == wanted
            for dtype in (np.int32, np.int64):
                found = pool.addresses(plane, np.array(ids, dtype=dtype))
                assert found.dtype == np.int64
                assert found.tolist() == wanted
    lease = pool.lease(last + 3)
    assert lease.handle[-1].span(plane=1).address == base + 256 + (last + 2) * stride


def test_host_pools_lie_on_pages() -> None:
    pool = HostPool(BlockLayout.raw(PAGE + 1), 3)
    assert [pool.address(0, n) % PAGE for n in range(3)] == [0, 0, 0]
    assert HostPool(BlockLayout.raw(100), 2, align=512).storage.planes[0].stride == 512
    with pytest.raises(WrongPool, match="one plane, the layout has 2"):
        HostPool(BlockLayout((), (8, 8)), 1)


def test_runs_are_kept_by_the_identity_of_the_layout() -> None:
    src, dst = HostPool(RAW, 1), HostPool(BlockLayout.raw(64), 1)
    assert src.runs_to(dst, None) is src.runs_to(dst, None)
    assert src.runs_to(dst, ("bytes",)).rows == src.runs_to(dst, None).rows
    with pytest.raises(LayoutMismatch):
        src.runs_to(HostPool(BlockLayout.raw(63), 1), None)


def test_runs_to_many_other_pools_are_not_kept_for_ever() -> None:  # case 80, growth over days
    src = HostPool(RAW, 1)
    for number in range(300):
        part = Extent("bytes", (64,), "uint8", offset=number)
        src.runs_to(HostPool(BlockLayout((part,), (64 + number,)), 1), None)
    assert len(src._runs) <= 64


def test_bytes_move_by_addresses_and_runs() -> None:
    src, dst = HostPool(RAW, 2), HostPool(RAW, 2)
    there, here = src.lease(2).handle, dst.lease(2).handle
    there[1].view(write=True)[:] = bytes(range(64))
    move(there, here)
    assert bytes(here[1].view()) == bytes(range(64))
    assert bytes(here[0].view()) == bytes(64)


# Whose a pool is


def in_thread(function: Callable[[], object]) -> BaseException | None:
    """What a call raises in another thread."""
    caught: list[BaseException | None] = [None]

    def work() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - handed to the test
            caught[0] = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return caught[0]


def test_a_pool_belongs_to_the_thread_that_uses_it() -> None:
    pool = HostPool(RAW, 2)
    assert in_thread(pool.lease) is None  # nobody's yet
    lease = pool.lease()
    pool.adopt("engine")
    error = in_thread(pool.lease)
    assert isinstance(error, WrongThread)
    assert "belongs to the thread of 'engine'" in str(error)
    assert isinstance(in_thread(lease.release), WrongThread)
    assert not lease.released
    assert isinstance(in_thread(lambda: pool.adopt("another")), WrongThread)
    assert isinstance(in_thread(pool.close), WrongThread)
    pool.disown("another")
    assert isinstance(in_thread(lease.release), WrongThread)
    pool.disown("engine")
    assert in_thread(lease.release) is None
    assert lease.released


def test_a_pool_in_use_is_refused_to_another_engine() -> None:
    pool = HostPool(RAW, 2)
    pool.adopt("one")
    hold = Hold(pool.lease().handle, "operation", False)
    pool.book.take(hold)
    with pytest.raises(WrongPool, match="has operations of 'one'; 'two' cannot use it"):
        pool.adopt("two")
    pool.adopt("one")
    pool.end(hold)
    pool.adopt("two")
    assert pool.user == "two"


def test_an_engine_started_again_goes_on_with_its_own_lost_operations() -> None:
    rig = Rig()
    op = rig.submit(writes=[rig.pool.lease()])
    rig.ledger.lose(op, TimeoutError("gone"))
    rig.pool.disown(rig.driver)
    later = rig.submit(writes=[rig.pool.lease()])
    assert later.state is State.IN_FLIGHT
    with pytest.raises(WrongPool, match="has operations of <no engine>"):
        rig.pool.adopt("another")


def test_a_pool_is_of_no_use_in_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(RAW, 2)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (pool.lease, lambda: pool.adopt("engine")):
        with pytest.raises(ForkDetected, match="both share its memory"):
            use()
    assert pool.counts().free == 2


def test_two_leases_of_the_same_blocks_end_once() -> None:
    pool = HostPool(RAW, 2)
    lease = pool.lease()
    second = Lease(lease.handle)
    lease.release()
    with pytest.raises(StaleBlock):
        second.release()
    assert pool.double_releases == 1
    assert {pool.lease().handle.id, pool.lease().handle.id} == {0, 1}


# Closing


def test_closing_gives_the_memory_back_once() -> None:
    storage = FakeStorage(Plane(0, 8, 8))
    with Pool(BlockLayout((), (8,)), 2, storage) as pool:  # type: ignore[arg-type]
        lease = pool.lease()
    assert storage.closed == 1
    pool.close()
    assert storage.closed == 1
    with pytest.raises(LeaseError, match="pool is closed"):
        pool.lease()
    with pytest.raises(LeaseError, match="pool is closed"):
        lease.handle.tensor("x") if lease.handle.pool.layout.extents else lease.handle.view()
    lease.release()


@pytest.mark.parametrize("lost", [False, True])
def test_closing_a_pool_in_use_keeps_the_memory(lost: bool) -> None:
    rig = Rig(blocks=2)
    src, dst = rig.pool.lease().handle, rig.pool.lease().handle
    op = rig.submit(reads=[src], writes=[dst], name="late copy")
    if lost:
        rig.signal(op, lost=True)
    storage = weakref.ref(rig.pool.storage)
    address = rig.pool.address(0, dst.id)
    with pytest.raises(PoolBusy, match=r"held by <operation 1 late copy.*memory is kept"):
        rig.pool.close()
    rig.pool.close()
    # The device is still at it, and lands where it was told to, whoever has forgotten the pool.
    kept = storage()
    assert kept is not None
    kept.view(address, 4)[:] = b"late"
    rig.signal(op)
    assert op.settled
    assert op.state is (State.FAILED if lost else State.COMPLETED)
    del rig, src, dst, op, kept
    gc.collect()
    still = storage()
    assert still is not None
    assert bytes(still.view(address, 4)) == b"late"


def test_a_closed_pool_gives_nothing_to_a_device() -> None:
    # Its memory is gone: a copy to a handle that is still fresh would write anywhere.
    rig = Rig()
    other = HostPool(RAW, 2, name="other")
    src, dst = rig.pool.lease().handle, other.lease().handle
    rig.signal(first := rig.submit(writes=[dst]))
    assert states(first) == [State.COMPLETED]
    other.close()
    with pytest.raises(LeaseError, match="other is closed"):
        rig.ledger.prepare(Copy(src, dst), rig.lane)
    assert rig.pool.counts() == (15, 1, 0, 0)
    with pytest.raises(LeaseError, match="other is closed"):
        dst.view()
