"""Streams that go on in any order: no staging area, table or slot is touched before its event.

The stand-in runs one command at a time of a stream that a seed draws, so a wait that is missing shows as
damage. Each control takes one wait out and has to see damage.
"""

from random import Random
from typing import Any

import pytest
from tests.transfer.cuda_rig import PAGE, Rig

from transfer._cuda_job import Pace, Slot
from transfer._cuda_lane import Lane
from transfer._work import Copy
from transfer.cuda import Way

PACES = {
    "as ever": Pace(),
    "two movers": Pace(movers=2),
    "ahead": Pace(ahead=3 << 16),
    "ahead, two movers": Pace(ahead=1, movers=2),
    "urgent and pitched": Pace(urgent=True, pitched=True),
}
SEEDS = range(6)


def once(seed: int, pace: Pace, *, outward: bool, way: Way = Way.STAGED) -> bool:
    """Three long copies one after the other, and one back; whether every byte is right."""
    rig = Rig(ways=(way,), blocks=120, pace=pace)
    rig.driver.shuffle = Random(seed)
    works = [rig.copy(30, first, outward=outward) for first in (0, 30, 60)]
    fences = [rig.post(work) for work in works]
    rig.ends(3)
    assert {done.error for done in rig.seen} == {None}
    right = all(map(rig.same, works))
    # A copy that waits for another one reads what that one wrote.
    source, target = works[0].dst, rig.leased(rig.gpu if outward else rig.host)[90:120]
    chained = Copy(source, target)
    rig.fill(rig.leased(rig.gpu if outward else rig.host)[:30], 1000 + seed)
    again = rig.post(works[0], *fences)
    if not rig.device.can_wait(again):
        rig.ends(4)  # not posted whole: an engine keeps its successor until it has ended
    rig.post(chained, again)
    rig.ends(5)
    right = right and rig.same(chained)
    rig.close()
    return right


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("outward", [True, False])
def test_every_byte_is_right_in_any_order(name: str, outward: bool) -> None:
    assert all(once(seed, PACES[name], outward=outward) for seed in SEEDS)


@pytest.mark.parametrize("pace", [Pace(), Pace(movers=2)], ids=["one mover", "two movers"])
@pytest.mark.parametrize("outward", [True, False])
def test_an_area_that_is_taken_too_early_is_damage(
    pace: Pace, outward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(lane: Lane, _writer: Any) -> Slot:
        slot = lane.slots[lane._turn]
        lane._turn = (lane._turn + 1) % len(lane.slots)
        return slot

    monkeypatch.setattr(Lane, "next_slot", at_once)
    assert not all(once(seed, pace, outward=outward) for seed in SEEDS)


@pytest.mark.parametrize("outward", [True, False])
def test_a_copy_that_does_not_wait_is_damage(
    outward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lane, "enter", lambda *_: 0)
    assert not all(once(seed, Pace(movers=2), outward=outward) for seed in SEEDS)


@pytest.mark.parametrize("outward", [True, False])
def test_an_end_is_behind_both_movers(outward: bool) -> None:
    rig = Rig(ways=(Way.STAGED,), pace=Pace(movers=2))
    running = rig.device._running
    assert running is not None
    lane = running.lane(outward=outward)
    rig.driver.hold(lane.other)
    work = rig.copy(30, outward=outward)
    rig.post(work)
    rig.driver.run()
    assert lane.other.commands
    assert not rig.device.completions.items
    rig.driver.let_go(lane.other)
    rig.ends(1)
    assert rig.same(work)
    rig.close()


@pytest.mark.parametrize("outward", [True, False])
@pytest.mark.parametrize("call", ["copy", "launch", "record", "wait", "event"])
@pytest.mark.parametrize("pace", [Pace(movers=2), Pace(ahead=1 << 17)], ids=["movers", "ahead"])
def test_the_nth_call_fails(call: str, outward: bool, pace: Pace) -> None:  # case 10
    """As for any lane: what was posted is quiet before its failure is told."""
    rig = Rig(ways=(Way.STAGED,), blocks=64, pace=pace)
    for nth in range(1, 60):
        work = rig.copy(24, outward=outward)
        before = len(rig.seen)
        rig.driver.fail(call, nth)
        told = 1
        try:
            rig.post(work)
        except Exception as error:  # noqa: BLE001 - which of them is another test's matter
            told = 0 if type(error).__name__ == "SubmitError" else 1
            # A later event on every stream is the proof of a part whose end was lost.
            rig.driver.faults.clear()
            rig.post(rig.copy(1, 60, outward=outward))
            told += 1
        done = rig.ends(before + told)[before:]
        if any(item.poisoned for item in done):
            # A mark in the middle of a copy could not be set: nothing there is known any more.
            assert pace.ahead is not None
            assert call in {"record", "event"}
            assert all(item.lost for item in done)
            rig.device.close()
            return
        left = bool(rig.driver.faults)
        rig.driver.faults.clear()
        assert not any(stream.commands for stream in rig.driver.streams)
        if left:
            break
    else:
        pytest.fail("faults without an end")
    again = rig.copy(24, outward=outward)
    before = len(rig.seen)
    rig.post(again)
    assert rig.ends(before + 1)[-1].error is None
    assert rig.same(again)
    rig.close()


@pytest.mark.parametrize("outward", [True, False])
def test_the_call_returns_with_so_much_queued(outward: bool) -> None:
    """The rest is posted by the lane's own thread, as the GPU gets ahead."""
    area = 4 * PAGE.nbytes
    rig = Rig(ways=(Way.STAGED,), pace=Pace(ahead=2 * area))
    work = rig.copy(60, outward=outward)
    rig.post(work)
    launches = [item for name, item in rig.driver.log if name == "launch"]
    assert len(launches) < 6  # of sixteen chunks
    rig.ends(1)
    assert rig.same(work)
    assert len([item for name, item in rig.driver.log if name == "launch"]) >= 15
    rig.close()


def test_kernels_are_on_urgent_streams_if_asked_for() -> None:
    for urgent in (False, True):
        rig = Rig(pace=Pace(urgent=urgent))
        running = rig.device._running
        assert running is not None
        assert {lane.kernels.urgent for lane in (running.out, running.into)} == {urgent}
        assert not running.out.moves.urgent
        rig.close()


@pytest.mark.parametrize("outward", [True, False])
def test_an_area_that_is_known_to_be_free_is_not_waited_for(outward: bool) -> None:
    """Once a copy was seen done, the next one begins with no wait; while it runs, with one."""
    rig = Rig(ways=(Way.STAGED,))

    def waits(first: int) -> int:
        before = rig.driver.calls["wait"]
        rig.post(rig.copy(12, first, outward=outward))
        return rig.driver.calls["wait"] - before

    fresh = waits(0)
    rig.ends(1)
    assert waits(12) == fresh
    behind = waits(24)
    assert behind > fresh
    rig.ends(3)
    running = rig.device._running
    assert running is not None
    assert not any(slot.used for slot in running.lane(outward=outward).slots)
    rig.close()
