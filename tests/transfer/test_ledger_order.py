"""Order as a contract: who is posted when, who settles when, and who fails with whom."""

from itertools import permutations

import pytest
from tests.transfer.kit import HandStream, Rig, outcome, states

from transfer._errors import OperationCancelled, OperationFailed, SubmitError
from transfer._fence import Fence
from transfer._state import State
from transfer._work import Copy

PREPARED, IN_FLIGHT, ABANDONED = State.PREPARED, State.IN_FLIGHT, State.ABANDONED
COMPLETED, FAILED, CANCELLED = State.COMPLETED, State.FAILED, State.CANCELLED


def test_a_successor_is_posted_when_every_predecessor_is_settled() -> None:
    rig = Rig(devices=2)
    first, second = rig.submit(), rig.submit(lane=1)
    later = rig.submit(after=[first, second])
    assert (later.state, later.fence) == (PREPARED, None)
    rig.signal(second)
    assert later.state is PREPARED
    rig.signal(first)
    assert later.state is IN_FLIGHT
    assert rig.device.log[-1] == (later.work, ())


def test_or_where_its_device_can_wait_for_all_of_them() -> None:
    rig = Rig(devices=2)
    rig.devices[1].waits_for = set(rig.devices)
    first, second = rig.submit(), rig.submit(lane=1)
    later = rig.submit(after=[first, second], lane=1)
    assert rig.devices[1].log[-1] == (later.work, (first.fence, second.fence))
    # The other device cannot wait: half of it is not enough.
    rig.device.waits_for = {rig.device}
    blocked = rig.submit(after=[first, second])
    assert blocked.state is PREPARED
    rig.signal(second)
    assert rig.device.log[-1] == (blocked.work, (first.fence,))


def test_a_prepared_predecessor_cannot_be_waited_for_by_any_device() -> None:
    rig = Rig(devices=2, streams=True)
    rig.device.waits_for = set(rig.devices)
    first = rig.submit(lane=1)
    rig.devices[1].waits_for = set()
    second = rig.submit(after=[first], lane=1)
    third = rig.submit(after=[second])
    assert states(second, third) == [PREPARED, PREPARED]
    rig.signal(first)  # posts the second, behind whose fence the third can go
    assert states(second, third) == [IN_FLIGHT, IN_FLIGHT]
    assert rig.device.log[-1] == (third.work, (second.fence,))


def test_no_operation_settles_before_what_it_was_posted_behind() -> None:
    for order in permutations(range(3)):
        rig = Rig(streams=True)
        lease = rig.pool.lease()
        first = rig.submit(writes=[lease])
        second = rig.submit(writes=[lease], after=[first])
        third = rig.submit(reads=[lease], after=[second])
        ops = (first, second, third)
        lease.release()
        done: set[int] = set()
        for number in order:
            rig.signal(ops[number])
            done.add(number)
            prefix = next((n for n in range(3) if n not in done), 3)
            assert states(*ops) == [COMPLETED] * prefix + [IN_FLIGHT] * (3 - prefix)
            assert rig.pool.counts().free == (16 if prefix == 3 else 15)


def test_an_error_that_is_parked_is_not_lost() -> None:
    rig = Rig(streams=True)
    first = rig.submit()
    second = rig.submit(after=[first])
    rig.signal(second, OSError("parked"))
    assert second.state is IN_FLIGHT
    rig.signal(first)
    assert str(outcome(second)) == "Launch: parked"


def test_order_is_transitive() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    first = rig.submit(writes=[block])
    between = rig.submit(after=[rig.submit(after=[first])])
    last = rig.submit(writes=[block], after=[between])
    assert last.state is PREPARED
    rig.signal(first)
    for op in rig.lane.live:
        assert op.state in (IN_FLIGHT, PREPARED)
    assert rig.pool.holders(block) == [last]


def test_a_settled_predecessor_is_waited_for_by_nobody() -> None:
    rig = Rig()
    first = rig.submit()
    rig.signal(first)
    assert rig.submit(after=[first]).state is IN_FLIGHT


# Bequest


@pytest.mark.parametrize("how", ["cancelled", "refused"])
def test_what_never_ran_bequeaths_its_predecessors(how: str) -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    first = rig.submit(writes=[block])
    middle = rig.submit(after=[first])
    last = rig.submit(writes=[block], after=[middle])
    if how == "cancelled":
        rig.ledger.cancel(middle)
        assert states(middle, last) == [CANCELLED, PREPARED]
        rig.signal(first)
    else:
        rig.device.mood = SubmitError("full")
        rig.signal(first)
        assert isinstance(outcome(middle), SubmitError)
    assert states(first, last) == [COMPLETED, IN_FLIGHT]


