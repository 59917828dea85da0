"""A life in the ledger: prepare, submit, complete, cancel; refusals, counts, wake-ups.

What is lost, what is ordered, and what an interrupt leaves behind have files of their own.
"""

from typing import TYPE_CHECKING

import pytest
from tests.transfer.kit import Rig, nothing, outcome, states

from transfer._errors import (
    DevicePoisoned,
    EngineClosed,
    HoldConflict,
    LeaseError,
    OperationFailed,
    StaleBlock,
    SubmitError,
    WrongPool,
    WrongThread,
)
from transfer._extent import BlockLayout
from transfer._fence import Completion, Fence
from transfer._memory import HostPool
from transfer._state import State
from transfer._work import Copy, External, Launch

if TYPE_CHECKING:
    from transfer._handle import Handle

PREPARED, IN_FLIGHT, ABANDONED = State.PREPARED, State.IN_FLIGHT, State.ABANDONED
QUARANTINED, COMPLETED = State.QUARANTINED, State.COMPLETED
FAILED, CANCELLED = State.FAILED, State.CANCELLED


def test_a_whole_life() -> None:
    rig = Rig()
    src, dst = rig.pool.lease(), rig.pool.lease()
    op = rig.ledger.prepare(Copy(src, dst), rig.lane, name="copy")
    assert (op.serial, op.name, op.state, op.nbytes, op.posted) == (1, "copy", PREPARED, 64, False)
    assert rig.pool.counts() == (14, 0, 2, 0)
    assert rig.device.log == []
    rig.ledger.start(op)
    assert (op.state, op.posted) == (IN_FLIGHT, True)
    assert rig.device.log == [(op.work, ())]
    rig.signal(op)
    assert (op.state, op.error, outcome(op)) == (COMPLETED, None, None)
    assert rig.pool.counts() == (14, 2, 0, 0)
    assert rig.lane.live == {}
    assert rig.events(op) == ["SUBMIT", "COMPLETE"]


def test_submit_is_applied_before_the_device_is_called() -> None:
    rig = Rig()
    seen: list[tuple[State, bool]] = []
    block = rig.pool.lease().handle
    op = rig.prepare(writes=[block])
    can_wait = rig.device.enqueue

    def enqueue(work: object, waits: object) -> Fence:
        seen.append((op.state, op.posted))
        return can_wait(work, waits)  # type: ignore[arg-type]

    rig.device.enqueue = enqueue  # type: ignore[method-assign]
    rig.ledger.start(op)
    assert seen == [(IN_FLIGHT, True)]


def test_without_a_name_an_operation_is_named_by_its_work() -> None:
    rig = Rig()
    assert rig.prepare().name == "Launch"
    assert rig.ledger.prepare(External(), rig.lane).name == "External"


@pytest.mark.parametrize("kind", [SubmitError, EngineClosed, DevicePoisoned])
def test_a_refusal_gives_everything_back(kind: type[SubmitError]) -> None:  # case 10, submit raises
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.prepare(writes=[block])
    rig.device.mood = refusal = kind("queue is full")
    with pytest.raises(kind) as caught:
        rig.ledger.start(op)
    assert caught.value is refusal
    assert (op.state, op.posted) == (FAILED, False)
    assert isinstance(outcome(op), kind)
    assert rig.pool.counts() == (15, 1, 0, 0)
    assert rig.events(op) == ["SUBMIT", "FAIL"]
    # A retry is safe.
    again = rig.submit(writes=[block])
    rig.signal(again)
    assert states(again) == [COMPLETED]


def test_a_device_error_fails_with_its_cause() -> None:  # case 10, the failure reaches the caller
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.submit(writes=[block], name="read")
    rig.signal(op, cause := OSError("bad sector"))
    error = outcome(op)
    assert isinstance(error, OperationFailed)
    assert str(error) == "read: bad sector"
    assert error.__cause__ is cause
    assert op.state is FAILED
    assert rig.pool.counts() == (15, 1, 0, 0)


# Refusals, before anything is taken


def nothing_was_taken(rig: Rig, live: int) -> bool:
    lane = rig.lane
    return (lane.admitted, len(lane.live), lane.submitted) == (live, live, live)


def test_a_stale_handle_is_refused() -> None:
    rig = Rig()
    lease, other = rig.pool.lease(), rig.pool.lease()
    block = lease.handle
    lease.release()
    for reads, writes in (([block], []), ([], [block]), ([other.handle], [block])):
        with pytest.raises(StaleBlock):
            rig.prepare(reads=reads, writes=writes)
    assert nothing_was_taken(rig, 0)
    assert rig.pool.counts() == (15, 1, 0, 0)


@pytest.mark.parametrize("large", [False, True])
def test_unordered_conflicts_are_refused(large: bool) -> None:
    rig = Rig()
    blocks = rig.pool.lease(12).handle
    handle: Handle = blocks if large else blocks[3]
    writer = rig.submit(writes=[handle], name="first")
    for reads, writes in (([blocks[3]], []), ([], [blocks[3]]), ([blocks[1:9]], [])):
        with pytest.raises(
            HoldConflict, match=r"<operation 1 first, in flight> writes; expected after="
        ):
            rig.prepare(reads=reads, writes=writes)
    assert nothing_was_taken(rig, 1)
    rig.signal(writer)
    reader = rig.submit(reads=[handle], name="second")
    rig.submit(reads=[handle])
    with pytest.raises(HoldConflict, match=r"would write .* reads; expected after="):
        rig.prepare(writes=[handle], after=[reader])


