"""Waiting for operations to end, and waiting that nothing can cut short.

`wait_unstoppable` is what leaving an engine, and a cancelled call on foreign memory, are made of.
A shielded scope keeps the cancellations of anyio and trio out; a native ``Task.cancel()`` of
asyncio goes through shields, so it is caught, remembered and raised again by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from transfer._errors import CompletionLost
from transfer._state import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._lane import Lane
    from transfer._ledger import Ledger
    from transfer._operation import Operation
    from transfer._reaper import Reaper


class Watchers(Protocol):
    """Something that calls back whenever `done` may have become true."""

    def append(self, callback: Callable[[], None], /) -> None:
        """Add a callback."""
        ...

    def remove(self, callback: Callable[[], None], /) -> None:
        """Take a callback out."""
        ...


def _over(op: Operation, *, posted: bool) -> bool:
    return op.decided or (posted and op.posted)


async def wait_decided(op: Operation, *, posted: bool = False) -> None:
    """Wait until `op` is settled or lost, or also until it is posted.

    Cancelling the wait changes nothing about the operation.
    """
    if _over(op, posted=posted):
        await anyio.lowlevel.checkpoint_if_cancelled()
        return
    event = anyio.Event()

    def wake() -> None:
        event.set()

    op.append(wake)
    try:
        while True:
            await event.wait()
            if _over(op, posted=posted):
                return
            event = anyio.Event()
    finally:
        op.remove(wake)


async def wait_unstoppable(
    done: Callable[[], bool],
    watchers: Watchers,
    *,
    deadline: float | None = None,
) -> BaseException | None:
    """Wait until ``done()``, through every cancellation and interrupt.

    Args:
        done: looked at whenever `watchers` calls back.
        watchers: where to be told: a list of callbacks, or an operation.
        deadline: seconds after which to return all the same.

    Returns:
        The last cancellation or interrupt that struck meanwhile, for the caller to raise.
    """
    caught: BaseException | None = None
    event = anyio.Event()

    def wake() -> None:
        event.set()

    watchers.append(wake)
    strikes = (anyio.get_cancelled_exc_class(), KeyboardInterrupt)
    end = float("inf") if deadline is None else anyio.current_time() + deadline
    waiting = True
    while waiting:
        # A fresh scope each time: a native cancellation may leave one half-way.
        try:
            with anyio.CancelScope(shield=True, deadline=end):
                event = anyio.Event()
                waiting = not done() and anyio.current_time() < end
                if waiting:
                    await event.wait()
        except strikes as strike:
            # An interrupt ends the program, so it goes before a cancellation.
            caught = caught if isinstance(caught, KeyboardInterrupt) else strike
    watchers.remove(wake)
    return caught


async def leave_owned(op: Operation, ledger: Ledger, reaper: Reaper, *, leave: bool) -> None:
    """Cancel an operation whose owner leaves early.

    Where a block is foreign memory, which no pool keeps from being reused, leaving is held back
    until nothing touches it, unless `leave` says that the caller will wait for that itself.

    Raises:
        CompletionLost: replaces a cancellation that was held back, when the end cannot be learnt.
        BaseException: another cancellation or interrupt struck meanwhile; it goes to whoever sent
            it, through the scope that sent the first.
    """
    ledger.cancel(op)
    if leave or not any(hold.handle.pool.foreign for hold in op.holds):
        return
    if op.fence is None:
        mend(ledger, [op.lane])  # it was struck while it was posted

    def decided() -> bool:
        reaper.reap()  # what an interrupt kept from being reaped
        return op.decided

    caught = await wait_unstoppable(decided, op)
    if not op.settled:
        op.raise_outcome()
    if caught is not None:
        raise caught


def mend(ledger: Ledger, lanes: list[Lane]) -> None:
    """Take up what an interrupt left half-done, since nobody else will.

    An operation that is prepared with nothing before it that will post it was struck between its
    holds and its posting: nobody has it in hand. One in flight without a fence was struck while
    posting.
    """
    live = [op for lane in lanes for op in lane.live]
    before = [earlier for op in live for earlier in op.before]
    for ended in dict.fromkeys((*live, *before)):
        if ended.settled:
            ledger._finish(ended)
    ledger.advance()
    for op in live:
        if op.state is State.PREPARED:
            if not any(op in earlier.after for earlier in op.before):
                ledger.cancel(op)
        elif op.fence is None and op.parked is None:
            ledger.lose(op, KeyboardInterrupt("struck while it was posted"))


def provable(lanes: list[Lane]) -> bool:
    """Whether a device may still prove that a lost operation is quiet."""
    return any(op.fence is not None for lane in lanes for op in lane.lost)


def give_up(ledger: Ledger, lanes: list[Lane]) -> list[Operation]:
    """Cancel what was never posted, lose the rest; return what was lost."""
    left = [op for lane in lanes for op in lane.live]
    # The last first, so that no cancellation lets a successor be posted.
    for op in sorted(left, key=lambda op: -op.serial):
        if not op.posted:
            ledger.cancel(op)
    lost = [op for op in left if not op.decided]
    for op in lost:
        ledger.lose(op, TimeoutError("still in flight at the drain deadline"))
    return lost


def describe_lost(engine: object, ops: list[Operation]) -> CompletionLost:
    """What closing with lost operations raises."""
    return CompletionLost(
        f"{engine!r} closed with {len(ops)} operations whose end cannot be learnt: "
        f"{', '.join(map(repr, ops[:8]))}"
    )