def test_a_newcomer_behind_what_never_ran_waits_for_its_predecessors() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    first = rig.submit(writes=[block])
    chain = [rig.submit(after=[first])]
    for _ in range(2):
        chain.append(rig.submit(after=[chain[-1]]))
    for op in reversed(chain):
        rig.ledger.cancel(op)
    last = rig.submit(writes=[block], after=[chain[-1]])
    assert last.state is PREPARED
    rig.signal(first)
    assert last.state is IN_FLIGHT


def test_a_cancelled_middle_hands_all_its_predecessors_to_all_its_successors() -> None:
    rig = Rig()
    befores = [rig.submit() for _ in range(3)]
    middle = rig.submit(after=befores)
    behind = [rig.submit(after=[middle]) for _ in range(2)]
    rig.ledger.cancel(middle)
    for op in befores:
        assert states(*behind) == [PREPARED, PREPARED]
        rig.signal(op)
    assert states(*behind) == [IN_FLIGHT, IN_FLIGHT]


# Who fails with a predecessor that did not complete


@pytest.mark.parametrize(
    ("how", "streams"),
    [
        ("failed", False),
        ("failed", True),
        ("cancelled", False),
        ("abandoned", False),
        ("abandoned", True),
        ("refused", False),
    ],
)
def test_readers_fail_with_it_and_others_run(how: str, streams: bool) -> None:
    rig = Rig(streams=streams)
    block, other = rig.pool.lease().handle, rig.pool.lease().handle
    gate = rig.submit()
    first = rig.submit(writes=[block], after=[gate])
    reader = rig.submit(reads=[block], writes=[other], after=[first])
    order_only = rig.submit(after=[first])
    if how == "cancelled":
        rig.ledger.cancel(first)
        assert states(first, reader, order_only) == [CANCELLED, FAILED, PREPARED]
    if how == "refused":
        rig.device.mood = SubmitError("full")
    rig.signal(gate)
    if how == "abandoned":
        rig.ledger.cancel(first)
        rig.signal(first)
    elif how == "failed":
        rig.signal(first, OSError())
    if streams:
        assert states(reader, order_only) == [IN_FLIGHT, IN_FLIGHT]
        rig.signal(reader)  # posted: fails at its own fence
    assert states(reader, order_only) == [FAILED, IN_FLIGHT]
    error = outcome(reader)
    assert isinstance(error, OperationFailed)
    assert f"its predecessor {first!r} did not complete" in str(error)
    assert error.__cause__ is first.error
    rig.signal(order_only)
    assert order_only.state is COMPLETED
    assert rig.pool.counts().held == 0


def test_a_newcomer_that_reads_what_an_ended_predecessor_left_fails_at_once() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    first = rig.submit(writes=[block])
    rig.signal(first, OSError())
    reader = rig.submit(reads=[block], after=[first])
    assert isinstance(outcome(reader), OperationFailed)
    assert reader.work not in [work for work, _ in rig.device.log]
    # Without the edge the caller takes the bytes as they are; a writer makes them whole again.
    assert rig.submit(reads=[block]).state is IN_FLIGHT
    rig = Rig()
    block = rig.pool.lease().handle
    first = rig.submit(writes=[block])
    rig.signal(first, OSError())
    again = rig.submit(writes=[block], after=[first])
    rig.signal(again)
    assert rig.submit(reads=[block], after=[again]).state is IN_FLIGHT


def test_bytes_of_an_earlier_lease_concern_nobody() -> None:
    rig = Rig(blocks=1)
    lease = rig.pool.lease()
    first = rig.submit(writes=[lease])
    rig.signal(first, OSError())
    lease.release()
    tenant = rig.pool.lease()
    assert rig.submit(reads=[tenant], after=[first]).state is IN_FLIGHT


@pytest.mark.parametrize("overwrites", ["whole", "part", "not at all"])
def test_what_lies_between_matters_by_what_it_overwrites(overwrites: str) -> None:
    rig = Rig()
    src, block = rig.pool.lease().handle, rig.pool.lease().handle
    first = rig.submit(writes=[block])
    if overwrites == "not at all":
        between = rig.submit(after=[first])
    else:
        names = ["bytes"] if overwrites == "part" else None
        between = rig.ledger.prepare(Copy(src, block, names=names), rig.lane, [first])
        rig.ledger.start(between)
    reader = rig.submit(reads=[block], after=[between])
    rig.signal(first, OSError())
    assert between.state is IN_FLIGHT
    failing = overwrites != "whole"
    assert reader.state is (FAILED if failing else PREPARED)
    rig.signal(between)
    assert between.state is COMPLETED
    late = rig.submit(reads=[block], after=[between])
    assert late.state is (FAILED if failing else IN_FLIGHT)


