"""Long chains neither recurse nor go quadratic, whichever way they end."""

from typing import TYPE_CHECKING

import pytest
from tests.transfer.kit import Rig

from transfer._state import State

if TYPE_CHECKING:
    from transfer._operation import Operation

IN_FLIGHT, COMPLETED = State.IN_FLIGHT, State.COMPLETED
FAILED, CANCELLED = State.FAILED, State.CANCELLED

LONG = 10_000


@pytest.mark.parametrize("streams", [False, True], ids=["prepared", "posted"])
def test_a_long_chain_completes(streams: bool) -> None:
    rig = Rig(streams=streams)
    block = rig.pool.lease().handle
    ops: list[Operation] = []
    for _ in range(LONG):
        ops.append(rig.submit(writes=[block], after=ops[-1:]))
    for op in ops:
        rig.signal(op)
    assert {op.state for op in ops} == {COMPLETED}
    assert rig.pool.counts().held == 0


def test_a_long_chain_that_signals_backwards_completes() -> None:
    rig = Rig(streams=True)
    ops: list[Operation] = []
    for _ in range(LONG):
        ops.append(rig.submit(after=ops[-1:]))
    for op in reversed(ops[1:]):
        rig.signal(op)
    assert {op.state for op in ops} == {IN_FLIGHT}
    rig.signal(ops[0])
    assert {op.state for op in ops} == {COMPLETED}


@pytest.mark.parametrize("blocks", [1, 12], ids=["one block", "a large hold"])
def test_many_readers_behind_each_other_and_a_writer_behind_them(blocks: int) -> None:
    rig = Rig(streams=True)
    handle = rig.pool.lease(blocks).handle
    ops = [rig.submit(writes=[handle])]
    for _ in range(LONG // (1 if blocks == 1 else 10)):
        ops.append(rig.submit(reads=[handle], after=ops[-1:]))
    ops.append(rig.submit(writes=[handle], after=ops[-1:]))
    for op in ops:
        rig.signal(op)
    assert {op.state for op in ops} == {COMPLETED}


@pytest.mark.parametrize("end", ["fail", "lose", "poison", "cancel"])
@pytest.mark.parametrize("reads", [False, True], ids=["order only", "readers"])
@pytest.mark.parametrize("streams", [False, True], ids=["prepared", "posted"])
def test_a_long_chain_whose_first_goes_wrong(end: str, reads: bool, streams: bool) -> None:
    rig = Rig(streams=streams)
    block = rig.pool.lease().handle
    ops = [rig.submit(writes=[block])]
    for _ in range(LONG - 1):
        ops.append(rig.submit(reads=[block] if reads else (), after=ops[-1:]))
    if end == "cancel":
        rig.ledger.cancel(ops[0])
    rig.signal(
        ops[0],
        None if end == "cancel" else OSError(),
        lost=end in ("lose", "poison"),
        poisoned=end == "poison",
    )
    for op in ops:
        if op.fence is not None and not op.settled:
            rig.signal(op)
    first = {"cancel": CANCELLED}.get(end, FAILED)
    assert ops[0].state is first
    failing = reads or end in ("lose", "poison")
    assert {op.state for op in ops[1:]} == {FAILED if failing else COMPLETED}
    assert rig.pool.counts().held == 0
