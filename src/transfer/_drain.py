"""Waiting for operations to end, and waiting that nothing can cut short.

`wait_unstoppable` is what leaving an engine, and a cancelled call on foreign memory, are made of.
A shielded scope keeps the cancellations of anyio and trio out; a native ``Task.cancel()`` of
asyncio goes through shields, so it is caught, remembered and raised again by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._operation import Operation


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

    op.watchers.append(wake)
    try:
        while not _over(op, posted=posted):
            event = anyio.Event()
            await event.wait()
    finally:
        op.watchers.remove(wake)


async def wait_unstoppable(
    done: Callable[[], bool],
    watchers: list[Callable[[], None]],
    *,
    deadline: float | None = None,
) -> BaseException | None:
    """Wait until ``done()``, through every cancellation and interrupt.

    Args:
        done: looked at whenever a callback in `watchers` is called.
        watchers: where to be told.
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
    end = None if deadline is None else anyio.current_time() + deadline
    while not done() and (end is None or anyio.current_time() < end):
        # A fresh scope each time: a native cancellation may leave one half-way.
        limit = float("inf") if end is None else end
        try:
            with anyio.CancelScope(shield=True, deadline=limit):
                event = anyio.Event()
                if not done():
                    await event.wait()
        except strikes as strike:
            caught = strike
    watchers.remove(wake)
    return caught


async def wait_owned(op: Operation, cancel: Callable[[Operation], None], *, leave: bool) -> None:
    """Wait for an operation that the caller owns; leaving early cancels it.

    Where a block is foreign memory, which no pool keeps from being reused, leaving is held back
    until nothing touches it, unless `leave` says that the caller will wait for that itself.

    Raises:
        CompletionLost: replaces a cancellation that was held back, when the end cannot be learnt.
    """
    try:
        await wait_decided(op)
    finally:
        if not op.decided:
            cancel(op)
            if not leave and any(hold.handle.pool.foreign for hold in op.holds):
                await wait_unstoppable(lambda: op.decided, op.watchers)
                if not op.settled:
                    op.raise_outcome()
