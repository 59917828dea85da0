"""Counters equal the script: nothing twice, nothing hidden, nothing negative."""

from dataclasses import FrozenInstanceError, astuple

import pytest
from tests.transfer.kit import HandStream, Rig

from transfer._errors import LeaseError, SubmitError
from transfer._fence import Completion, Fence
from transfer._operation import Transition
from transfer._statistics import DeviceStatistics, observe


def look(rig: Rig, lane: int = 0) -> DeviceStatistics:
    return observe(rig.ledger, rig.lanes).devices[f"hand{lane}"]


def test_a_script_is_counted_as_it_was() -> None:  # case 77, metrics wrong
    rig = Rig(devices=2, nbytes=100)
    block = rig.pool.lease().handle
    done, failed, dropped, lost, proven = (rig.submit() for _ in range(5))
    behind = rig.submit(after=[done], lane=1)
    held = rig.submit(writes=[block])
    marker = rig.ledger.mark(rig.lane, Fence(), [done])
    before = look(rig)
    assert before.submitted == before.in_flight == 6
    assert (before.prepared, before.abandoned, before.in_flight_bytes) == (0, 0, 6)
    assert look(rig, 1).prepared == 1
    rig.ledger.cancel(behind)
    rig.ledger.cancel(dropped)
    assert look(rig).abandoned == 1
    assert look(rig, 1).cancelled == 1
    rig.signal(marker)
    rig.signal(done)
    rig.signal(failed, OSError())
    rig.signal(dropped)
    rig.signal(lost, lost=True)
    rig.signal(proven, lost=True)
    rig.signal(proven)
    rig.signal(held, lost=True)
    rig.device.mood = SubmitError("full")
    with pytest.raises(SubmitError):
        rig.submit()
    assert look(rig) == DeviceStatistics(
        submitted=7,
        completed=1,
        failed=3,
        cancelled=1,
        losses=3,
        bytes_moved=1,
        prepared=0,
        in_flight=0,
        abandoned=0,
        in_flight_bytes=0,
        quarantined=2,
        quarantined_bytes=100,
        poisoned=None,
    )
    assert all(value is None or value >= 0 for value in astuple(look(rig)))


def test_a_name_hides_nothing() -> None:
    rig = Rig()
    op = rig.submit(name="marker")
    assert look(rig).in_flight == 1
    rig.signal(op)
    assert look(rig).completed == 1


def test_lost_markers_are_no_work() -> None:
    rig = Rig()
    marker = rig.ledger.mark(rig.lane, Fence(), ())
    rig.signal(marker, lost=True)
    assert look(rig).quarantined == look(rig).losses == 0
    rig.signal(marker)
    assert look(rig).failed == 0


def test_the_engines_own_counters() -> None:
    def hook(step: Transition) -> None:
        raise ZeroDivisionError

    rig = Rig(trace=hook)
    lease = rig.pool.lease()
    op = rig.submit(reads=[lease])
    rig.signal(op)
    rig.ledger.complete(Completion(Fence()))
    lease.release()
    with pytest.raises(LeaseError):
        lease.release()
    seen = observe(rig.ledger, rig.lanes)
    assert (seen.stray_completions, seen.trace_errors, seen.double_releases) == (1, 2, 1)
    rig.ledger.tracer = None
    assert observe(rig.ledger, rig.lanes).trace_errors == 0


def test_why_a_device_refuses_work() -> None:
    rig = Rig()
    rig.ledger.poison(rig.lane, OSError("context lost"))
    assert look(rig).poisoned == "hand0: context lost"


def test_snapshots_are_frozen() -> None:
    rig = Rig()
    before = look(rig)
    rig.submit(stream=HandStream(rig.device))
    assert before.submitted == 0
    with pytest.raises(FrozenInstanceError):
        before.submitted = 3  # type: ignore[misc]
