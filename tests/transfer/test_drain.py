"""Waiting that nothing cuts short, and what leaving takes up, cancels and gives up."""

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest
from tests.transfer.gates import LAYOUT, HandDevice, foreign_pool, hand_launch, turns

from transfer import CompletionLost, Engine, HostPool, Operation, SubmitError
from transfer._drain import (
    describe_lost,
    give_up,
    mend,
    provable,
    wait_decided,
    wait_unstoppable,
)
from transfer._lane import Lane
from transfer._state import State

if TYPE_CHECKING:
    from collections.abc import Callable


class Flag:
    """Something to wait for."""

    def __init__(self) -> None:
        self.on = False
        self.watchers: list[Callable[[], None]] = []

    def wake(self) -> None:
        """Call back whoever watches."""
        for callback in list(self.watchers):
            callback()

    def set(self) -> None:
        """Become true."""
        self.on = True
        self.wake()

    async def wait(self, deadline: float | None = None) -> BaseException | None:
        """Wait, whatever strikes."""
        return await wait_unstoppable(lambda: self.on, self.watchers, deadline=deadline)


@pytest.mark.anyio
async def test_nothing_to_wait_for() -> None:
    flag = Flag()
    flag.set()
    assert await flag.wait() is None
    assert flag.watchers == []


@pytest.mark.anyio
async def test_a_cancelled_scope_does_not_end_it() -> None:
    flag = Flag()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def strike() -> None:
                with anyio.CancelScope(shield=True):
                    scope.cancel()
                    await turns()
                    flag.wake()  # in vain
                    await turns()
                    assert len(flag.watchers) == 1
                    flag.set()

            group.start_soon(strike)
            assert await flag.wait() is None  # the scope keeps its cancellation for later
            assert flag.on
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert flag.watchers == []


@pytest.mark.anyio
async def test_the_deadline_ends_it() -> None:
    flag = Flag()
    assert await flag.wait(0) is None
    assert await flag.wait(0.01) is None
    assert not flag.on
    assert flag.watchers == []


@pytest.mark.anyio
async def test_a_condition_struck_by_an_interrupt_is_asked_again() -> None:
    strikes = [KeyboardInterrupt("first"), KeyboardInterrupt("second")]

    def done() -> bool:
        if strikes:
            raise strikes.pop(0)
        return True

    caught = await wait_unstoppable(done, [])
    assert isinstance(caught, KeyboardInterrupt)
    assert caught.args == ("first",)


@pytest.mark.asyncio
async def test_native_cancellations_are_caught_and_the_last_is_given_back() -> None:
    flag = Flag()
    task = asyncio.create_task(flag.wait())
    await turns()
    for number in range(5):
        task.cancel(f"strike {number}")
        await turns(number)
        assert not task.done()
    flag.set()
    caught = await task
    assert isinstance(caught, asyncio.CancelledError)
    assert caught.args == ("strike 4",)


@pytest.mark.asyncio
async def test_an_interrupt_goes_before_a_cancellation() -> None:
    flag = Flag()
    strikes: list[BaseException] = []

    def done() -> bool:
        if strikes:
            raise strikes.pop()
        return flag.on

    task = asyncio.create_task(wait_unstoppable(done, flag.watchers))
    await turns()
    strikes.append(KeyboardInterrupt())
    flag.wake()
    await turns()
    task.cancel()
    await turns()
    flag.set()
    assert isinstance(await task, KeyboardInterrupt)


@pytest.mark.anyio
async def test_deciding_wakes_and_a_settled_one_is_not_waited_for() -> None:
    device = HandDevice()
    async with Engine(device) as engine:
        first = engine.submit_nowait(hand_launch())
        second = engine.submit_nowait(hand_launch(), after=first)
        posted: list[str] = []

        async def wait(name: str, op: Operation, *, posted_only: bool) -> None:
            await wait_decided(op, posted=posted_only)
            posted.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: wait("posted", second, posted_only=True))
            group.start_soon(lambda: wait("ended", second, posted_only=False))
            await turns()
            assert posted == []
            device.signal(0)
            await turns()
            assert posted == ["posted"]
            device.signal(1)
        assert posted == ["posted", "ended"]
        with anyio.CancelScope() as scope:
            scope.cancel()
            await wait_decided(first)  # still a place where a cancellation is delivered
        assert scope.cancelled_caught


def lanes(engine: Engine) -> list[Lane]:
    return engine._lanes


