"""Tests of the tests: each guarantee of the shell is broken on purpose, and its guard must see it.

A guard runs a small scene and asserts one guarantee. It passes on the library as it is, and fails
with the bug in it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from tests.transfer.gates import (
    LAYOUT,
    HandDevice,
    foreign_pool,
    gates,
    hand_launch,
    host_engine,
    in_thread,
    turns,
)

from transfer import (
    CompletionLost,
    Engine,
    EngineClosed,
    HostPool,
    Launch,
    Operation,
    State,
    WrongThread,
)
from transfer._drain import give_up, leave_owned
from transfer._lane import Lane
from transfer._ledger import Ledger
from transfer._reaper import REAP_AT_ONCE, Reaper
from transfer._wait import Line

Guard = Callable[[], Awaitable[None]]
Patch = tuple[str, object]


async def held_until_quiet() -> None:
    """A cancelled call's block is nobody else's before the worker returned."""
    with HostPool(LAYOUT, 1) as pool, gates(1) as (gate,):
        lease = pool.lease()
        async with host_engine() as engine:
            task = asyncio.create_task(engine.run(Launch(gate, writes=[lease])))
            await gate.reached()
            task.cancel()
            await asyncio.wait([task])
            lease.release()
            free = pool.counts().free
            gate.open()
            await engine.drain()
        assert free == 0


async def foreign_held_back() -> None:
    """On foreign memory a cancellation waits for the worker."""
    pool = foreign_pool(1)
    with gates(1) as (gate,):
        async with host_engine() as engine:
            task = asyncio.create_task(engine.run(Launch(gate, writes=[pool.block(0)])))
            await gate.reached()
            task.cancel()
            await turns()
            early = task.done()
            gate.open()
            await asyncio.wait([task])
    assert not early


async def abandoned_are_drained() -> None:
    """Leaving waits for what was cancelled and still runs."""
    with gates(1) as (gate,):
        engine = host_engine()
        engine.start()
        op = engine.submit_nowait(Launch(gate))
        await gate.reached()
        op.cancel()
        task = asyncio.create_task(engine.aclose())
        await turns()
        early = task.done()
        gate.open()
        with suppress(CompletionLost):
            await task
    assert not early


async def drained_through_cancellation() -> None:
    """Leaving goes on through a native cancellation."""
    device = HandDevice()
    engine = Engine(device)
    engine.start()
    engine.submit_nowait(hand_launch())
    task = asyncio.create_task(engine.aclose())
    await turns()
    task.cancel()
    await turns()
    early = task.done()
    device.signal(0)
    await turns()
    await asyncio.wait([task])
    with suppress(CompletionLost):
        await engine.aclose()
    assert not early


async def nobody_overtakes() -> None:
    """Admission is first come, first served."""
    device = HandDevice()
    async with Engine(device, in_flight_bytes_max=100) as engine:
        blocker = engine.submit_nowait(Launch(print, on="hand", nbytes=60))
        large = asyncio.create_task(engine.submit(Launch(print, on="hand", nbytes=100)))
        await turns()
        small = asyncio.create_task(engine.submit(Launch(print, on="hand", nbytes=10)))
        await turns()
        overtaken = small.done()
        for number in range(3):
            device.signal(number)
            await turns()
        await blocker.wait()
        await large
        await small
    assert not overtaken


async def nothing_is_posted_at_the_deadline() -> None:
    """Giving up cancels what was never posted, and loses the rest."""
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool:
        engine = Engine(device, drain_deadline=0)
        engine.start()
        lease = pool.lease()
        first = engine.submit_nowait(hand_launch(writes=[lease]))
        second = engine.submit_nowait(hand_launch(writes=[lease]), after=first)
        lease.release()
        with suppress(CompletionLost):
            await engine.aclose()
        states, free, posted = [first.state, second.state], pool.counts().free, len(device.posted)
        device.signal(0)
        if posted > 1:
            device.signal(1)
        engine.close_sync(1)
    assert states == [State.QUARANTINED, State.CANCELLED]
    assert (free, posted) == (0, 1)


async def late_proofs_are_taken() -> None:
    """A proof that comes after the close gives the block back."""
    device = HandDevice()
    pool = HostPool(LAYOUT, 1)
    engine = Engine(device, drain_deadline=0)
    engine.start()
    with pool.lease() as block:
        engine.submit_nowait(hand_launch(writes=[block]))
    with suppress(CompletionLost):
        await engine.aclose()
    device.signal(0)
    with suppress(CompletionLost):
        engine.close_sync(0)
    assert pool.counts().free == 1
    pool.close()


async def the_loop_gets_its_turn() -> None:
    """A callback takes a bounded number of completions."""
    device = HandDevice()
    async with Engine(device, in_flight_max=10_000) as engine:
        for _ in range(10 * REAP_AT_ONCE):
            engine.submit_nowait(hand_launch())
        for number in range(10 * REAP_AT_ONCE):
            device.signal(number)
        await turns(2)
        left = engine.statistics().devices["hand"].in_flight
        await engine.drain()
    assert left > 0


async def foreign_threads_are_refused() -> None:
    """A call from another thread is one clear error."""
    async with host_engine() as engine:

        def call() -> bool:
            with suppress(WrongThread):
                engine.submit_nowait(Launch(lambda: None))
                return False
            return True

        refused = await in_thread(call)
    assert refused


async def waiters_are_told_of_the_close() -> None:
    """Who waits for admission gets EngineClosed when the engine closes."""
    device = HandDevice()
    engine = Engine(device, in_flight_max=1)
    engine.start()
    engine.submit_nowait(hand_launch())
    waiter = asyncio.create_task(engine.submit(hand_launch()))
    await turns()
    closer = asyncio.create_task(engine.aclose())
    await turns()
    told = waiter.done() and isinstance(waiter.exception(), EngineClosed)
    device.signal(0)
    await turns()
    if len(device.posted) > 1:
        device.signal(1)
    await asyncio.wait([waiter, closer])
    assert told


# The bugs


async def leave_and_release(op: Operation, ledger: Ledger, reaper: Reaper, *, leave: bool) -> None:
    ledger.cancel(op)
    for hold in op.holds:
        hold.handle.pool.end(hold)


async def leave_without_waiting(
    op: Operation, ledger: Ledger, reaper: Reaper, *, leave: bool
) -> None:
    await leave_owned(op, ledger, reaper, leave=True)


def busy_but_abandoned(self: Engine) -> bool:
    return any(op.state is State.IN_FLIGHT for lane in self._lanes for op in lane.live)


async def wait_until_struck(
    done: Callable[[], bool], watchers: Any, *, deadline: float | None = None
) -> BaseException | None:
    event = anyio.Event()
    watchers.append(event.set)
    while not done():
        try:
            await event.wait()
        except asyncio.CancelledError as error:
            return error
        event = anyio.Event()
        watchers.append(event.set)
    return None


def free_when_it_fits(self: Line, fits: Callable[[], bool]) -> bool:
    return fits()


def give_up_by_age(ledger: Ledger, lanes: list[Lane]) -> list[Operation]:
    left = [op for lane in lanes for op in lane.live]
    for op in left:
        for hold in op.holds:
            hold.handle.pool.end(hold)
    return give_up(ledger, lanes)


def give_up_all(ledger: Ledger, lanes: list[Lane]) -> list[Operation]:
    left = [op for lane in lanes for op in lane.live]
    for op in left:
        ledger.lose(op, TimeoutError())
    return left


def reap_never(self: Reaper, busy: Callable[[], bool], deadline: float) -> None:
    self.detach()


def reap_all(self: Reaper) -> None:
    self.reap()


def here_always(self: object) -> bool:
    return True


def wake_nobody(self: Line) -> None:
    """Forget them."""


CONTROLS: list[tuple[Guard, Patch]] = [
    (held_until_quiet, ("transfer._drain.leave_owned", leave_and_release)),
    (foreign_held_back, ("transfer._drain.leave_owned", leave_without_waiting)),
    (abandoned_are_drained, ("transfer._engine.Engine._busy", busy_but_abandoned)),
    (drained_through_cancellation, ("transfer._drain.wait_unstoppable", wait_until_struck)),
    (nobody_overtakes, ("transfer._wait.Line.free", free_when_it_fits)),
    (nothing_is_posted_at_the_deadline, ("transfer._drain.give_up", give_up_by_age)),
    (nothing_is_posted_at_the_deadline, ("transfer._drain.give_up", give_up_all)),
    (late_proofs_are_taken, ("transfer._reaper.Reaper.wait_sync", reap_never)),
    (the_loop_gets_its_turn, ("transfer._reaper.Reaper._reap_some", reap_all)),
    (foreign_threads_are_refused, ("transfer._loop.AsyncioLoop.here", here_always)),
    (waiters_are_told_of_the_close, ("transfer._wait.Line.wake_all", wake_nobody)),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("guard", dict.fromkeys(guard for guard, _ in CONTROLS))
async def test_the_guard_passes(guard: Guard) -> None:
    await guard()


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(
    ("guard", "patch"),
    [
        pytest.param(guard, patch, id=f"{guard.__name__}-{patch[1].__name__}")  # type: ignore[attr-defined]
        for guard, patch in CONTROLS
    ],
)
async def test_the_guard_sees_the_bug(
    guard: Guard, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError):
        await guard()
