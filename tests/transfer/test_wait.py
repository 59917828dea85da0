"""Waiting in line, and waiting to be woken: in order, nobody forgotten, whoever leaves."""

from typing import TYPE_CHECKING

import anyio
import pytest

from transfer._wait import Line, limit, wait_woken

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


async def settle() -> None:
    """Let every task run as far as it can."""
    await anyio.wait_all_tasks_blocked()


class Room:
    """Some seats, and a line for them."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.line = Line()
        self.order: list[str] = []

    async def come(self, name: str, wants: int = 1) -> None:
        await self.line.wait(lambda: wants <= self.seats)
        self.seats -= wants
        self.order.append(name)

    def leave(self, count: int = 1) -> None:
        self.seats += count
        self.line.wake()


async def test_whoever_fits_goes_in_at_once() -> None:
    room = Room(1)
    assert room.line.free(lambda: True)
    await room.come("a")
    assert room.order == ["a"]
    assert not room.line.free(lambda: False)


async def test_first_come_first_served() -> None:
    room = Room(0)
    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(room.come, name)
            await settle()
        assert len(room.line) == 3
        room.leave(2)
        await settle()
        assert room.order == ["a", "b"]
        room.leave()
    assert room.order == ["a", "b", "c"]
    assert len(room.line) == 0


async def test_a_small_wish_does_not_overtake_a_large_one() -> None:
    room = Room(1)
    async with anyio.create_task_group() as group:
        group.start_soon(room.come, "large", 2)
        await settle()
        assert not room.line.free(lambda: True)  # there is room for one, but not out of turn
        group.start_soon(room.come, "small", 1)
        await settle()
        assert room.order == []
        room.leave()
        await settle()
        assert room.order == ["large"]
        room.leave()
    assert room.order == ["large", "small"]


async def test_whoever_gives_up_lets_the_next_look() -> None:
    room = Room(1)
    scope = anyio.CancelScope()

    async def give_up() -> None:
        with scope:
            await room.come("large", 2)

    async with anyio.create_task_group() as group:
        group.start_soon(give_up)
        await settle()
        group.start_soon(room.come, "small", 1)
        await settle()
        assert room.order == []
        scope.cancel()
    assert room.order == ["small"]


async def test_a_wish_that_raises_ends_the_wait() -> None:
    line = Line()
    closed = False

    def fits() -> bool:
        if closed:
            raise RuntimeError("closed")
        return False

    caught = []

    async def wait() -> None:
        try:
            await line.wait(fits)
        except RuntimeError as error:
            caught.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        await settle()
        closed = True
        line.wake_all()
    assert len(caught) == 2
    assert len(line) == 0


async def test_nobody_goes_in_when_cancelled_before() -> None:
    line = Line()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await line.wait(lambda: True)
        pytest.fail("a cancelled caller took the room")
    assert scope.cancelled_caught


async def test_waking_an_empty_line_does_nothing() -> None:
    line = Line()
    line.wake()
    line.wake_all()
    assert len(line) == 0


async def test_waiting_to_be_woken_takes_its_callback_out() -> None:
    waiters: list[Callable[[], None]] = []
    async with anyio.create_task_group() as group:
        group.start_soon(wait_woken, waiters)
        await settle()
        assert len(waiters) == 1
        waiters[0]()
        waiters[0]()
    assert waiters == []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wait_woken(waiters)
    assert waiters == []


@pytest.mark.parametrize("found", [0, -1, float("nan")])
async def test_a_limit_that_lets_nothing_in_is_refused(found: float) -> None:
    assert limit("in_flight_max", 1) == 1
    with pytest.raises(ValueError, match=f"in_flight_max: found {found}, expected at least 1"):
        limit("in_flight_max", found)