def test_a_failed_reader_passes_both_on() -> None:
    rig = Rig(streams=True)
    x, y = rig.pool.lease().handle, rig.pool.lease().handle
    first = rig.submit(writes=[x])
    reader = rig.submit(reads=[x], writes=[y], after=[first])
    of_x = rig.submit(reads=[x], after=[reader])
    of_y = rig.submit(reads=[y], after=[reader])
    neither = rig.submit(after=[reader])
    ops = (reader, of_x, of_y, neither)
    rig.signal(first, OSError())
    for op in ops:
        rig.signal(op)
    assert states(*ops) == [FAILED, FAILED, FAILED, COMPLETED]


def test_the_first_reason_is_kept() -> None:
    rig = Rig(streams=True)
    x, y = rig.pool.lease().handle, rig.pool.lease().handle
    first, second = rig.submit(writes=[x]), rig.submit(writes=[y])
    reader = rig.submit(reads=[x, y], after=[first, second])
    rig.signal(first, OSError("one"))
    rig.signal(second, OSError("two"))
    rig.signal(reader, OSError("its own"))
    assert str(outcome(reader)) == "Launch: its own"
    rig = Rig(streams=True)
    x, y = rig.pool.lease().handle, rig.pool.lease().handle
    first, second = rig.submit(writes=[x]), rig.submit(writes=[y])
    reader = rig.submit(reads=[x, y], after=[first, second])
    rig.signal(first, OSError("one"))
    rig.signal(second, OSError("two"))
    rig.signal(reader)
    assert repr(first) in str(outcome(reader))


def test_a_reader_that_nobody_wants_is_cancelled_not_failed() -> None:
    rig = Rig(streams=True)
    block = rig.pool.lease().handle
    first = rig.submit(writes=[block])
    reader = rig.submit(reads=[block], after=[first])
    rig.ledger.cancel(reader)
    rig.signal(first, OSError())
    rig.signal(reader)
    assert isinstance(outcome(reader), OperationCancelled)


# Streams: what a mark covers


def test_a_mark_waits_for_the_stream_and_what_it_covers() -> None:
    rig = Rig()
    stream = HandStream(rig.device)
    block = rig.pool.lease().handle
    kernel = rig.submit(writes=[block], stream=stream)
    mark = rig.ledger.mark(rig.lane, fence := Fence(), rig.lane.covered(stream))
    assert (mark.state, mark.posted, mark.fence) == (IN_FLIGHT, True, fence)
    # Work behind the stream is ordered after the kernel: the holds stack.
    behind = rig.submit(reads=[block], after=[mark])
    assert behind.state is PREPARED
    rig.signal(mark)
    assert states(mark, behind) == [IN_FLIGHT, PREPARED]  # never before what it covers
    rig.signal(kernel)
    assert states(kernel, mark, behind) == [COMPLETED, COMPLETED, IN_FLIGHT]


def test_a_mark_covers_what_was_posted_before_it_only() -> None:
    rig = Rig()
    stream = HandStream(rig.device)
    mark = rig.ledger.mark(rig.lane, Fence(), rig.lane.covered(stream))
    rig.submit(stream=stream)
    assert list(mark.before) == []
    rig.signal(mark)
    assert mark.state is COMPLETED


def test_a_bare_event_covers_nothing() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    rig.submit(writes=[block], stream=HandStream(rig.device))
    mark = rig.ledger.mark(rig.lane, Fence(), rig.lane.covered(None))
    with pytest.raises(Exception, match="expected after= to name that operation"):
        rig.submit(reads=[block], after=[mark])


def test_only_launches_into_a_known_stream_are_covered() -> None:
    rig = Rig()
    rig.submit(stream="event of mine")  # type: ignore[arg-type]
    rig.submit()
    assert rig.lane.streams == {}


def test_a_successor_is_put_behind_a_mark_on_a_device_that_can_wait() -> None:
    rig = Rig(streams=True)
    fence = rig.device.record("event")
    mark = rig.ledger.mark(rig.lane, fence, ())
    behind = rig.submit(after=[mark])
    assert rig.device.log == [(behind.work, (fence,))]
