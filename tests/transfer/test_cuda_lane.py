"""Posting step by step, and what becomes of a job whose posting fails."""

from collections.abc import Iterator

import pytest
from tests.transfer.cuda_rig import Rig
from tests.transfer.gpu_kit import FakeDriver

from transfer._cuda_api import CudaError
from transfer._cuda_job import Job
from transfer._cuda_lane import FEW, QUEUED, Lane
from transfer._cuda_watch import CudaFence, Signals
from transfer._errors import CompletionLost, SubmitError
from transfer._extent import BlockLayout
from transfer._fence import CompletionQueue
from transfer._work import Copy
from transfer.cuda import Way

ONE = BlockLayout.raw(4096)
"""A page of one run."""


def few(rig: Rig, *, outward: bool = True) -> Copy:
    """As many pages as are copied with no plan."""
    ends = (rig.leased(rig.gpu)[:FEW], rig.leased(rig.host)[:FEW])
    return Copy(*(ends if outward else ends[::-1]))


def queued(rig: Rig) -> int:
    return max(len(stream.commands) for stream in rig.driver.streams)


def test_a_long_job_never_fills_the_queue() -> None:  # case 4, the size of it
    rig = Rig(ways=(Way.DMA,), blocks=600)
    work = rig.copy(600)  # 4800 pieces
    rig.post(work)
    most = queued(rig)
    assert most < QUEUED + 200
    while not rig.device.completions.items:
        if not rig.driver.step():
            rig.ends(1)
            break
        most = max(most, queued(rig))
    rig.ends(1)
    assert most < QUEUED + 200
    assert rig.driver.calls["copy"] == 4800
    assert rig.same(work)
    rig.close()


def test_jobs_of_a_lane_keep_their_order() -> None:
    rig = Rig(ways=(Way.DMA,), blocks=400)
    fences = [rig.post(rig.copy(100, first)) for first in (0, 100, 200, 300)]
    assert [done.fence for done in rig.ends(4)] == fences
    rig.close()


def attempt(rig: Rig, work: Copy) -> tuple[CudaFence | None, object | None]:
    """Post: the fence, if all or a part was posted, or that of a loss."""
    try:
        return rig.post(work), None
    except SubmitError:
        return None, None
    except CompletionLost as lost:
        return None, lost.fence


CALLS = {
    Way.DMA: ("copy", "record", "event"),
    Way.BATCH: ("copy_batch", "record", "event"),
    Way.STAGED: ("copy", "launch", "record", "wait", "event"),
    Way.MAPPED: ("launch", "record", "event"),
}


@pytest.mark.parametrize(("way", "call"), [(way, call) for way in CALLS for call in CALLS[way]])
@pytest.mark.parametrize("outward", [True, False])
def test_the_nth_call_fails(way: Way, outward: bool, call: str) -> None:  # case 10
    """For every n until nothing fires: nothing posted, or an error once it is quiet."""
    rig = Rig(ways=(way,), blocks=24)
    fired = 0
    for nth in range(1, 200):
        work = rig.copy(10, outward=outward)
        rig.seen.clear()
        rig.driver.fail(call, nth)
        fence, lost = attempt(rig, work)
        left = bool(rig.driver.faults)
        rig.driver.faults.clear()
        if lost is not None:
            # A later event on both streams is the proof that the posted part is quiet.
            rig.post(rig.copy(1, 20, outward=outward))
            assert lost in {done.fence for done in rig.ends(2)}
        if fence is not None:
            (done,) = rig.ends(1)
            assert done.fence is fence
            assert not done.lost
            assert (done.error is None) == left
            assert done.error is not None or rig.same(work)
        again = rig.copy(10, outward=outward)
        rig.seen.clear()
        rig.post(again)
        assert [done.error for done in rig.ends(1)] == [None]
        assert rig.same(again)
        if left:
            break
        fired += 1
    else:
        pytest.fail("faults without an end")
    assert fired >= 1
    rig.close()


