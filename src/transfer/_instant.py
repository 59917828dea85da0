"""Work that is over before anyone can look: small copies done by the call that asks for them.

An operation exists so that buffers stay owned between posting and proof. Where a device can do the
work inside one call on the engine's own thread, there is no such time: no other code of the engine
runs before the call returns, and nothing touches the bytes afterwards. The checks are those of any
operation; what cannot be done now, for a holder, a trace hook or a predecessor, goes the long way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer._state import State

if TYPE_CHECKING:
    from transfer._lane import Lane
    from transfer._ledger import Ledger
    from transfer._work import Work


def done_at_once(ledger: Ledger, lane: Lane, work: Work) -> bool:
    """Do unordered `work` now, if the device can and nobody holds its blocks.

    Returns:
        Whether it is done. If not, nothing was taken or touched.

    Raises:
        StaleBlock: a block's lease ended.
        WrongPool: a pool of another engine or thread.
    """
    device = lane.instant
    if device is None or ledger.tracer is not None or lane.poisoned is not None:
        return False
    for handle in work.reads:
        if ledger.contended(handle, writing=False):
            return False
    for handle in work.writes:
        if ledger.contended(handle, writing=True):
            return False
    if not device.instant(work):
        return False
    lane.submitted += 1
    lane.ended[State.COMPLETED] += 1
    lane.moved += work.nbytes
    return True
