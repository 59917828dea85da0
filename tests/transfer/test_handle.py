"""Handles: what a caller holds in the hand, and what becomes stale."""

import numpy as np
import pytest

from transfer._errors import LayoutMismatch, LeaseError, SpanError, StaleBlock
from transfer._extent import BlockLayout, Extent
from transfer._handle import Block, Blocks, Span
from transfer._memory import HostPool

LAYOUT = BlockLayout.packed([Extent("a", (4,), "float32"), Extent("b", (16,), "uint8")])


@pytest.fixture(name="pool")
def _pool() -> HostPool:
    return HostPool(LAYOUT, 4, name="slots")


def test_a_block_describes_itself(pool: HostPool) -> None:
    block = pool.lease().handle
    assert (block.id, block.generation, block.ids, len(block)) == (0, 0, (0,), 1)
    assert block.nbytes == LAYOUT.nbytes
    assert repr(block) == "<block 0 of slots, generation 0>"


def test_blocks_are_a_sequence(pool: HostPool) -> None:
    blocks = pool.lease(3).handle
    assert len(blocks) == 3
    assert blocks.nbytes == 3 * LAYOUT.nbytes
    assert [block.id for block in blocks] == blocks.ids.tolist() == [0, 1, 2]
    assert isinstance(blocks[-1], Block)
    assert blocks[-1].id == 2
    assert blocks[1:].ids.tolist() == [1, 2]
    assert repr(blocks) == "<3 blocks of slots>"


def test_single_blocks_are_gathered(pool: HostPool) -> None:
    singles = [pool.lease().handle for _ in range(3)]
    blocks = Blocks.gather(singles[::-1])
    assert blocks.ids.tolist() == [2, 1, 0]
    assert blocks.ids.dtype == blocks.generations.dtype == np.int64
    with pytest.raises(LeaseError, match="named twice"):
        Blocks.gather([singles[0], singles[0]])
    with pytest.raises(LeaseError, match="exactly one pool are expected, found 2"):
        Blocks.gather([singles[0], HostPool(LAYOUT, 1).lease().handle])
    with pytest.raises(LeaseError, match="found 0 pools"):
        Blocks.gather([])


def test_a_tensor_is_the_memory(pool: HostPool) -> None:
    block = pool.lease().handle
    block.tensor("a").fill_(1.5)
    assert block.view()[:16] == np.full(4, 1.5, dtype=np.float32).tobytes()
    with pytest.raises(LayoutMismatch, match="no extent 'c'"):
        block.tensor("c")


def test_a_view_is_read_only_unless_it_is_to_be_written(pool: HostPool) -> None:
    block = pool.lease().handle
    assert block.view().readonly
    block.view(write=True)[:4] = b"abcd"
    assert bytes(block.view()[:4]) == b"abcd"
    assert len(block.view()) == LAYOUT.nbytes


def test_spans_lie_inside_their_block(pool: HostPool) -> None:
    block = pool.lease(2).handle[1]
    size = LAYOUT.nbytes
    assert block.span().nbytes == size
    assert block.span(8).nbytes == size - 8
    assert block.span(size).nbytes == 0
    span = block.span(4, 8)
    assert span.address == pool.address(0, 1) + 4
    assert repr(span) == "<bytes 4 to 12 of <block 1 of slots, generation 0>>"


@pytest.mark.parametrize(
    ("offset", "nbytes", "plane"),
    [(0, 33, 0), (33, None, 0), (-1, 4, 0), (4, -1, 0), (0, None, 1), (0, 1, 1), (0, None, -1)],
)
def test_a_span_past_its_block_is_refused(
    pool: HostPool, offset: int, nbytes: int | None, plane: int
) -> None:
    with pytest.raises(SpanError, match=r"of a block"):
        pool.lease().handle.span(offset, nbytes, plane=plane)


def test_a_span_of_a_plane_that_is_not_there(pool: HostPool) -> None:
    with pytest.raises(SpanError, match="plane 2 of a block with 1"):
        Span(pool.lease().handle, 2, 0, 0)


def test_a_lease_gives_its_handle_until_it_ends(pool: HostPool) -> None:
    lease = pool.lease(2)
    assert not lease.released
    assert repr(lease) == "<lease of <2 blocks of slots>>"
    with lease as blocks:
        assert blocks is lease.handle
        assert pool.counts().leased == 2
    assert pool.counts().leased == 0
    assert pool.counts().leased == 0
    assert repr(lease) == "<released lease of <2 blocks of slots>>"
    with pytest.raises(StaleBlock, match="used after release"):
        _ = lease.handle
    with pytest.raises(StaleBlock):
        lease.__enter__()


def test_release_inside_the_context_is_legal(pool: HostPool) -> None:
    with pool.lease() as block:
        pass
    with (lease := pool.lease()) as block:
        lease.release()
        with pytest.raises(StaleBlock):
            block.tensor("a")
    assert pool.counts().free == 4
    assert pool.double_releases == 0


def test_a_second_release_is_refused_counted_and_changes_nothing(pool: HostPool) -> None:
    # case 5, double release. The second must not put the page on the free list again.
    for lease in (pool.lease(), pool.lease(2)):
        before = pool.counts().free
        lease.release()
        after = pool.counts()
        free = list(pool.book.free)
        assert after.free == before + len(lease._handle)
        for _ in range(2):
            with pytest.raises(LeaseError, match="released a second time"):
                lease.release()
        assert pool.counts() == after
        assert pool.book.free == free
    assert pool.double_releases == 4
    ids = [pool.lease().handle.id for _ in range(4)]
    assert sorted(ids) == [0, 1, 2, 3]


def test_a_stale_handle_is_refused_whoever_has_the_block(pool: HostPool) -> None:
    with pool.lease() as old:
        pass
    with pool.lease() as new:
        assert new.id == old.id
        assert new.generation == old.generation + 1
        for use in (lambda: old.tensor("a"), old.view, lambda: old.view(write=True)):
            with pytest.raises(StaleBlock, match="generation 1"):
                use()
        new.tensor("a")
