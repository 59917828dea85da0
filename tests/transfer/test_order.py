"""What order means, as functions over edges, and that no shape of graph makes it slow."""

import random
import time
from collections.abc import Callable

import pytest
from tests.transfer.kit import Rig, nothing

from transfer._book import Hold
from transfer._errors import OperationFailed
from transfer._extent import BlockLayout, Extent
from transfer._fence import Fence
from transfer._handle import Blocks
from transfer._memory import HostPool
from transfer._operation import NOTHING, UNLINKED, Operation
from transfer._order import (
    bequeath,
    descendants,
    inherit,
    lineage,
    link,
    lost_reason,
    overwritten,
    reads_any,
    spread,
    unordered,
    written,
)
from transfer._state import State
from transfer._work import Copy, FileRead, Launch


class Graph:
    """Operations that nothing happens to, and edges between them."""

    def __init__(self) -> None:
        self.rig = Rig(blocks=64)

    def add(self, *after: Operation, reads: object = (), writes: object = ()) -> Operation:
        work = Launch(nothing, reads=reads, writes=writes)  # type: ignore[arg-type]
        self.rig.ledger._serial += 1
        op = Operation(self.rig.ledger._serial, "op", work, self.rig.lane, self.rig.driver)
        op.before = dict.fromkeys(after)
        for earlier in after:
            link(earlier, op)
        return op


def naive_order(later: Operation, earlier: Operation) -> bool:
    """Whether any path leads from `later` back to `earlier`."""
    return any(op is earlier or naive_order(op, earlier) for op in later.before)


def ordered(preds: dict[Operation, None], earlier: Operation) -> bool:
    """Whether a newcomer behind `preds` may follow a hold of `earlier`."""
    pool = HostPool(BlockLayout.raw(8), 1)
    block = pool.lease().handle
    pool.book.take(Hold(block, earlier, True))
    return unordered(block, preds, writing=False) is None


def random_graph(seed: int) -> list[Operation]:
    rng, graph = random.Random(seed), Graph()
    ops: list[Operation] = []
    for _ in range(9):
        ops.append(graph.add(*rng.sample(ops, min(len(ops), rng.randrange(3)))))
    return ops


@pytest.mark.parametrize("case", range(30))
def test_order_is_any_path(case: int) -> None:
    ops = random_graph(case)
    for later in ops:
        for earlier in ops[: ops.index(later)]:
            assert ordered(later.before, earlier) == naive_order(later, earlier)
            assert not ordered(earlier.before, later)


@pytest.mark.parametrize("case", range(30))
def test_descendants_are_what_is_ordered_behind(case: int) -> None:
    ops = random_graph(case)
    for op in ops:
        behind = [later for later in ops if naive_order(later, op)]
        assert descendants(op) == behind


def test_descendants_that_are_over_or_doomed_are_left_out() -> None:
    graph = Graph()
    root = graph.add()
    done, doomed, plain = graph.add(root), graph.add(root), graph.add(root)
    done.state = State.COMPLETED
    doomed.doomed = True
    graph.add(doomed)
    assert descendants(root) == [plain]


def test_edges_are_shared_until_there_are_some() -> None:
    graph = Graph()
    first = graph.add()
    assert first.after is UNLINKED
    second = graph.add(first)
    third = graph.add(first)
    assert list(first.after) == [second, third]
    assert UNLINKED == {}


def test_only_what_has_not_settled_is_waited_for() -> None:
    graph = Graph()
    first = graph.add()
    done, dropped, refused = graph.add(first), graph.add(first), graph.add(first)
    done.state, done.posted = State.COMPLETED, True
    dropped.state, dropped.before = State.CANCELLED, {first: None}
    refused.state = State.FAILED
    assert lineage([first]) == ({first: None}, [first])
    assert lineage([done]) == ({}, [done])
    # One that never ran stands for what it would have waited for, over any number of such.
    assert lineage([done, dropped, refused]) == ({first: None}, [done, dropped, refused, first])
    never = graph.add(dropped)
    never.state = State.CANCELLED
    assert lineage([never]) == ({first: None}, [never, dropped, first])
    assert lineage([]) == ({}, [])


