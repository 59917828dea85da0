"""The records of a pool against a plain model: sets and lists, no arrays, no shortcuts."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from transfer._book import LARGE, Book, Hold
from transfer._errors import StaleBlock
from transfer._extent import BlockLayout
from transfer._handle import Block, Blocks, Handle
from transfer._memory import HostPool

BLOCKS = 3 * LARGE


@dataclass
class Model:
    """What a book is about, written down as plainly as possible."""

    generation: list[int] = field(default_factory=lambda: [0] * BLOCKS)
    leased: set[int] = field(default_factory=set)
    holds: list[Hold] = field(default_factory=list)

    def on(self, block_id: int) -> list[Hold]:
        return [hold for hold in self.holds if block_id in ids_of(hold.handle)]

    def free(self) -> set[int]:
        return {i for i in range(BLOCKS) if i not in self.leased and not self.on(i)}

    def place(self, block_id: int) -> str:
        if any(hold.lost for hold in self.on(block_id)):
            return "quarantined"
        if self.on(block_id):
            return "held"
        return "leased" if block_id in self.leased else "free"

    def conflicts(self, handle: Handle, *, writing: bool) -> set[Hold]:
        """On each block the newest writer and, for a writer, the readers since."""
        found = set()
        for block_id in ids_of(handle):
            for hold in reversed(self.on(block_id)):
                if writing or hold.writing:
                    found.add(hold)
                if hold.writing:
                    break
        return found


def ids_of(handle: Handle) -> list[int]:
    return [int(i) for i in handle.ids]


class Records(RuleBasedStateMachine):
    """Leases and holds in any order, one block and many, small holds and large ones."""

    leases: Bundle[Handle] = Bundle("leases")
    past: Bundle[Handle] = Bundle("past")
    holds: Bundle[Hold] = Bundle("holds")
    ended: Bundle[Hold] = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(BlockLayout.raw(8), BLOCKS)
        self.book = self.pool.book
        self.model = Model()

    @rule(target=leases)
    def lease_one(self) -> Handle | MultipleResults[Handle]:
        if not self.book.free:
            return multiple()
        block_id = self.book.lease_one()
        assert block_id in self.model.free()
        self.model.leased.add(block_id)
        return Block(self.pool, block_id, self.book.generation[block_id])

    @rule(target=leases, count=st.integers(0, BLOCKS))
    def lease_many(self, count: int) -> Handle | MultipleResults[Handle]:
        if count > len(self.book.free):
            return multiple()
        ids = self.book.lease_many(count)
        assert len(set(ids.tolist())) == count
        assert set(ids.tolist()) <= self.model.free()
        self.model.leased.update(ids.tolist())
        return Blocks(self.pool, ids, self.book.generations[ids])

    @rule(target=past, handle=consumes(leases))
    def give_back(self, handle: Handle) -> Handle:
        self.book.give_back(handle)
        for block_id in ids_of(handle):
            self.model.leased.remove(block_id)
            self.model.generation[block_id] += 1
        return handle

    @rule(target=holds, handle=leases, writing=st.booleans(), owner=st.integers(0, 3))
    def hold(self, handle: Handle, writing: bool, owner: int) -> Hold:
        """Order is the ledger's business: any hold may be stacked on any other here."""
        busy = self.book.check(handle, writing=writing)
        assert busy == any(
            writing or hold.writing for i in ids_of(handle) for hold in self.model.on(i)
        )
        hold = Hold(handle, f"owner {owner}", writing)
        self.book.take(hold)
        self.model.holds.append(hold)
        assert hold.live
        return hold

    @rule(target=ended, hold=consumes(holds))
    def end(self, hold: Hold) -> Hold:
        self.book.end(hold)
        self.model.holds.remove(hold)
        return hold

    @rule(hold=ended)
    def end_again(self, hold: Hold) -> None:
        self.book.end(hold)

    @rule(hold=ended)
    def lose_too_late(self, hold: Hold) -> None:
        self.book.quarantine(hold)

    @rule(hold=holds)
    def lose(self, hold: Hold) -> None:
        self.book.quarantine(hold)
        self.book.quarantine(hold)

    @rule(handle=past)
    def stale_handles_are_refused(self, handle: Handle) -> None:
        if len(handle):
            with pytest.raises(StaleBlock, match=r"stale"):
                self.book.check(handle)

    @rule(handle=leases)
    def fresh_handles_are_not(self, handle: Handle) -> None:
        self.book.check(handle)

    @rule(handle=leases, writing=st.booleans())
    def conflicts_are_what_a_newcomer_must_follow(self, handle: Handle, writing: bool) -> None:
        found = list(self.book.conflicts(handle, writing=writing))
        assert len(set(found)) == len(found)
        assert set(found) == self.model.conflicts(handle, writing=writing)

    @invariant()
    def the_free_list_is_exact(self) -> None:
        assert len(set(self.book.free)) == len(self.book.free)
        assert set(self.book.free) == self.model.free()

    @invariant()
    def every_block_is_counted_once(self) -> None:
        places = [self.model.place(block_id) for block_id in range(BLOCKS)]
        counts = self.book.counts()
        assert sum(counts) == BLOCKS
        assert counts._asdict() == {name: places.count(name) for name in counts._fields}

    @invariant()
    def records_agree(self) -> None:
        book, model = self.book, self.model
        assert book.generations.tolist() == model.generation
        for block_id in range(BLOCKS):
            on = model.on(block_id)
            assert book.held[block_id] == len(on)
            assert book.writing[block_id] == sum(hold.writing for hold in on)
            assert book.lost[block_id] == sum(hold.lost for hold in on)
            assert set(book.holders((block_id,))) == {hold.owner for hold in on}
        assert set(book.holders()) == {hold.owner for hold in model.holds if len(hold.handle)}
        assert book.idle == (not any(len(hold.handle) for hold in model.holds))


