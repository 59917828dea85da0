"""Loss: what can no longer be learnt stays owned, and dooms whatever is ordered behind it."""

import asyncio

import pytest
from tests.transfer.kit import Rig, outcome, states

from transfer._errors import (
    CompletionLost,
    DevicePoisoned,
    HoldConflict,
    OperationFailed,
)
from transfer._fence import Completion, Fence
from transfer._state import State

PREPARED, IN_FLIGHT, ABANDONED = State.PREPARED, State.IN_FLIGHT, State.ABANDONED
QUARANTINED, COMPLETED = State.QUARANTINED, State.COMPLETED
FAILED, CANCELLED = State.FAILED, State.CANCELLED


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_lost_operation_keeps_its_blocks(cancelled: bool) -> None:  # cases 9 and 11
    rig = Rig(blocks=2)
    lease = rig.pool.lease()
    op = rig.submit(writes=[lease], name="copy")
    if cancelled:
        rig.ledger.cancel(op)
    lease.release()
    rig.signal(op, cause := OSError("event error"), lost=True)
    assert op.state is QUARANTINED
    assert rig.pool.counts() == (1, 0, 0, 1)
    error = outcome(op)
    assert isinstance(error, CompletionLost)
    assert str(error) == (
        "the end of <operation 1 copy, quarantined> cannot be learnt: OSError: event error"
    )
    assert error.__cause__ is cause
    assert rig.lane.lost == {op: 64}
    assert rig.lane.live == {}


def test_a_loss_without_a_reason_says_so() -> None:
    rig = Rig()
    op = rig.submit()
    rig.signal(op, lost=True)
    assert "the device gave no reason" in str(outcome(op))


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("error", [None, OSError("late and failed")])
def test_its_own_late_token_is_proof(cancelled: bool, error: OSError | None) -> None:
    rig = Rig(blocks=1)
    lease = rig.pool.lease()
    op = rig.submit(writes=[lease], name="copy")
    rig.signal(op, cause := OSError("no answer"), lost=True)
    rig.signal(op, lost=True)  # the same once more is no proof
    lease.release()
    if cancelled:
        rig.ledger.cancel(op)
    assert rig.pool.counts() == (0, 0, 0, 1)
    rig.signal(op, error)
    # FAILED, never COMPLETED: nobody saw the fence when it mattered. And the blocks are back.
    assert op.state is FAILED
    assert rig.pool.counts() == (1, 0, 0, 0)
    failure = outcome(op)
    assert isinstance(failure, OperationFailed)
    assert str(failure) == "copy: its end was lost, and proven only later"
    assert failure.__cause__ is cause
    assert rig.lane.lost == {}
    assert rig.events(op)[-1] == "QUIESCE"
    rig.ledger.complete(Completion(op.fence or Fence()))
    assert rig.ledger.stray_completions == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("driver"),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        CompletionLost("no event"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_comes_out_of_the_device_is_raised_and_the_work_is_lost(error: BaseException) -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.prepare(writes=[block])
    rig.device.mood = error
    with pytest.raises(type(error)) as caught:
        rig.ledger.start(op)
    assert caught.value is error
    assert op.state is QUARANTINED
    assert op.posted
    assert rig.pool.counts() == (15, 0, 0, 1)
    assert isinstance(outcome(op), CompletionLost)


def test_a_fence_handed_along_with_the_loss_brings_proof() -> None:
    rig = Rig()
    op = rig.prepare(writes=[rig.pool.lease()])
    rig.device.mood = CompletionLost("no event", fence=Fence())
    with pytest.raises(CompletionLost):
        rig.ledger.start(op)
    rig.signal(op)
    assert op.state is FAILED
    assert rig.pool.counts().quarantined == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("driver")])
def test_a_successor_that_strikes_while_it_is_posted(error: BaseException) -> None:
    rig = Rig()
    first = rig.submit()
    second, third = rig.submit(after=[first]), rig.submit(after=[first])
    rig.device.mood = error
    if isinstance(error, Exception):  # kept for whoever waits for it
        rig.signal(first)
    else:
        with pytest.raises(KeyboardInterrupt):
            rig.signal(first)
        assert states(second, third) == [QUARANTINED, PREPARED]
        rig.reap()  # the completion is still there, and goes on where it was struck
    assert states(first, second, third) == [COMPLETED, QUARANTINED, IN_FLIGHT]


# Doom