def test_a_failed_part_is_quiet_before_it_is_said_to_have_failed() -> None:  # case 10
    rig = Rig(ways=(Way.DMA,))
    rig.driver.fail("copy", 5)
    fence = rig.post(rig.copy(8))
    assert not rig.device.completions.items
    assert rig.driver.calls["copy"] == 5
    (done,) = rig.ends(1)
    assert done.fence is fence
    assert isinstance(done.error, CudaError)
    assert not any(stream.commands for stream in rig.driver.streams)
    rig.close()


def test_lost_first_and_quiet_later() -> None:
    """No event behind the posted part: lost; a later event on both streams is the proof."""
    rig = Rig(ways=(Way.DMA,))
    rig.driver.fail("copy", 5)
    rig.driver.fail("record", 2)  # the first joins the streams, the second is the event itself
    with pytest.raises(CompletionLost) as lost:
        rig.post(rig.copy(8))
    assert not rig.device.completions.items
    later = rig.post(rig.copy(2, 20))
    done = rig.ends(2)
    assert {item.fence for item in done} == {lost.value.fence, later}
    assert not any(item.lost for item in done)
    rig.close()


def test_an_interrupted_posting_does_not_count_as_whole() -> None:
    """A generator that an interrupt ended early gives no error; its job must not complete."""
    driver = FakeDriver(manual=True)
    signals = Signals(driver, CompletionQueue(), spin=float("inf"))
    lane = Lane(signals, "lane", area=0, areas=0, scratch=64, scratches=2, ends_with_moves=True)
    job = Job(CudaFence(), ())

    def steps() -> Iterator[int]:
        job.touched = True
        yield 1

    job.steps = steps()  # never says that it is whole
    lane.watch.start()
    lane.submit(job)
    driver.run()
    lane.watch.stop()
    assert lane.watch.join(10)
    (done,) = signals.completions.items
    assert isinstance(done.error, CudaError)
    driver.stop()


@pytest.mark.parametrize("outward", [True, False])
@pytest.mark.parametrize("call", ["copy", "record"])
def test_the_nth_call_of_a_few_pieces_fails(call: str, outward: bool) -> None:  # case 10
    """Nothing posted: refused. Part of it posted: quiet before it is said to have failed."""
    rig = Rig(layout=ONE, blocks=FEW)
    for nth in range(1, FEW + 1 if call == "copy" else 2):
        work = few(rig, outward=outward)
        rig.driver.fail(call, nth)
        if call == "copy" and nth == 1:
            with pytest.raises(SubmitError, match="injected"):
                rig.post(work)
        else:
            count = len(rig.seen)
            fence = rig.post(work)
            done = rig.ends(count + 1)[-1]
            assert done.fence is fence
            assert isinstance(done.error, CudaError)
        count = len(rig.seen)
        rig.post(work)
        assert rig.ends(count + 1)[-1].error is None
    rig.close()


def test_a_few_pieces_wait_and_take_their_turn() -> None:
    """They are ordered behind what they wait for, and behind a job that is not posted whole."""
    rig = Rig(layout=ONE, blocks=FEW)
    running = rig.device._running
    assert running is not None
    rig.driver.hold(running.out.moves)  # else the first may end before the second is posted
    first = rig.post(few(rig))
    second = rig.post(few(rig, outward=False), first)
    assert rig.driver.calls["wait"] == 1
    rig.driver.let_go(running.out.moves)
    assert {done.fence for done in rig.ends(2)} == {first, second}
    rig.close()
    rig = Rig(ways=(Way.DMA,), blocks=600)
    assert rig.device._choice.few(rig.copy(1)) is None  # eight runs a page
    rig.close()


def test_an_interrupt_among_a_few_pieces_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(layout=ONE, blocks=FEW)
    work = few(rig)

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rig.driver, "record", strike)
        with pytest.raises(KeyboardInterrupt):
            rig.post(work)
    again = rig.post(work)
    assert {(done.fence is again, done.error is None) for done in rig.ends(2)} == {
        (True, True),
        (False, False),
    }
    rig.close()
