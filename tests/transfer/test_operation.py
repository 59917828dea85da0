"""An operation: the table applied, what is traced, what waiting raises."""

from itertools import product

import pytest
from tests.transfer.kit import NoDriver, Rig, outcome

from transfer._errors import (
    BadWork,
    CompletionLost,
    DevicePoisoned,
    IllegalTransition,
    OperationCancelled,
    OperationFailed,
    SubmitError,
)
from transfer._operation import Operation, Transition
from transfer._state import SETTLED, TRANSITIONS, Event, State
from transfer._work import External

pytestmark = pytest.mark.anyio


def fresh() -> Operation:
    return Rig().prepare(name="mine")


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_only_the_table_moves_an_operation(state: State, event: Event) -> None:
    op = fresh()
    op.state = state
    seen: list[Transition] = []
    after = TRANSITIONS[state].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} in {state.name}"):
            op.apply(event, seen.append)
        assert op.state is state
        assert seen == []
        return
    op.apply(event, seen.append)
    assert op.state is after
    assert seen == [Transition(op.serial, "mine", "hand0", state, event, after)]
    assert op.settled == (after in SETTLED)
    assert op.decided == (after in SETTLED or after is State.QUARANTINED)


def test_without_a_trace_nothing_is_called() -> None:
    op = fresh()
    op.apply(Event.CANCEL, None)
    assert op.state is State.CANCELLED
    assert repr(op) == "<operation 1 mine, cancelled>"


def test_what_waiting_raises_follows_from_the_state() -> None:
    cause = OSError("wire")
    known = OperationFailed("copy: wire")
    known.__cause__ = cause
    op = fresh()
    op.error = known
    for state, error in (
        (State.COMPLETED, type(None)),
        (State.CANCELLED, OperationCancelled),
        (State.FAILED, OperationFailed),
        (State.QUARANTINED, CompletionLost),
    ):
        op.state = state
        assert isinstance(outcome(op), error)
    op.state = State.QUARANTINED
    lost = outcome(op)
    assert lost is not None
    assert "cannot be learnt: copy: wire" in str(lost)
    assert lost.__cause__ is cause
    op.error = None
    assert isinstance(outcome(op), CompletionLost)
    op.state = State.FAILED
    assert isinstance(outcome(op), OperationFailed)


@pytest.mark.parametrize("kind", [SubmitError, OperationFailed, DevicePoisoned])
def test_every_waiter_gets_an_exception_of_its_own(kind: type[SubmitError]) -> None:
    op = fresh()
    op.error = kind("words")
    op.error.__cause__ = cause = OSError("wire")
    op.state = State.FAILED
    first, second = outcome(op), outcome(op)
    assert type(first) is type(second) is kind
    assert first is not second
    assert first is not op.error
    assert str(first) == "words"
    assert first is not None
    assert first.__cause__ is cause


def test_watchers_come_and_go() -> None:
    op = fresh()
    seen: list[int] = []

    def one() -> None:
        seen.append(1)

    def two() -> None:
        seen.append(2)

    op.append(one)
    op.append(two)
    op.remove(one)
    for callback in op.watchers:
        callback()
    op.remove(one)
    op.remove(two)
    assert seen == [2]
    assert op.watchers == ()


async def test_what_a_caller_asks_goes_to_the_engine() -> None:
    rig = Rig()
    op = rig.prepare()
    driver: NoDriver = rig.driver
    await op.wait()
    await op.wait_posted()
    op.cancel()
    op.order_before("stream")
    op.finish("stream")
    op.finish()
    assert driver.calls == [
        ("wait", op),
        ("wait_posted", op),
        ("cancel", op),
        ("order_before", op, "stream"),
        ("finish", op, "stream"),
        ("finish", op, None),
    ]


def test_only_the_end_of_external_work_is_for_others_to_say() -> None:
    rig = Rig()
    with pytest.raises(BadWork, match="is the work of hand0, expected an External"):
        rig.prepare().check_external()
    rig.ledger.prepare(External(), rig.lane).check_external()
