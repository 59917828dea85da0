"""Page tables: what is refused before any kernel sees it, and by which request's name."""

import numpy as np
import pytest
import torch

from attention._errors import PageTableError
from attention._pages import PageTable
from transfer._book import Hold
from transfer._extent import BlockLayout
from transfer._handle import Blocks
from transfer._memory import HostPool


def pool(blocks: int = 8, name: str = "pages") -> HostPool:
    return HostPool(BlockLayout.raw(64), blocks, name=name)


def raw(indptr: list[int], indices: list[int], last: list[int], page_size: int = 4) -> PageTable:
    return PageTable.raw(indptr, indices, last, page_size=page_size, pages=8)


def test_lengths_follow_from_pages_and_the_last_page() -> None:
    table = raw([0, 2, 2, 3], [5, 1, 7], [3, 0, 4])
    assert table.lengths.tolist() == [7, 0, 4]
    assert table.counts.tolist() == [2, 0, 1]
    assert table.pages_of(0).tolist() == [5, 1]
    assert all(part.dtype == np.int32 for part in (table.indptr, table.indices))
    assert torch.from_numpy(table.indices).dtype == torch.int32


# case 62, every broken number is refused before launch, with the request named
@pytest.mark.parametrize(
    ("indptr", "indices", "last", "message"),
    [
        ([0, 1, 2], [0, 1], [4, 0], "request 1: 0 tokens in the last of 1 pages"),
        ([0, 1, 2], [0, 1], [4, 5], "request 1: 5 tokens in the last"),
        ([0, 1, 2], [0, 1], [-1, 4], "request 0: -1 tokens in the last"),
        ([0, 0, 1], [1], [2, 4], "request 0: 2 tokens in the last of 0 pages"),
        ([0, 1, 2], [0, -1], [4, 4], "request 1: page -1 of a pool of 8"),
        ([0, 1, 2], [0, 8], [4, 4], "request 1: page 8 of a pool of 8"),
        ([0, 1, 3], [0, 2, 2], [4, 4], "request 1: page 2 is there twice"),
        ([0, 2, 1, 3], [0, 1, 2], [1, 1, 1], "request 1: indptr falls from 2 to 1"),
        ([1, 2], [0, 1], [1], "indptr runs from 1"),
        ([0, 1], [0, 1], [1], "indptr runs from 0 to 1, there are 2"),
        ([0, 1], [0], [1, 1], "indptr has shape"),
    ],
)
def test_broken_tables_are_refused(
    indptr: list[int], indices: list[int], last: list[int], message: str
) -> None:
    with pytest.raises(PageTableError, match=message):
        raw(indptr, indices, last)


def test_sound_twin_of_each_broken_table_is_accepted() -> None:
    assert raw([0, 1, 2], [0, 1], [4, 1]).batch == 2
    assert raw([0, 1, 3], [2, 2, 0], [4, 4]).batch == 2  # shared by two requests, not twice in one
    assert raw([0], [], []).batch == 0


def test_requests_are_called_by_their_names() -> None:
    with pytest.raises(PageTableError, match=r"request 1 \(chat-7\): page 9"):
        PageTable.raw([0, 1, 2], [0, 9], [1, 1], page_size=4, pages=8, names=["chat-6", "chat-7"])
    with pytest.raises(PageTableError, match="2 requests, 1 names"):
        PageTable.raw([0, 1, 2], [0, 1], [1, 1], page_size=4, pages=8, names=["one"])


# case 18, numbers that do not fit 32 bits are refused, never wrapped
def test_wide_numbers_do_not_wrap() -> None:
    with pytest.raises(PageTableError, match="page 4294967296"):
        raw([0, 1], [2**32], [1])
    with pytest.raises(PageTableError, match="pages of 2147483648 in one batch"):
        PageTable.raw([0, 2], [0, 1], [1], page_size=2**31, pages=2)
    far = PageTable.raw([0, 1], [2**31 - 1], [3], page_size=16, pages=2**31)
    assert far.slots([3]).tolist() == [(2**31 - 1) * 16 + place for place in range(3)]


def test_table_of_leases() -> None:
    pages = pool()
    with pages.lease(3) as mine, pages.lease() as single:
        table = PageTable.of(
            [mine, [], single, mine[:2]], [9, 0, 1, 8], pool=pages, page_size=4, names="abcd"
        )
        assert table.lengths.tolist() == [9, 0, 1, 8]
        assert table.pages_of(0).tolist() == mine.ids.tolist()
        assert table.pages_of(3).tolist() == mine.ids[:2].tolist()
        assert table.blocks is not None
        held = sorted([*mine.ids.tolist(), single.id])
        assert table.blocks.ids.tolist() == held  # each block once, however many share it
        pages.book.check(table.blocks)


def test_wrong_counts_of_pages_are_refused() -> None:
    pages = pool()
    with pages.lease(2) as mine:
        for length in (4, 9, -1):
            with pytest.raises(PageTableError, match=f"request 0: {length} tokens in 2 pages of 4"):
                PageTable.of([mine], [length], pool=pages, page_size=4)
        with pytest.raises(PageTableError, match="1 requests, 2 lengths"):
            PageTable.of([mine], [8, 8], pool=pages, page_size=4)