def test_a_lost_predecessor_fails_all_its_successors() -> None:
    rig = Rig(devices=2)
    rig.device.waits_for = {rig.device}
    first = rig.submit(name="first")
    posted = rig.submit(after=[first])
    further = rig.submit(after=[posted])
    unposted = rig.submit(after=[first], lane=1)
    behind = rig.submit(after=[unposted], lane=1)
    aside = rig.submit()
    rig.signal(first, lost=True)
    assert states(unposted, behind) == [FAILED, FAILED]
    assert states(posted, further, aside) == [IN_FLIGHT, IN_FLIGHT, IN_FLIGHT]
    rig.signal(further)
    assert further.state is IN_FLIGHT  # never before what it was posted behind
    rig.signal(posted)
    rig.signal(aside)
    assert states(posted, further, aside) == [FAILED, FAILED, COMPLETED]
    for op in (posted, further, unposted, behind):
        error = outcome(op)
        assert isinstance(error, OperationFailed)
        assert "the end of its predecessor <operation 1 first" in str(error)


def test_a_successor_that_had_signaled_fails_when_its_predecessor_is_lost() -> None:
    rig = Rig(streams=True)
    block = rig.pool.lease().handle
    first = rig.submit()
    parked = rig.submit(writes=[block], after=[first])
    rig.signal(parked)
    assert parked.state is IN_FLIGHT
    rig.signal(first, lost=True)
    assert parked.state is FAILED
    assert rig.pool.counts().held == 0


def test_one_that_had_signaled_fails_when_the_last_of_its_predecessors_is_lost() -> None:
    rig = Rig(streams=True)
    block = rig.pool.lease().handle
    first = rig.submit()
    second = rig.submit(after=[first])
    parked = rig.submit(writes=[block], after=[second])
    rig.signal(first, lost=True)
    rig.signal(parked)
    assert parked.state is IN_FLIGHT
    rig.signal(second, lost=True)
    assert parked.state is FAILED
    assert rig.lane.live == {}
    assert rig.pool.counts().held == 0


def test_one_that_waits_for_another_as_well_fails_only_behind_that() -> None:
    rig = Rig(devices=2)
    rig.device.waits_for = set(rig.devices)
    lost, slow = rig.submit(), rig.submit(lane=1)
    parked = rig.submit(after=[lost, slow])
    rig.signal(parked)
    rig.signal(lost, lost=True)
    assert parked.state is IN_FLIGHT
    rig.signal(slow)
    assert parked.state is FAILED


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_new_operations_behind_a_lost_one_fail_at_once(depth: int) -> None:
    # Over any number of edges: it may still be at work on bytes that order alone protects.
    rig = Rig(streams=True)
    block = rig.pool.lease().handle
    chain = [rig.submit(writes=[block])]
    for _ in range(depth - 1):
        chain.append(rig.submit(after=[chain[-1]]))
    rig.signal(chain[0], lost=True)
    posted = len(rig.device.log)
    newcomer = rig.submit(writes=[block], after=[chain[-1]])
    assert newcomer.state is FAILED
    assert isinstance(outcome(newcomer), OperationFailed)
    assert len(rig.device.log) == posted
    assert rig.pool.holders(block) == [chain[0]]
    with pytest.raises(HoldConflict):
        rig.submit(writes=[block])


@pytest.mark.parametrize("ending", ["signaled", "cancelled"])
def test_a_doomed_one_that_has_ended_stands_for_what_is_still_lost(ending: str) -> None:
    rig = Rig(streams=True)
    block = rig.pool.lease().handle
    lost = rig.submit(writes=[block])
    middle = rig.submit(after=[lost])
    if ending == "cancelled":
        rig.ledger.cancel(middle)
    rig.signal(lost, lost=True)
    rig.signal(middle)
    assert middle.state is (CANCELLED if ending == "cancelled" else FAILED)
    newcomer = rig.submit(writes=[block], after=[middle])
    assert newcomer.state is FAILED
    rig.signal(lost)
    assert rig.submit(writes=[block], after=[middle]).state is IN_FLIGHT
    assert list(middle.before) == []


def test_one_that_was_lost_and_proven_quiet_stands_for_what_it_was_behind() -> None:
    rig = Rig(streams=True)
    block = rig.pool.lease().handle
    first = rig.submit(writes=[block])
    middle = rig.submit(after=[first])
    rig.signal(middle, lost=True)
    rig.signal(middle)
    assert states(first, middle) == [IN_FLIGHT, FAILED]
    behind = rig.submit(writes=[block], after=[middle])
    assert rig.device.log[-1] == (behind.work, (first.fence,))


