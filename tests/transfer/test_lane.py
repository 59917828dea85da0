"""What is known of one device: who is live on it, what each stream is behind, what was counted."""

from tests.transfer.kit import HandStream, Rig, states

from transfer._fence import Fence
from transfer._lane import Marker
from transfer._state import State


def test_a_stream_covers_what_was_recorded_before() -> None:
    rig = Rig()
    stream, other = HandStream(rig.device), HandStream(rig.device)
    first, second = rig.submit(), rig.submit()
    assert rig.lane.covered(stream) == []
    rig.lane.cover(stream, first)
    rig.lane.cover(stream, second)
    rig.lane.cover(other, second)
    assert rig.lane.covered(stream) == [first, second]
    assert rig.lane.covered(other) == [second]
    assert rig.lane.covered(None) == []


def test_settled_operations_are_forgotten() -> None:  # case 80, growth over days
    rig = Rig()
    stream = HandStream(rig.device)
    for _ in range(100):
        op = rig.submit(stream=stream)
        assert rig.lane.covered(stream) == [op]
        rig.signal(op)
    assert rig.lane.covered(stream) == []
    assert rig.lane.streams == {}
    last = rig.submit(stream=stream)
    assert rig.lane.streams == {stream: [last]}


def test_a_lost_operation_stays_covered() -> None:
    rig = Rig()
    stream = HandStream(rig.device)
    op = rig.submit(stream=stream)
    rig.signal(op, lost=True)
    assert rig.lane.covered(stream) == [op]
    rig.signal(op)
    assert rig.lane.covered(stream) == []


def test_admission_counts_follow_the_live_ones() -> None:
    rig = Rig()
    ops = [rig.submit() for _ in range(3)]
    assert (rig.lane.admitted, rig.lane.nbytes, list(rig.lane.live)) == (3, 3, ops)
    assert rig.lane.leave(ops[0])
    assert not rig.lane.leave(ops[0])
    assert (rig.lane.admitted, rig.lane.nbytes, list(rig.lane.live)) == (2, 2, ops[1:])


def test_markers_are_neither_admitted_nor_counted() -> None:
    rig = Rig()
    marker = rig.ledger.mark(rig.lane, Fence(), ())
    work = marker.work
    assert isinstance(work, Marker)
    assert (work.nbytes, work.reads, work.writes, work.route) == (0, (), (), ())
    assert (rig.lane.admitted, rig.lane.submitted, list(rig.lane.live)) == (0, 0, [marker])
    rig.signal(marker)
    assert states(marker) == [State.COMPLETED]
    assert rig.lane.live == {}
    assert sum(rig.lane.ended.values()) == 0
    assert rig.left == [rig.lane]
