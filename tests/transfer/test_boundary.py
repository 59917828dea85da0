"""The device boundary: what each way out of foreign code means for ownership."""

import asyncio
import logging

import pytest
from tests.transfer.kit import Rig

from transfer._boundary import Posted, Tracer, attempt, post
from transfer._errors import (
    CompletionLost,
    DevicePoisoned,
    EngineClosed,
    ForkDetected,
    SubmitError,
)
from transfer._fence import Fence
from transfer._operation import Operation, Transition
from transfer._state import Event, State


def test_a_fence_means_posted() -> None:
    rig = Rig()
    op = rig.prepare()
    fences: dict[Fence, Operation] = {}
    waits = [Fence()]
    assert post(op, waits, fences) == Posted()
    assert fences == {op.fence: op}
    assert rig.device.log == [(op.work, tuple(waits))]


@pytest.mark.parametrize("kind", [SubmitError, EngineClosed, ForkDetected, DevicePoisoned])
def test_a_refusal_means_nothing_was_posted(kind: type[SubmitError]) -> None:
    rig = Rig()
    op = rig.prepare()
    fences: dict[Fence, Operation] = {}
    rig.device.mood = refusal = kind("full")
    assert post(op, (), fences) == Posted(refused=refusal)
    assert fences == {}
    assert op.fence is None


@pytest.mark.parametrize(
    "error",
    [
        CompletionLost("no event"),
        CompletionLost("not a fence", fence="event"),
        RuntimeError("driver"),
        KeyboardInterrupt(),
        SystemExit(),
        asyncio.CancelledError(),
        MemoryError(),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_anything_else_may_have_left_work_behind(error: BaseException) -> None:
    rig = Rig()
    op = rig.prepare()
    fences: dict[Fence, Operation] = {}
    rig.device.mood = error
    assert post(op, (), fences) == Posted(lost=error)
    assert fences == {}


def test_a_fence_that_comes_along_can_still_bring_proof() -> None:
    rig = Rig()
    op = rig.prepare()
    fences: dict[Fence, Operation] = {}
    fence = Fence()
    rig.device.mood = error = CompletionLost("no event", fence=fence)
    assert post(op, (), fences) == Posted(lost=error)
    assert fences == {fence: op}
    assert op.fence is fence


def test_attempt_returns_what_was_raised() -> None:
    seen: list[object] = []
    error = ValueError("theirs")

    def fails(*args: object) -> None:
        seen.extend(args)
        raise error

    assert attempt(seen.append, 1) is None
    assert attempt(fails, 2, 3) is error
    assert seen == [1, 2, 3]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)


STEP = Transition(1, "a", "hand", State.PREPARED, Event.SUBMIT, State.IN_FLIGHT)


def test_a_hook_that_raises_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    # cases 77 and 78, a metrics fault is neither fatal nor a flood
    seen: list[Transition] = []

    def hook(step: Transition) -> None:
        seen.append(step)
        raise ZeroDivisionError

    tracer = Tracer(hook)
    with caplog.at_level(logging.ERROR, logger="kvhold.transfer"):
        for _ in range(5):
            tracer(STEP)
    assert tracer.errors == 5
    assert seen == [STEP] * 5
    assert len(caplog.records) == 1
    assert "trace hook raised" in caplog.text


def test_an_interrupt_is_no_fault_of_the_hook() -> None:
    def hook(step: Transition) -> None:
        raise KeyboardInterrupt

    tracer = Tracer(hook)
    with pytest.raises(KeyboardInterrupt):
        tracer(STEP)
    assert tracer.errors == 0