@pytest.mark.anyio
async def test_giving_up_posts_nothing() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        async with Engine(device) as engine:
            ops = [engine.submit_nowait(hand_launch(writes=[block]))]
            for _ in range(5):
                ops.append(engine.submit_nowait(hand_launch(writes=[block]), after=ops[-1]))
            assert give_up(engine._ledger, lanes(engine)) == ops[:1]
            assert [op.state for op in ops[1:]] == [State.CANCELLED] * 5
            assert ops[0].state is State.QUARANTINED
            assert len(device.posted) == 1
            assert provable(lanes(engine))
            assert "1 operations whose end" in str(describe_lost(engine, ops[:1]))
            device.signal(0)
            await turns()
            assert not provable(lanes(engine))
            assert give_up(engine._ledger, lanes(engine)) == []


@pytest.mark.anyio
async def test_what_was_lost_without_a_fence_is_never_proven() -> None:
    device = HandDevice()

    def lose() -> None:
        raise CompletionLost("no event")

    device.after_enqueue = lose
    async with Engine(device) as engine:
        with pytest.raises(CompletionLost, match="no event"):
            engine.submit_nowait(hand_launch())
        assert not provable(lanes(engine))
        device.after_enqueue = lambda: None


@pytest.mark.anyio
async def test_mending_leaves_what_is_whole() -> None:
    device = HandDevice(chained=True)
    async with Engine(device) as engine:
        first = engine.submit_nowait(hand_launch())
        second = engine.submit_nowait(hand_launch(), after=first)
        device.chained = False
        third = engine.submit_nowait(hand_launch(), after=second)
        states = [op.state for op in (first, second, third)]
        for _ in range(3):
            mend(engine._ledger, lanes(engine))
        assert [op.state for op in (first, second, third)] == states
        assert states[2] is State.PREPARED
        for number in range(3):
            device.signal(number)
            await turns()
        assert third.settled


@pytest.mark.anyio
async def test_mending_cancels_what_nobody_has_in_hand() -> None:
    device = HandDevice()
    with HostPool(LAYOUT, 1) as pool, pool.lease() as block:
        async with Engine(device) as engine:
            first = engine.submit_nowait(hand_launch())
            orphan = engine._ledger.prepare(hand_launch(writes=[block]), lanes(engine)[0])
            behind = engine.submit_nowait(hand_launch(reads=[block]), after=orphan)
            unlinked = engine._ledger.prepare(hand_launch(), lanes(engine)[0], (first,))
            del first.after[unlinked]  # as if an interrupt had struck before the last step
            mend(engine._ledger, lanes(engine))
            assert orphan.state is State.CANCELLED
            assert unlinked.state is State.CANCELLED
            assert not orphan.posted
            device.signal(0)
            if not behind.settled:
                device.signal(-1)
            await engine.drain()
        assert pool.counts().held == 0


@pytest.mark.anyio
async def test_struck_between_preparing_and_posting(monkeypatch: pytest.MonkeyPatch) -> None:
    # The owner leaves; on foreign memory too, at once, since no device was given anything.
    device = HandDevice()
    pool = foreign_pool()

    def strike(self: object, op: Operation) -> None:
        raise KeyboardInterrupt(op)

    async with Engine(device) as engine:
        monkeypatch.setattr("transfer._ledger.Ledger.start", strike)
        with pytest.raises(KeyboardInterrupt) as error:
            await engine.run(hand_launch(writes=[pool.block(0)]))
        monkeypatch.undo()
        assert error.value.args[0].state is State.CANCELLED
        assert pool.counts().held == 0
        assert device.posted == []
    pool.close()


@pytest.mark.anyio
async def test_struck_while_posting_on_foreign_memory_is_a_loss() -> None:
    device = HandDevice()
    pool = foreign_pool()

    def strike() -> None:
        raise KeyboardInterrupt

    device.after_enqueue = strike
    async with Engine(device) as engine:
        with pytest.raises((KeyboardInterrupt, CompletionLost)):
            await engine.run(hand_launch(writes=[pool.block(0)]))
        assert pool.counts().quarantined == 1
        with pytest.raises(CompletionLost):
            await pool.block(0).wait_unheld()


@pytest.mark.anyio
async def test_a_refusal_leaves_nothing_to_wait_for() -> None:
    device = HandDevice()
    pool = foreign_pool()

    def refuse() -> None:
        raise SubmitError("full")

    device.on_enqueue = refuse
    async with Engine(device) as engine:
        with pytest.raises(SubmitError):
            await engine.run(hand_launch(writes=[pool.block(0)]))
        assert pool.counts().held == 0
    pool.close()
