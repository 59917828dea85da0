"""What each way queues, in which order."""

from typing import Any

import pytest
from tests.transfer.cuda_rig import PAGE, Rig

from transfer._cuda_job import Pace
from transfer._cuda_steps import SHORT, chunks
from transfer.cuda import Way

RAMP = Pace().ramp


@pytest.mark.parametrize("blocks", [1, 2, 5, 8, 9, 100])
@pytest.mark.parametrize("step", [1 << 20, RAMP, 3 << 20, 40 << 20])
def test_chunks_take_every_block_and_are_small_where_nothing_overlaps(
    blocks: int, step: int
) -> None:
    area = 16 << 20
    out = chunks(blocks, step, area, RAMP, outward=True)
    assert sum(out) == blocks
    assert all(0 < size <= max(1, area // step) for size in out)
    assert out[0] == min(blocks, max(1, min(area, RAMP) // step))
    assert chunks(blocks, step, area, RAMP, outward=False) == out[::-1]
    level = chunks(blocks, step, area, area, outward=True)
    assert sum(level) == blocks
    assert set(level[:-1]) <= {max(1, area // step)}


def commands(rig: Rig, stream: Any) -> list[str]:
    return [name for name, _ in stream.commands]


def streams(rig: Rig, *, outward: bool) -> tuple[list[str], list[str]]:
    """Commands that wait on the stream of kernels and on that of moves."""
    running = rig.device._running
    assert running is not None
    lane = running.lane(outward=outward)
    return commands(rig, lane.kernels), commands(rig, lane.moves)


def test_the_first_chunk_out_needs_no_staging_on_a_lane_at_rest() -> None:
    rig = Rig(ways=(Way.STAGED,))
    work = rig.copy(10)
    rig.post(work)
    launches = [item for name, item in rig.driver.log if name == "launch"]
    assert len(launches) == 3  # 4, 4 and 2 pages: the first by the kernel that writes to slots
    kernels, moves = streams(rig, outward=True)
    assert moves[:3] == ["call", "wait", "call"]
    assert kernels[:2] == ["call", "call"]  # tables, then the second chunk's kernel: no wait
    rig.ends(1)
    assert rig.same(work)
    rig.close()


def test_behind_other_work_the_first_chunk_is_staged() -> None:
    rig = Rig(ways=(Way.STAGED,))
    first, second = rig.copy(10), rig.copy(10, 20)
    rig.post(first)
    before = len(streams(rig, outward=True)[1])
    rig.post(second)
    behind = streams(rig, outward=True)[1][before:]
    assert behind[0] == "wait"
    rig.ends(2)
    assert rig.same(first)
    assert rig.same(second)
    rig.close()


def test_the_first_move_in_waits_for_no_tables() -> None:
    rig = Rig(ways=(Way.STAGED,))
    work = rig.copy(10, outward=False)
    rig.post(work)
    sizes = [item for name, item in rig.driver.log if name == "copy"]
    slots = 4 * PAGE.nbytes
    assert sizes[0] <= slots
    assert sizes[0] % PAGE.nbytes == 0
    assert streams(rig, outward=False)[1][0] == "call"
    rig.ends(1)
    assert rig.same(work)
    rig.close()


@pytest.mark.parametrize(("limit", "copies"), [(SHORT, 0), (0, 1)])
def test_short_copies_read_their_tables_in_place(
    limit: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer._cuda_steps.SHORT", limit)
    rig = Rig(ways=(Way.MAPPED,))
    for outward in (True, False):
        rig.driver.log.clear()
        work = rig.copy(10, outward=outward)
        rig.post(work)
        assert [name for name, _ in rig.driver.log] == ["copy"] * copies + ["launch"]
        rig.ends(1 if outward else 2)
        assert rig.same(work)
    rig.close()


def test_tables_in_use_are_not_given_back_by_a_mark_on_the_other_stream() -> None:
    """More parts than scratch buffers: a buffer comes back once the kernel has run."""
    rig = Rig(ways=(Way.MAPPED,), blocks=60)
    running = rig.device._running
    assert running is not None
    lane = running.out
    work = rig.copy(60)
    with lane._lock:
        rows = 8 * 5
        lane.scratch_words = rows + 2 * 2  # two blocks a part, thirty parts, 24 buffers
    rig.driver.hold(lane.kernels)
    rig.post(work)
    rig.driver.run()
    # A mark on the stream of moves would be reached here, and the tables overwritten.
    assert lane.moves.commands[0][0] == "wait"
    rig.driver.let_go(lane.kernels)
    rig.ends(1)
    assert rig.same(work)
    rig.close()


def test_single_pieces_and_batches() -> None:
    for way, name in ((Way.DMA, "copy"), (Way.BATCH, "copy_batch")):
        rig = Rig(ways=(way,))
        few, many = rig.copy(2), rig.copy(30, 10)
        rig.post(few)
        rig.post(many)
        assert {found for found, _ in rig.driver.log} <= {name, "copy"}
        rig.ends(2)
        assert rig.same(few)
        assert rig.same(many)
        assert rig.device.taken == {way: 2}
        rig.close()