def test_records_agree_with_a_plain_model() -> None:  # case 5, over random uses
    run_state_machine_as_test(Records, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.parametrize("count", [1, LARGE - 1, LARGE, LARGE + 1])
def test_small_and_large_holds_are_found_alike(count: int) -> None:
    pool = HostPool(BlockLayout.raw(8), BLOCKS)
    book = pool.book
    handle = pool.lease(count).handle
    first, second = Hold(handle, "first", True), Hold(handle, "second", False)
    book.take(first)
    book.take(second)
    assert list(book.conflicts(handle[:1], writing=True)) == [second, first]
    assert list(book.conflicts(handle[-1], writing=False)) == [first]
    assert book.holders() == ["first", "second"]
    book.end(first)
    assert list(book.conflicts(handle[0], writing=False)) == []
    assert book.holders(map(int, handle.ids)) == ["second"]
    book.end(second)
    assert book.idle


def test_a_newcomer_looks_no_further_than_the_newest_writer() -> None:
    pool = HostPool(BlockLayout.raw(8), BLOCKS)
    for handle in (pool.lease().handle, pool.lease(LARGE + 1).handle):
        holds = [Hold(handle, n, writing) for n, writing in enumerate((True, False, True, False))]
        for hold in holds:
            pool.book.take(hold)
        assert list(pool.book.conflicts(handle, writing=True)) == [holds[3], holds[2]]
        assert list(pool.book.conflicts(handle, writing=False)) == [holds[2]]


def test_a_reader_looks_no_further_than_a_reader_that_it_follows() -> None:
    pool = HostPool(BlockLayout.raw(8), 2)
    block = pool.lease().handle
    for owner, writing in (("load", True), ("first", False), ("second", False)):
        pool.book.take(Hold(block, owner, writing))

    def owners(*, writing: bool, known: set[str]) -> list[object]:
        return [hold.owner for hold in pool.book.conflicts(block, writing=writing, known=known)]

    assert owners(writing=False, known=set()) == ["load"]
    assert owners(writing=False, known={"first"}) == []
    assert owners(writing=True, known={"first"}) == ["second", "first", "load"]


def test_so_it_is_with_large_holds() -> None:
    pool = HostPool(BlockLayout.raw(8), BLOCKS)
    blocks = pool.lease(2 * LARGE).handle
    load, first = Hold(blocks, "load", True), Hold(blocks[: LARGE + 1], "first", False)
    pool.book.take(load)
    pool.book.take(first)
    assert list(pool.book.conflicts(blocks, writing=False, known={"first"})) == [load]
    assert list(pool.book.conflicts(blocks[:4], writing=False, known={"first"})) == []
    assert list(pool.book.conflicts(blocks[:4], writing=True, known={"first"})) == [first, load]


def test_the_search_goes_on_for_blocks_that_the_newest_writer_has_not() -> None:
    pool = HostPool(BlockLayout.raw(8), BLOCKS)
    blocks = pool.lease(2 * LARGE).handle
    wide, narrow = Hold(blocks, "wide", True), Hold(blocks[: LARGE + 1], "narrow", True)
    pool.book.take(wide)
    pool.book.take(narrow)
    assert list(pool.book.conflicts(blocks[0], writing=True)) == [narrow]
    assert list(pool.book.conflicts(blocks[-1], writing=True)) == [wide]
    assert list(pool.book.conflicts(blocks, writing=True)) == [narrow, wide]


def test_foreign_books_are_leased_for_ever() -> None:
    book = Book(3, foreign=True)
    assert book.counts() == (0, 3, 0, 0)
    assert book.free == []


def test_a_stale_handle_says_which_blocks() -> None:
    pool = HostPool(BlockLayout.raw(8), 4)
    lease = pool.lease(3)
    blocks = lease.handle
    lease.release()
    with pytest.raises(StaleBlock, match=r"blocks \[0, 1, 2\]"):
        pool.book.check(blocks)
    with pytest.raises(StaleBlock, match="the block is at generation 1"):
        pool.book.check(blocks[0])


def test_holds_wake_whoever_waits_for_their_blocks() -> None:
    pool = HostPool(BlockLayout.raw(8), BLOCKS)
    book = pool.book
    woken: list[str] = []
    blocks = pool.lease(2).handle
    book.unheld[int(blocks.ids[1])] = [lambda: woken.append("unheld")]
    many, one = Hold(blocks, "many", False), Hold(blocks[1], "one", False)
    book.take(many)
    book.take(one)
    book.end(many)
    assert woken == []  # another hold is left
    book.quarantine(one)
    assert woken == ["unheld"]  # there is something to learn: it may never end
    book.end(one)
    assert woken == ["unheld"] * 2
    book.take(third := Hold(blocks, "third", False))
    book.end(third)
    assert woken == ["unheld"] * 3
    assert repr(third).startswith("<hold reading <2 blocks of host pool>")


def test_thousands_of_blocks_cost_one_hold() -> None:
    pool = HostPool(BlockLayout.raw(8), 5000)
    blocks = pool.lease(5000).handle
    hold = Hold(blocks, "batch", True)
    pool.book.take(hold)
    assert pool.counts() == (0, 0, 5000, 0)
    assert pool.holders(blocks) == ["batch"]
    pool.book.quarantine(hold)
    assert pool.counts() == (0, 0, 0, 5000)
    pool.book.end(hold)
    assert pool.counts() == (0, 5000, 0, 0)
    assert int(np.count_nonzero(pool.book.generations)) == 0
