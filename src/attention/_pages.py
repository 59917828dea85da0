"""Page tables: which pages a batch of requests reads, checked before any kernel sees them.

The form is the compressed-row one of FlashInfer: request i has the pages
indices[indptr[i]:indptr[i + 1]] and last_page_len[i] tokens in the last of them. A request without
pages has length 0 and last_page_len 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Final, TypeAlias, final

import numpy as np

from attention._errors import PageTableError
from transfer._errors import LeaseError
from transfer._handle import Block, Blocks, Lease

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from transfer._memory import Pool

    Ints: TypeAlias = npt.NDArray[np.int32]
    Longs: TypeAlias = npt.NDArray[np.int64]

Pages: TypeAlias = "Blocks | Block | Lease[Blocks] | Lease[Block] | Sequence[Block | Lease[Block]]"
"""The pages of one request, in the order of its tokens."""

INT32_MAX: Final = 2**31 - 1
TOKENS_MAX: Final = 2**32 - 1
"""FlashInfer counts a batch's slots in 32 bits."""
REQUEST_TOKENS_MAX: Final = 2**30
"""Kernels count a request's tokens in 32 bits with a sign, and round them up to whole splits."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of a batch of requests, in host memory. Make one with `of` or `raw`.

    Attributes:
        indptr: int32 [batch + 1].
        indices: int32 [pages of all requests], slots of the pool.
        last_page_len: int32 [batch].
        page_size: tokens of a page.
        names: what messages call each request.
        blocks: the pages without repetition, to be held while a kernel reads them; None when the
            table was made from bare numbers and someone else answers for the pages.
    """

    indptr: Ints
    indices: Ints
    last_page_len: Ints
    page_size: int
    names: tuple[str, ...]
    blocks: Blocks | None = None

    @classmethod
    def of(
        cls,
        pages: Sequence[Pages],
        lengths: Sequence[int],
        *,
        pool: Pool,
        page_size: int,
        names: Sequence[str] | None = None,
    ) -> PageTable:
        """Build the table of a batch from the blocks that its requests lease.

        Args:
            pages: for each request, its blocks of `pool`; several requests may share blocks.
            lengths: tokens of each request, all of which lie in its pages.
            pool: the cache's pool: a block of any other is refused, since its number means nothing
                here.
            page_size: tokens of a page.
            names: what to call each request in messages; its number when None.

        Raises:
            PageTableError: names the request: a stale or foreign block, one that is being written,
                too few or too many pages for the length, a duplicate.
        """
        titles = _titles(names, len(pages))
        if len(lengths) != len(pages):
            raise PageTableError(f"{len(pages)} requests, {len(lengths)} lengths")
        if page_size < 1:
            raise PageTableError(f"pages of {page_size} tokens")
        indptr = np.zeros(len(pages) + 1, dtype=np.int64)
        last = np.zeros(len(pages), dtype=np.int64)
        members: list[Blocks] = []
        for row, (title, mine, length) in enumerate(
            zip(titles, pages, map(index, lengths), strict=True)
        ):
            blocks = _blocks(title, mine, pool)
            count = 0 if blocks is None else len(blocks)
            if length < 0 or count != -(-length // page_size):
                raise PageTableError(f"{title}: {length} tokens in {count} pages of {page_size}")
            indptr[row + 1] = indptr[row] + count
            last[row] = length - (count - 1) * page_size if count else 0
            members += [] if blocks is None else [blocks]
        ids = np.concatenate([b.ids for b in members]) if members else np.zeros(0, dtype=np.int64)
        held = _union(pool, members)
        geometry = (page_size, pool.blocks)
        return cls._checked((indptr, ids, last), geometry, titles, held)

    @classmethod
    def raw(
        cls,
        indptr: Sequence[int] | npt.NDArray[np.integer],
        indices: Sequence[int] | npt.NDArray[np.integer],
        last_page_len: Sequence[int] | npt.NDArray[np.integer],
        *,
        page_size: int,
        pages: int,
        names: Sequence[str] | None = None,
    ) -> PageTable:
        """Take over a host program's own table; it answers for the pages until the kernel is done.

        Args:
            indptr: batch + 1 numbers.
            indices: slots of the pool.
            last_page_len: batch numbers, 0 for a request without pages.
            page_size: tokens of a page.
            pages: pages of the pool.
            names: what to call each request in messages; its number when None.

        Raises:
            PageTableError: names the request.
        """
        lasts = _whole("last_page_len is", last_page_len)
        titles = _titles(names, len(lasts))
        starts = _whole("indptr is", indptr)
        ids = _whole("indices are", indices)
        if page_size < 1:
            raise PageTableError(f"pages of {page_size} tokens")
        return cls._checked((starts, ids, lasts), (page_size, pages), titles, None)

    @classmethod
    def _checked(
        cls,
        rows: tuple[Longs, Longs, Longs],
        geometry: tuple[int, int],
        names: tuple[str, ...],
        blocks: Blocks | None,
    ) -> PageTable:
        indptr, indices, last = rows
        page_size, pages = geometry
        _check_indptr(indptr, indices, names)
        _check_last(np.diff(indptr), last, page_size, names)
        _check_ids(indptr, indices, pages, names)
        if len(indices) * page_size > TOKENS_MAX or len(indices) > INT32_MAX:
            raise PageTableError(f"{len(indices)} pages of {page_size} in one batch")
        long = np.flatnonzero((np.diff(indptr) - 1) * page_size + last > REQUEST_TOKENS_MAX)
        if len(long):
            tokens = int(np.diff(indptr)[long[0]] - 1) * page_size + int(last[long[0]])
            raise PageTableError(f"{names[long[0]]}: {tokens} tokens, at most {REQUEST_TOKENS_MAX}")
        narrow = [part.astype(np.int32) for part in (indptr, indices, last)]
        return cls(narrow[0], narrow[1], narrow[2], page_size, names, blocks)

    def check(self, pool: Pool, page_size: int, *, leased: bool = False) -> None:
        """Refuse to be used on another cache than this one's.

        Args:
            pool: the cache's.
            page_size: the cache's.
            leased: refuse pages whose lease has ended, too.

        Raises:
            PageTableError: other pages, or some that the pool does not have.
        """
        if self.page_size != page_size:
            raise PageTableError(f"pages of {self.page_size}, the cache has {page_size}")
        if len(self.indices) and int(self.indices.max()) >= pool.blocks:
            raise PageTableError(f"page {self.indices.max()} of a pool of {pool.blocks}")
        if self.blocks is not None and self.blocks.pool is not pool:
            raise PageTableError(f"{self.blocks!r} is not of this cache's {pool.name}")
        try:
            if leased and self.blocks is not None:
                pool.book.check(self.blocks)
        except LeaseError as error:
            raise PageTableError(str(error)) from error

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.last_page_len)

    @property
    def counts(self) -> Longs:
        """Pages of each request, int64."""
        starts = self.indptr.astype(np.int64)
        return starts[1:] - starts[:-1]

    @property
    def lengths(self) -> Longs:
        """Tokens of each request, int64."""
        counts = self.counts
        full = np.maximum(counts - 1, 0) * np.int64(self.page_size)
        return full + self.last_page_len.astype(np.int64)

    def pages_of(self, request: int) -> Ints:
        """Page slots of one request, in the order of its tokens."""
        return self.indices[self.indptr[request] : self.indptr[request + 1]]

    def slots(self, counts: Sequence[int] | npt.NDArray[np.integer]) -> Longs:
        """Where the last counts[i] tokens of each request lie: page * page_size + place, int64.

        Raises:
            PageTableError: more new tokens than a request has, or two requests share a page that
                would be written.
        """
        if len(counts) != self.batch:
            raise PageTableError(f"{self.batch} requests, new tokens {list(counts)}")
        parts = []
        for request, count in enumerate(np.asarray(counts, dtype=np.int64).tolist()):
            length = int(self.lengths[request])
            if not 0 <= count <= length:
                raise PageTableError(
                    f"{self.names[request]}: {count} new tokens, length {length} with them"
                )
            token = np.arange(length - count, length, dtype=np.int64)
            page = self.pages_of(request)[token // self.page_size].astype(np.int64)
            parts.append(page * self.page_size + token % self.page_size)
        slots = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        self._check_unshared(slots // self.page_size, np.repeat(np.arange(self.batch), counts))
        return slots

    def _check_unshared(self, pages: Longs, owners: Longs) -> None:
        """A page that is written belongs to one request of the batch only."""
        written = dict(zip(pages.tolist(), owners.tolist(), strict=True))
        readers = np.repeat(np.arange(self.batch), self.counts)
        for page, reader in zip(self.indices.tolist(), readers.tolist(), strict=True):
            writer = written.get(page, reader)
            if writer != reader:
                raise PageTableError(
                    f"{self.names[writer]} writes page {page}, which {self.names[reader]} reads"
                )


def _whole(what: str, numbers: Sequence[int] | npt.NDArray[np.integer]) -> Longs:
    """Numbers as int64; refused where that would change them."""
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise PageTableError(f"{what} {found.dtype}, expected whole numbers of at most 64 bits")
    return found.astype(np.int64)


def _titles(names: Sequence[str] | None, batch: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"request {number}" for number in range(batch))
    if len(names) != batch:
        raise PageTableError(f"{batch} requests, {len(names)} names")
    return tuple(f"request {number} ({name})" for number, name in enumerate(names))


def _blocks(title: str, pages: Pages, pool: Pool) -> Blocks | None:
    """One request's blocks as a handle, refused when the pool would refuse them."""
    try:
        handle = _handle(pages)
        if handle is None:
            return None
        if handle.pool is not pool:
            raise PageTableError(f"{title}: {handle!r} is not of the cache's {pool.name}")
        pool.book.check(handle)
    except LeaseError as error:
        raise PageTableError(f"{title}: {error}") from error
    for hold in pool.book.conflicts(handle, writing=False):
        raise PageTableError(f"{title}: {handle!r} is still being written by {hold.owner!r}")
    return handle


def _handle(pages: Pages) -> Blocks | None:
    if isinstance(pages, Lease):
        return _handle(pages.handle)
    if isinstance(pages, Block):
        return Blocks.gather([pages])
    if isinstance(pages, Blocks):
        return pages if len(pages) else None
    singles = [page.handle if isinstance(page, Lease) else page for page in pages]
    return Blocks.gather(singles) if singles else None


def _union(pool: Pool, members: list[Blocks]) -> Blocks:
    """All blocks once each, in one handle: one hold for the whole batch."""
    if not members:
        return Blocks(pool, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    ids, first = np.unique(np.concatenate([b.ids for b in members]), return_index=True)
    return Blocks(pool, ids, np.concatenate([b.generations for b in members])[first])


def _check_indptr(indptr: Longs, indices: Longs, names: tuple[str, ...]) -> None:
    if indptr.shape != (len(names) + 1,) or indices.ndim != 1:
        raise PageTableError(f"indptr has shape {indptr.shape} for {len(names)} requests")
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise PageTableError(
            f"indptr runs from {indptr[0]} to {indptr[-1]}, there are {len(indices)} indices"
        )
    falling = np.flatnonzero(np.diff(indptr) < 0)
    if len(falling):
        row = int(falling[0])
        raise PageTableError(f"{names[row]}: indptr falls from {indptr[row]} to {indptr[row + 1]}")


def _check_last(
    counts: Longs,
    last: Longs,
    page_size: int,
    names: tuple[str, ...],
) -> None:
    if last.ndim != 1:
        raise PageTableError(f"last_page_len has shape {last.shape}")
    low = np.where(counts > 0, 1, 0)
    high = np.where(counts > 0, page_size, 0)
    bad = np.flatnonzero((last < low) | (last > high))
    if len(bad):
        row = int(bad[0])
        raise PageTableError(
            f"{names[row]}: {last[row]} tokens in the last of {counts[row]} pages of {page_size}"
        )


def _check_ids(
    indptr: Longs,
    indices: Longs,
    pages: int,
    names: tuple[str, ...],
) -> None:
    owners = np.repeat(np.arange(len(names)), np.diff(indptr))
    outside = np.flatnonzero((indices < 0) | (indices >= pages))
    if len(outside):
        at = int(outside[0])
        raise PageTableError(f"{names[owners[at]]}: page {indices[at]} of a pool of {pages}")
    order = np.lexsort((indices, owners))
    same = (np.diff(indices[order]) == 0) & (np.diff(owners[order]) == 0)
    if same.any():
        at = int(order[np.flatnonzero(same)[0]])
        raise PageTableError(f"{names[owners[at]]}: page {indices[at]} is there twice")
