"""Signals: noted while there is something to close, and reported when it is closed."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import anyio
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

from kvhold.interrupts import SIGNALS, Interrupted, Stop, as_ctrl_c, check


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_what_runs_and_waits_until_it_is_closed(number: signal.Signals) -> None:
    closed = []

    async def work() -> None:
        try:
            signal.raise_signal(number)
            await anyio.sleep_forever()
        finally:
            signal.raise_signal(signal.SIGINT)  # an impatient second one
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            closed.append(True)

    with pytest.raises(Interrupted) as ended, Stop() as stop:
        stop.run(work)
    assert closed == [True]
    assert (ended.value.signum, ended.value.code) == (number, 128 + number)


def test_a_signal_before_the_loop_runs_is_not_lost() -> None:
    async def work() -> None:
        raise AssertionError

    def command() -> None:
        with Stop() as stop:
            signal.raise_signal(signal.SIGTERM)
            stop.run(work)

    with pytest.raises(Interrupted):
        command()


def test_a_signal_behind_the_work_is_not_lost() -> None:
    closed = []

    def command() -> None:
        with Stop():
            signal.raise_signal(signal.SIGINT)
            closed.append(True)

    with pytest.raises(Interrupted):
        command()
    assert closed == [True]


def test_work_in_small_steps_gives_way_between_them() -> None:
    done = []

    def command() -> None:
        with Stop() as stop:
            for number in range(3):
                stop.check()
                done.append(number)
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        command()
    assert done == [0]


def test_without_a_signal_nothing_happens() -> None:
    async def work() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    with Stop() as stop:
        assert stop.run(work) == 7
    with pytest.raises(ZeroDivisionError), Stop() as stop:
        raise ZeroDivisionError


def test_what_the_cancelled_raise_is_the_signals_doing() -> None:
    def command() -> None:
        with Stop():
            signal.raise_signal(signal.SIGINT)
            raise OSError(28, "full")

    with pytest.raises(Interrupted) as ended:
        command()
    assert isinstance(ended.value.__cause__, OSError)


@pytest.mark.parametrize("number", SIGNALS)
def test_blocking_work_gets_a_keyboard_interrupt(number: signal.Signals) -> None:
    seen = []

    def command() -> None:
        with as_ctrl_c():
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                seen.append(True)
                raise

    with pytest.raises(Interrupted) as ended:
        command()
    assert seen == [True]
    assert ended.value.signum == number


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_is_not_struck_and_the_signal_not_lost(backend: str) -> None:
    done: list[str] = []

    async def measure() -> None:
        with anyio.CancelScope(shield=True):  # as in closing, where a cancelled task may go on
            signal.raise_signal(signal.SIGTERM)
            await anyio.lowlevel.checkpoint()
            done.append("loop")

    def command() -> None:
        with as_ctrl_c():
            anyio.run(measure, backend=backend)
            done.append("behind")
            check()
            done.append("never")

    with pytest.raises(Interrupted) as ended:
        command()
    assert done == ["loop", "behind"]
    assert ended.value.code == 143
    check()


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGINT)
            stop.check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_have_no_signals() -> None:
    found = []

    def work() -> None:
        with Stop() as stop:
            stop.check()
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