def test_a_stream_that_covers_a_lost_operation_dooms_what_follows() -> None:
    rig = Rig(streams=True)
    lost = rig.submit()
    rig.signal(lost, lost=True)
    mark = rig.ledger.mark(rig.lane, Fence(), [lost])
    assert rig.submit(after=[mark]).state is FAILED
    rig.signal(mark)
    assert mark.state is FAILED


def test_what_is_proven_quiet_dooms_nobody_any_more() -> None:
    rig = Rig()
    lost = rig.submit()
    rig.signal(lost, lost=True)
    rig.signal(lost)
    assert rig.submit(after=[lost]).state is IN_FLIGHT


# Giving up, and losing the whole device


def test_giving_up_is_for_what_a_device_has() -> None:
    rig = Rig(streams=True)
    first = rig.submit()
    parked = rig.submit(after=[first])
    prepared = rig.prepare()
    dropped = rig.submit()
    rig.ledger.cancel(dropped)
    done = rig.submit()
    rig.signal(done)
    rig.signal(parked)
    ops = (parked, prepared, dropped, done, first)
    for op in ops:
        rig.ledger.lose(op, TimeoutError("deadline"))
    # What is known to be quiet is not lost with the rest: it fails behind its predecessor.
    assert states(*ops) == [FAILED, PREPARED, QUARANTINED, COMPLETED, QUARANTINED]
    for op in ops:
        rig.ledger.lose(op, TimeoutError("again"))
    assert states(*ops) == [FAILED, PREPARED, QUARANTINED, COMPLETED, QUARANTINED]
    assert rig.lane.losses == 2


def test_a_poisoned_device_loses_what_it_has_and_takes_no_more() -> None:  # case 11
    rig = Rig(devices=2, streams=True)
    rig.devices[1].waits_for = set()
    blocks = rig.pool.lease(4).handle
    first = rig.submit(writes=[blocks[0]])
    second = rig.submit(writes=[blocks[1]])
    parked = rig.submit(writes=[blocks[2]], after=[first])
    rig.signal(parked)
    gate = rig.submit(lane=1)
    prepared = rig.submit(after=[gate])
    elsewhere = rig.submit(writes=[blocks[3]], lane=1)
    mark = rig.ledger.mark(rig.lane, Fence(), ())
    rig.signal(first, OSError("sticky"), lost=True, poisoned=True)
    assert states(first, second, parked, prepared) == [QUARANTINED, QUARANTINED, FAILED, FAILED]
    assert mark.state is QUARANTINED
    assert isinstance(outcome(prepared), DevicePoisoned)
    with pytest.raises(DevicePoisoned, match="hand0: sticky"):
        rig.submit()
    assert rig.device.log[-1][0] is parked.work
    # A poisoned GPU does not stop the disk.
    assert elsewhere.state is IN_FLIGHT
    rig.signal(elsewhere)
    rig.signal(gate)
    assert rig.submit(lane=1).state is IN_FLIGHT
    assert states(elsewhere, gate) == [COMPLETED, COMPLETED]
    # A later proof, of work that is quarantined already, is still taken.
    rig.signal(second)
    assert second.state is FAILED
    assert rig.pool.counts().quarantined == 1
    rig.signal(first, OSError("again"), lost=True, poisoned=True)
    assert rig.lane.losses == 2


def test_what_waits_elsewhere_for_a_poisoned_device_fails_when_its_turn_comes() -> None:
    rig = Rig(devices=2)
    gate = rig.submit(lane=1)
    rig.ledger.poison(rig.lane, OSError("gone"))
    waiting = rig.submit(after=[gate])
    assert waiting.state is PREPARED
    rig.signal(gate)
    assert isinstance(outcome(waiting), DevicePoisoned)


def test_quarantined_bytes_are_bounded() -> None:
    rig = Rig(quarantine_bytes_max=128)
    blocks = rig.pool.lease(4).handle
    ops = [rig.submit(writes=[block]) for block in blocks]
    rig.signal(ops[0], lost=True)
    rig.signal(ops[1], lost=True)
    assert rig.lane.poisoned is None
    again = rig.submit()
    rig.signal(ops[2], lost=True)
    with pytest.raises(DevicePoisoned, match="192 bytes are quarantined, at most 128 allowed"):
        rig.submit()
    assert again.state is IN_FLIGHT  # only new work is refused
    reason = rig.lane.poisoned
    rig.signal(ops[3], lost=True)
    assert rig.lane.poisoned is reason
    rig.signal(again)
    assert again.state is COMPLETED
    assert rig.pool.counts().quarantined == 4
