"""Cancelling in every state, and who is told what: watchers, the engine, the trace hook."""

import logging

import pytest
from tests.transfer.kit import Rig, outcome, states

from transfer._errors import OperationCancelled
from transfer._handle import Handle
from transfer._operation import Operation, Transition
from transfer._state import Event, State

PREPARED, IN_FLIGHT, ABANDONED = State.PREPARED, State.IN_FLIGHT, State.ABANDONED
QUARANTINED, COMPLETED = State.QUARANTINED, State.COMPLETED
FAILED, CANCELLED = State.FAILED, State.CANCELLED


# Cancelling, in every state


def in_state(rig: Rig, state: State, block: Handle) -> Operation:
    op = rig.prepare(writes=[block])
    if state is CANCELLED:
        rig.ledger.cancel(op)
    if state in (PREPARED, CANCELLED):
        return op
    rig.ledger.start(op)
    if state is ABANDONED:
        rig.ledger.cancel(op)
    elif state is QUARANTINED:
        rig.signal(op, lost=True)
    elif state is not IN_FLIGHT:
        rig.signal(op, OSError() if state is FAILED else None)
    return op


@pytest.mark.parametrize("state", State)
def test_cancel_is_total_idempotent_and_frees_nothing_in_use(state: State) -> None:  # case 9
    rig = Rig(blocks=1)
    lease = rig.pool.lease()
    op = in_state(rig, state, lease.handle)
    lease.release()
    before = rig.pool.counts()
    rig.ledger.cancel(op)
    after, trace = rig.pool.counts(), list(rig.trace)
    expected = {PREPARED: CANCELLED, IN_FLIGHT: ABANDONED}.get(state, state)
    assert op.state is expected
    assert after == before or state is PREPARED
    rig.ledger.cancel(op)
    assert (op.state, rig.pool.counts()) == (expected, after)
    assert [step for step in rig.trace if step.after is not step.before] == [
        step for step in trace if step.after is not step.before
    ]
    if state in (IN_FLIGHT, ABANDONED, QUARANTINED):
        assert after.free == 0


@pytest.mark.parametrize("error", [None, OSError("too late")])
def test_an_abandoned_result_is_dropped(error: OSError | None) -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    op = rig.submit(writes=[block])
    rig.ledger.cancel(op)
    assert op.state is ABANDONED
    assert rig.pool.holders(block) == [op]
    rig.signal(op, error)
    assert op.state is CANCELLED
    assert isinstance(outcome(op), OperationCancelled)
    assert rig.pool.holders(block) == []


def test_a_cancelled_operation_is_not_posted() -> None:
    rig = Rig()
    op = rig.prepare()
    rig.ledger.cancel(op)
    rig.ledger.start(op)
    assert rig.device.log == []


# Telling others


def test_holds_end_before_waiters_wake() -> None:
    rig = Rig()
    lease = rig.pool.lease()
    op = rig.submit(writes=[lease])
    lease.release()
    seen: list[tuple[State, int]] = []
    op.append(lambda: seen.append((op.state, rig.pool.counts().free)))
    rig.signal(op)
    assert seen == [(COMPLETED, 16)]


@pytest.mark.parametrize("lost", [False, True])
def test_waiters_wake_when_settled_or_lost(lost: bool) -> None:
    rig = Rig()
    op = rig.submit()
    seen: list[State] = []
    op.append(lambda: seen.append(op.state))
    rig.ledger.cancel(op)
    assert seen == []
    rig.signal(op, lost=lost)
    assert seen == [QUARANTINED if lost else CANCELLED]


def test_waiters_wake_when_posted() -> None:
    rig = Rig()
    first = rig.submit()
    second = rig.submit(after=[first])
    seen: list[State] = []
    second.append(lambda: seen.append(second.state))
    rig.signal(first)
    assert seen == [IN_FLIGHT]


def test_nobody_is_woken_on_a_loop_that_is_gone() -> None:
    rig = Rig()
    op = rig.submit()
    op.append(lambda: pytest.fail("woken"))
    rig.ledger.silent = True
    rig.signal(op)
    assert op.settled


def test_the_engine_is_told_when_a_live_one_leaves() -> None:
    rig = Rig(devices=2)
    first, second, third = rig.submit(), rig.submit(lane=1), rig.submit()
    rig.signal(second)
    assert rig.left == [rig.lanes[1]]
    rig.signal(first, lost=True)
    assert rig.left == [rig.lanes[1], rig.lane]
    rig.signal(first)
    assert len(rig.left) == 2
    rig.ledger._settled = None
    rig.signal(third)
    assert rig.lane.live == {}


@pytest.mark.parametrize("faulty", [False, True])
def test_a_faulty_trace_hook_changes_no_result(
    faulty: bool, caplog: pytest.LogCaptureFixture
) -> None:  # case 77
    seen: list[tuple[int, Event, State]] = []

    def hook(step: Transition) -> None:
        seen.append((step.serial, step.event, step.after))
        if faulty:
            raise ZeroDivisionError

    rig = Rig(trace=hook, blocks=4)
    lease = rig.pool.lease()
    first = rig.submit(writes=[lease])
    second = rig.submit(reads=[lease], after=[first])
    third = rig.submit(after=[second])
    with caplog.at_level(logging.CRITICAL):
        rig.ledger.cancel(third)
        rig.signal(first, OSError())
    assert states(first, second, third) == [FAILED, FAILED, CANCELLED]
    assert rig.pool.counts() == (3, 1, 0, 0)
    assert [(serial, event.name) for serial, event, _ in seen] == [
        (1, "SUBMIT"),
        (3, "CANCEL"),
        (1, "FAIL"),
        (2, "FAIL"),
    ]
    assert rig.ledger.tracer is not None
    assert rig.ledger.tracer.errors == (4 if faulty else 0)


def test_a_hook_may_cancel_while_others_are_being_posted() -> None:
    def hook(step: Transition) -> None:
        if (step.serial, step.event) == (2, Event.SUBMIT):
            rig.ledger.cancel(aside)

    rig = Rig(trace=hook)
    first = rig.submit()
    behind = [rig.submit(after=[first]) for _ in range(3)]
    aside = rig.submit(lane=0)
    rig.signal(first)
    assert states(first, *behind, aside) == [COMPLETED, IN_FLIGHT, IN_FLIGHT, IN_FLIGHT, ABANDONED]
    assert len(rig.device.log) == 5


def test_a_hook_may_cancel_what_it_sees() -> None:
    ops: list[Operation] = []

    def hook(step: Transition) -> None:
        if step.event is Event.COMPLETE:
            for op in ops:
                rig.ledger.cancel(op)

    rig = Rig(trace=hook)
    first = rig.submit()
    ops.extend(rig.submit(after=[first]) for _ in range(3))
    last = rig.submit(after=ops)
    rig.signal(first)
    assert states(first, *ops, last) == [COMPLETED, CANCELLED, CANCELLED, CANCELLED, IN_FLIGHT]
