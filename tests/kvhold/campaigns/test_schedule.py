"""A schedule: by seed alone, at least so much, and every seeded bug makes one fail."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvhold.campaigns._schedule import Schedule, run
from transfer.testing import CALL_FAULTS, SEEDED_BUGS, Fault, FaultPlan


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_schedules_hold_what_they_promise(
    first: int, tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    for seed in range(first, first + 20):
        outcome = run(Schedule.drawn(seed), tmp_path, loop)
        assert outcome.violations == [], outcome.schedule
        assert outcome.operations >= 20
        assert outcome.reuses >= 1
        assert outcome.steps > outcome.operations


def test_same_seed_same_trace(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    traces = [run(Schedule.drawn(seed), tmp_path, loop) for seed in (7, 8, 7)]
    assert traces[0].trace == traces[2].trace
    assert traces[0].injected == traces[2].injected
    assert traces[0].trace != traces[1].trace


def test_a_printed_schedule_is_the_schedule(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    schedule = Schedule.drawn(11)
    names = {"Schedule": Schedule, "FaultPlan": FaultPlan, "Fault": Fault}
    again = eval(repr(schedule), names)  # noqa: S307 - our own repr
    assert again == schedule
    assert run(again, tmp_path, loop).trace == run(schedule, tmp_path, loop).trace


def test_real_devices_behind_gates(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    injected = set()
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = run(Schedule.drawn(seed, real=True), folder, loop)
        assert outcome.violations == [], outcome.schedule
        assert outcome.operations >= 20
        injected |= set(outcome.injected)
    assert injected & CALL_FAULTS
    assert Fault.DELAY in injected


def test_without_faults_everything_completes(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    outcome = run(Schedule(3), tmp_path, loop)
    assert outcome.violations == []
    assert not outcome.injected


@pytest.mark.parametrize("name", SEEDED_BUGS)
def test_every_seeded_bug_is_caught(
    name: str, tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    for seed in range(400):
        schedule = Schedule.drawn(seed, deep=False)
        with SEEDED_BUGS[name]():
            caught = run(schedule, tmp_path, loop).violations
        if caught:
            assert run(schedule, tmp_path, loop).violations == []
            return
    pytest.fail(f"{name!r} was not caught")


def test_the_naive_engine_damages_bytes(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    kinds = [
        kind
        for seed in range(20)
        for kind, _ in run(Schedule.drawn(seed, naive=True, deep=False), tmp_path, loop).violations
    ]
    assert kinds.count("bytes") >= 3


def test_a_kind_of_schedule_is_its_seed_with_a_switch() -> None:
    drawn = Schedule.drawn(5)
    assert Schedule.drawn(5, naive=True, deep=False) == replace(drawn, naive=True, deep=False)
    assert set(Schedule.drawn(5, real=True).calls.rates) == CALL_FAULTS