def test_what_never_ran_bequeaths_its_predecessors() -> None:
    graph = Graph()
    first, other = graph.add(), graph.add()
    middle = graph.add(first, other)
    last = graph.add(middle)
    bequeath(middle)
    assert set(last.before) == {middle, first, other}
    assert last in first.after
    assert last in other.after
    ended = graph.add(middle)
    ended.state = State.CANCELLED
    bequeath(middle)
    assert list(ended.before) == [middle]


def test_the_first_hold_without_order_is_named() -> None:
    rig = Rig()
    block = rig.pool.lease().handle
    reader = rig.submit(reads=[block])
    other = rig.submit(reads=[block])
    writer_of = {reader: None, other: None}
    assert unordered(block, writer_of, writing=True) is None
    assert unordered(block, {}, writing=False) is None
    missing = unordered(block, {reader: None}, writing=True)
    assert missing is not None
    assert missing.owner is other
    behind = rig.submit(after=[reader, other])
    assert unordered(block, {behind: None}, writing=True) is None


# Undefined bytes


def test_bytes_belong_to_a_lease() -> None:
    rig = Rig()
    lease = rig.pool.lease()
    old = lease.handle
    bad = written(Launch(nothing, writes=[old, rig.pool.lease(2)]))
    assert {(i, generation) for _, i, generation in bad} == {(0, 0), (1, 0), (2, 0)}
    assert reads_any(Launch(nothing, reads=[old]), bad)
    assert not reads_any(Launch(nothing, writes=[old]), bad)
    lease.release()
    new = rig.pool.lease().handle
    assert new.id == old.id
    assert not reads_any(Launch(nothing, reads=[new]), bad)
    assert reads_any(Launch(nothing, reads=[Blocks.gather([old])]), bad)


def test_whole_blocks_are_defined_by_whoever_writes_them() -> None:
    layout = BlockLayout.packed([Extent("a", (4,), "uint8"), Extent("b", (4,), "uint8")])
    pool = HostPool(layout, 4)
    src, dst, other = (pool.lease().handle for _ in range(3))
    bad = written(Launch(nothing, writes=[dst, other]))
    assert overwritten(Copy(src, dst), bad) == written(Launch(nothing, writes=[other]))
    assert overwritten(Copy(src, dst, names=["a"]), bad) == bad  # a part leaves the rest undefined


def test_undefined_bytes_reach_readers_only() -> None:
    graph = Graph()
    x, y = graph.rig.pool.lease().handle, graph.rig.pool.lease().handle
    root = graph.add(writes=[x])
    plain = graph.add(root)
    reader = graph.add(plain, reads=[x], writes=[y])
    behind_reader = graph.add(reader, reads=[y])
    writer = graph.add(plain, writes=[x])
    behind_writer = graph.add(writer, reads=[x])
    lost, done = graph.add(root, reads=[x]), graph.add(root, reads=[x])
    lost.state, done.state = State.QUARANTINED, State.COMPLETED
    root.taint = written(root.work)
    assert spread(root) == [reader]
    assert plain.taint == reader.taint == root.taint
    for clean in (behind_reader, writer, behind_writer, lost, done):
        assert clean.taint == NOTHING


def test_undefined_bytes_meet_again_behind_a_diamond() -> None:
    graph = Graph()
    x, y = graph.rig.pool.lease().handle, graph.rig.pool.lease().handle
    root = graph.add(writes=[x, y])
    left, right = graph.add(root, writes=[x]), graph.add(root, writes=[y])
    end = graph.add(left, right)
    root.taint = written(root.work)
    assert spread(root) == []
    assert left.taint == written(Launch(nothing, writes=[y]))
    assert right.taint == written(Launch(nothing, writes=[x]))
    assert end.taint == root.taint


