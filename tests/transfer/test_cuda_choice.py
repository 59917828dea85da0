"""Which ways are possible, and what is remembered of them."""

import pytest
from tests.transfer.cuda_rig import Rig

from transfer._cuda_choice import PLANS, Choice
from transfer._cuda_plan import H200, Way
from transfer._extent import BlockLayout, Extent
from transfer._work import Copy

HOST_WAYS = {Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED}


def ways_of(rig: Rig, work: Copy, *allowed: Way) -> set[Way]:
    running = rig.device._running
    assert running is not None
    choice = Choice(H200, allowed or tuple(Way))
    first = choice.of_copy(work, running)[1]
    pipe, again = choice.of_copy(work, running)
    assert first == again
    assert pipe.nbytes == work.nbytes
    return set(first)


def test_all_ways_to_the_host_and_one_inside() -> None:
    rig = Rig()
    assert ways_of(rig, rig.copy(3)) == HOST_WAYS
    pages = rig.leased(rig.gpu)
    assert ways_of(rig, Copy(pages[:2], pages[2:4])) == {Way.KERNEL}
    assert ways_of(rig, rig.copy(3), Way.STAGED) == {Way.STAGED}
    # Never none: what is left is the driver's own batched copy.
    assert ways_of(rig, rig.copy(3), Way.KERNEL) == {Way.BATCH}
    rig.close()


@pytest.mark.parametrize("size", [3, 20])
def test_narrow_words_do_not_cross_the_link_by_kernels(size: int) -> None:
    plan = BlockLayout((Extent("bytes", (size,), "uint8"),), (size,))
    rig = Rig(layout=plan)
    work = Copy(rig.leased(rig.gpu)[:3], rig.leased(rig.host)[:3])
    assert ways_of(rig, work) == HOST_WAYS - {Way.MAPPED}
    rig.close()


def test_a_block_larger_than_a_staging_area_is_not_staged() -> None:
    plan = BlockLayout((Extent("bytes", (1 << 17,), "uint8"),), (1 << 17,))
    rig = Rig(layout=plan, blocks=4)
    work = Copy(rig.leased(rig.gpu)[:3], rig.leased(rig.host)[:3])
    assert ways_of(rig, work) == HOST_WAYS - {Way.STAGED}
    rig.close()


def test_what_is_remembered_is_bounded_and_goes_with_the_pools() -> None:
    rig = Rig()
    running = rig.device._running
    assert running is not None
    choice = Choice(H200, tuple(Way))
    pipe, ways = choice.of_copy(rig.copy(2), running)
    plan = choice.plan(pipe, ways)
    assert choice.plan(pipe, ways) is plan
    for number in range(PLANS + 10):
        pipe.nbytes = number
        choice.plan(pipe, ways)
    assert len(choice._plans) <= PLANS
    assert len(choice._tables) == 1
    rig.close()