def test_naming_the_order_lets_holds_stack() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    load = rig.submit(writes=[block])
    decode = [rig.submit(reads=[block], after=[load]) for _ in range(2)]
    append = rig.submit(writes=[block], after=decode)
    assert states(load, *decode, append) == [IN_FLIGHT, PREPARED, PREPARED, PREPARED]
    assert rig.pool.holders(block) == [load, *decode, append]


def test_an_operation_may_read_and_write_a_block() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.submit(reads=[block], writes=[block])
    rig.signal(op)
    assert rig.pool.counts() == (15, 1, 0, 0)


def test_pools_of_other_engines_and_threads_are_refused() -> None:
    rig, other = Rig(), Rig()
    block = other.pool.lease().handle
    busy = other.submit(reads=[block])
    with pytest.raises(WrongPool, match="has operations of <no engine>"):
        rig.prepare(reads=[block])
    other.signal(busy)
    rig.signal(rig.submit(reads=[block]))
    assert other.pool.user is rig.driver
    assert other.pool in rig.ledger.pools
    rig.pool.adopt(rig.driver)
    rig.pool._thread = -1
    with pytest.raises(WrongThread):
        rig.pool.lease()


def test_refused_work_leaves_the_pool_as_it_was() -> None:
    rig = Rig()
    lease = rig.pool.lease()
    other = HostPool(BlockLayout.raw(64), 1)
    closed = other.lease()
    other.close()
    with pytest.raises(LeaseError, match="is closed"):
        rig.ledger.prepare(Copy(lease, closed), rig.lane)
    assert rig.pool.counts() == (15, 1, 0, 0)
    assert nothing_was_taken(rig, 0)


# Completions


def test_unknown_and_repeated_completions_are_counted_and_dropped() -> None:  # case 7
    rig = Rig(devices=2)
    block = rig.pool.lease().handle
    rig.ledger.complete(Completion(Fence()))
    assert rig.ledger.stray_completions == 1
    op = rig.submit(writes=[block])
    fence = op.fence
    assert fence is not None
    rig.signal(op)
    owner = rig.submit(writes=[block])  # the block has a live user by now
    for late in (
        Completion(fence),
        Completion(fence, OSError()),
        Completion(fence, lost=True),
        Completion(fence, lost=True, poisoned=True),
    ):
        rig.ledger.complete(late)
    assert rig.ledger.stray_completions == 5
    assert states(op, owner) == [COMPLETED, IN_FLIGHT]
    assert rig.pool.holders(block) == [owner]
    assert rig.lane.poisoned is None
    assert rig.events(op) == ["SUBMIT", "COMPLETE"]


def test_a_used_token_of_a_parked_operation_is_stray_too() -> None:  # case 7
    rig = Rig(streams=True)
    first = rig.submit()
    second = rig.submit(after=[first])
    rig.signal(second)
    assert states(second) == [IN_FLIGHT]
    for late in (OSError("twice"), None):
        rig.signal(second, late)
    rig.signal(second, lost=True)
    assert rig.ledger.stray_completions == 3
    rig.signal(first)
    assert states(first, second) == [COMPLETED, COMPLETED]


def test_a_completion_after_a_cancel_frees_once() -> None:  # case 7, after cancel
    rig = Rig()
    lease = rig.pool.lease()
    op = rig.submit(writes=[lease])
    rig.ledger.cancel(op)
    lease.release()
    assert rig.pool.counts() == (15, 0, 1, 0)
    rig.signal(op)
    assert rig.pool.counts() == (16, 0, 0, 0)
    rig.ledger.complete(Completion(op.fence or Fence()))
    assert rig.pool.counts() == (16, 0, 0, 0)


# Nothing to move


def test_zero_length_is_a_completed_no_op() -> None:
    rig = Rig()
    empty = HostPool(BlockLayout.raw(0), 4)
    for work in (
        Copy(rig.pool.lease(0), rig.pool.lease(0)),
        Copy(empty.lease(), empty.lease()),
    ):
        op = rig.ledger.prepare(work, rig.lane)
        rig.ledger.start(op)
        assert (op.state, op.posted, outcome(op)) == (COMPLETED, True, None)
    assert rig.device.log == []


def test_zero_length_still_has_its_place_in_the_order() -> None:
    rig = Rig(streams=True)
    first = rig.submit()
    empty = rig.ledger.prepare(Copy(rig.pool.lease(0), rig.pool.lease(0)), rig.lane, [first])
    rig.ledger.start(empty)
    last = rig.submit(after=[empty])
    assert states(empty, last) == [IN_FLIGHT, PREPARED]
    rig.signal(first)
    assert states(empty, last) == [COMPLETED, IN_FLIGHT]


def test_other_work_without_bytes_is_posted() -> None:
    rig = Rig()
    for work in (Launch(nothing), External()):
        op = rig.ledger.prepare(work, rig.lane)
        rig.ledger.start(op)
        assert op.state is IN_FLIGHT
    assert len(rig.device.log) == 2


def test_external_work_ends_when_its_device_says_so() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.ledger.prepare(External(writes=[block]), rig.lane)
    rig.ledger.start(op)
    assert rig.pool.holders(block) == [op]
    rig.signal(op)
    assert op.state is COMPLETED