def test_undefined_bytes_that_were_passed_on_are_not_carried_again() -> None:
    graph = Graph()
    x, y = graph.rig.pool.lease().handle, graph.rig.pool.lease().handle
    root = graph.add(writes=[x])
    middle = graph.add(root, writes=[y])
    last = graph.add(middle)
    root.taint = written(root.work)
    spread(root)
    last.taint = NOTHING
    spread(root)
    assert last.taint == NOTHING
    middle.taint |= written(middle.work)
    spread(middle)
    assert last.taint == middle.taint


def test_a_newcomer_inherits() -> None:
    graph = Graph()
    lease = graph.rig.pool.lease()
    x, y = lease.handle, graph.rig.pool.lease().handle
    ended = graph.add()
    ended.state, ended.posted = State.FAILED, True
    ended.taint = written(Launch(nothing, writes=[x, y]))
    reader = graph.add(reads=[x])
    inherit(reader, [ended])
    assert isinstance(reader.spoiled, OperationFailed)
    assert "left bytes undefined that it reads" in str(reader.spoiled)
    plain = graph.add()
    inherit(plain, [ended])
    assert plain.spoiled is None
    assert plain.taint == ended.taint
    lease.release()
    later = graph.add()
    inherit(later, [ended])
    assert later.taint == written(Launch(nothing, writes=[y]))


def test_a_newcomer_behind_a_doomed_one_is_doomed() -> None:
    graph = Graph()
    lost = graph.add()
    lost.doomed = True
    lost.state = State.QUARANTINED
    direct = graph.add(lost)
    inherit(direct, [lost])
    assert direct.doomed
    assert str(direct.spoiled) == str(lost_reason(lost))
    further = graph.add(direct)
    inherit(further, [direct])
    assert further.doomed
    assert further.spoiled is direct.spoiled


# No shape of graph makes it slow. The bounds are far above what is needed and far below what the
# shape would cost with a search per path or per older hold.


def measured(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def test_diamonds_are_not_walked_path_by_path() -> None:
    graph = Graph()
    x = graph.rig.pool.lease().handle
    root = end = graph.add(writes=[x])
    for _ in range(200):  # 2 ** 200 paths
        end = graph.add(graph.add(end), graph.add(end))
    root.taint = written(root.work)
    assert spread(root) == []
    assert end.taint == root.taint
    assert len(descendants(root)) == 600
    assert ordered(end.before, root)


@pytest.mark.parametrize("wide", [False, True], ids=["one block", "a large hold"])
def test_a_long_stack_on_one_block_is_checked_by_its_last_link(wide: bool) -> None:
    rig = Rig(blocks=32, streams=True)
    handle = rig.pool.lease(20).handle if wide else rig.pool.lease().handle
    ops: list[Operation] = []

    def stack() -> None:
        for _ in range(3000):
            ops.append(rig.submit(writes=[handle], after=ops[-1:]))

    assert measured(stack) < 5
    assert len(rig.device.posted) == 3000

    def unstack() -> None:
        for op in ops:
            rig.signal(op)

    assert measured(unstack) < 5
    assert all(op.state is State.COMPLETED for op in ops)
    assert rig.pool.counts().held == 0


def test_markers_are_edges_like_others() -> None:
    rig = Rig()
    first = rig.submit()
    marker = rig.ledger.mark(rig.lane, Fence(), [first])
    assert ordered({marker: None}, first)


def test_a_read_into_a_part_of_a_block_leaves_the_rest_undefined() -> None:
    block = Rig().pool.lease().handle
    taint = written(Launch(nothing, writes=[block]))
    assert overwritten(FileRead("a", block), taint) == NOTHING
    assert overwritten(FileRead("a", block.span(0, 8)), taint) == taint