# case 62, a block that went to the host and back has another slot; the old handle is refused
def test_stale_and_foreign_blocks_are_refused() -> None:
    pages, host = pool(), pool(name="host slots")
    lease = pages.lease(1)
    stale = lease.handle
    lease.release()
    with pytest.raises(PageTableError, match=r"request 0 \(x\).*stale"):
        PageTable.of([stale], [4], pool=pages, page_size=4, names=["x"])
    with pytest.raises(PageTableError, match=r"request 0.*after release"):
        PageTable.of([lease], [4], pool=pages, page_size=4)
    with host.lease(1) as slot, pytest.raises(PageTableError, match="not of the cache's pages"):
        PageTable.of([slot], [4], pool=pages, page_size=4)


def test_a_page_that_is_still_being_filled_is_refused() -> None:
    pages = pool()
    with pages.lease(2) as mine:
        hold = Hold(mine[1:], "a fetch", writing=True)
        pages.book.take(hold)
        with pytest.raises(PageTableError, match=r"request 1 .*being written by 'a fetch'"):
            PageTable.of([mine[:1], mine], [4, 8], pool=pages, page_size=4, names=["a", "b"])
        pages.book.end(hold)
        assert PageTable.of([mine], [8], pool=pages, page_size=4).batch == 1
        reading = Hold(mine, "a copy out", writing=False)
        pages.book.take(reading)
        assert PageTable.of([mine], [8], pool=pages, page_size=4).batch == 1
        pages.book.end(reading)


def test_slots_of_new_tokens() -> None:
    table = raw([0, 2, 2, 3], [5, 1, 7], [3, 0, 4])
    assert table.slots([4, 0, 1]).tolist() == [5 * 4 + 3, 4, 5, 6, 7 * 4 + 3]
    with pytest.raises(PageTableError, match="request 2: 5 new tokens, length 4"):
        table.slots([0, 0, 5])


def test_a_shared_page_is_not_written() -> None:
    table = raw([0, 2, 4], [5, 1, 5, 2], [1, 1])
    assert table.slots([1, 1]).tolist() == [4, 8]
    with pytest.raises(PageTableError, match="request 0 writes page 5, which request 1 reads"):
        table.slots([2, 1])


def test_empty_batches_of_leases() -> None:
    pages = pool()
    table = PageTable.of([], [], pool=pages, page_size=4)
    assert table.batch == 0
    assert isinstance(table.blocks, Blocks)
    assert len(table.blocks) == 0


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "message"),
    [
        ([0, 1], [1.7], [3], "indices are float64"),
        ([0, 1.5], [1], [3], "indptr is float64"),
        ([0, 1], [1], [3.5], "last_page_len is float64"),
        ([0, 1], [1], [[3]], "last_page_len has shape"),
        ([0, 1], [2**64], [3], "indices are object"),
        ([0, 1], np.array([2**64 - 1], dtype=np.uint64), [3], "page"),
        ([0, 1], [True], [3], "indices are bool"),
    ],
)
def test_numbers_that_are_no_page_numbers_are_refused(
    indptr: list[int], indices: list[int], last: list[int], message: str
) -> None:
    with pytest.raises(PageTableError, match=message):
        raw(indptr, indices, last)


@pytest.mark.parametrize("page_size", [0, -4])
def test_pages_have_tokens(page_size: int) -> None:
    pages = pool()
    with pages.lease(1) as mine, pytest.raises(PageTableError, match=f"pages of {page_size}"):
        PageTable.of([mine], [3], pool=pages, page_size=page_size)
    with pytest.raises(PageTableError, match=f"pages of {page_size}"):
        raw([0], [], [], page_size=page_size)


def test_half_a_token_is_no_length() -> None:
    pages = pool()
    with pages.lease(2) as mine, pytest.raises(TypeError):
        PageTable.of([mine], [4.5], pool=pages, page_size=4)  # type: ignore[list-item]


@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1, 1]])
def test_every_request_says_how_many_tokens_are_new(counts: list[int]) -> None:
    table = raw([0, 1, 2, 3], [0, 1, 2], [3, 3, 3])
    with pytest.raises(
        PageTableError, match=rf"3 requests, new tokens \[{', '.join('1' * len(counts))}\]"
    ):
        table.slots(counts)


# case 18, kernels count a request's tokens in 32 bits
def test_a_request_longer_than_the_kernels_count_is_refused() -> None:
    size = 2**30
    table = PageTable.raw([0, 1, 2], [0, 1], [size, size], page_size=size, pages=8)
    assert table.lengths.tolist() == [size, size]
    with pytest.raises(PageTableError, match="request 1: 1073741825 tokens"):
        PageTable.raw([0, 1, 3], [0, 1, 2], [1, 1], page_size=size, pages=8)
