"""Byte ranges for a DMA engine: contiguous on both sides, as few as there can be.

Slots that follow one another are one range; it is told in plain numbers, since a chunk of them is
posted every few dozen microseconds. No range crosses from one registration of page-locked memory
into the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

if TYPE_CHECKING:
    from transfer._extent import Int64Array
    from transfer._memory import Pool


class Pieces(NamedTuple):
    """Byte ranges for the DMA engine; int64 arrays of equal length."""

    dst: Int64Array
    src: Int64Array
    nbytes: Int64Array


class Rows(NamedTuple):
    """Equal byte ranges at even distances, for one strided copy."""

    dst: int
    dst_step: int
    src: int
    src_step: int
    nbytes: int
    number: int


class Moves(NamedTuple):
    """What is to be moved for some blocks.

    Attributes:
        few: destination, source and bytes of ranges that are told in plain numbers.
        rows: strided ranges.
        many: all others.
    """

    few: tuple[tuple[int, int, int], ...] = ()
    rows: tuple[Rows, ...] = ()
    many: Pieces | None = None


def consecutive(ids: Int64Array) -> int | None:
    """The first of some ids, if each of the others is one more than the one before."""
    count = len(ids)
    if not count or int(ids[-1]) - int(ids[0]) != count - 1:
        return None
    if count > 2 and not bool((ids[1:] > ids[:-1]).all()):
        return None
    return int(ids[0])


def joined(first: Pieces, second: Pieces) -> Pieces:
    """Some pieces and then others."""
    return Pieces(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def merge(pieces: Pieces, cut: Int64Array | None = None) -> Pieces:
    """Join pieces that continue each other on both sides.

    Args:
        pieces: in order.
        cut: a number for each; pieces with different ones are not joined.
    """
    dst, src, nbytes = pieces
    if len(nbytes) < 2:
        return pieces
    joined = (dst[:-1] + nbytes[:-1] == dst[1:]) & (src[:-1] + nbytes[:-1] == src[1:])
    if cut is not None:
        joined &= cut[:-1] == cut[1:]
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return Pieces(dst[first], src[first], np.add.reduceat(nbytes, first))


@final
class SlotImage:
    """How some byte runs of a slot lie in a staging area: as in the slot, less what lies before.

    Args:
        host: pool of the slots.
        offset: where each run starts in its slot.
        nbytes: length of each run.

    Attributes:
        place: where each run starts in the staging area of its block.
        step: bytes of a block in the staging area.
        segments: how many runs of bytes a slot has.
        solid: whether slots that follow one another are one run of bytes, in staging too.
    """

    def __init__(self, host: Pool, offset: Int64Array, nbytes: Int64Array) -> None:
        low = int(offset.min()) // 16 * 16 if len(offset) else 0
        end = int((offset + nbytes).max(initial=low))
        self.step = max(16, -(-(end - low) // 16) * 16)
        self.place: Int64Array = offset - low
        order = np.argsort(offset, kind="stable")
        segments = merge(Pieces(offset[order], offset[order], nbytes[order]))
        self._at = segments.dst
        self._place = segments.dst - low
        self._nbytes = segments.nbytes
        plane = host.storage.planes[0]
        self._host_at, self._host_step = plane.address, plane.stride
        self._cut = int(getattr(host.storage, "registration_bytes", 0))
        self.segments = len(segments.nbytes)
        self._bytes = int(nbytes.sum())
        self.solid = self.segments == 1 and self._bytes == self._host_step == self.step

    def fragment(self, ids: Int64Array) -> float:
        """Mean bytes of a piece of these slots, registrations left aside."""
        count = len(ids)
        pieces = self.segments * count
        if self.solid and count > 1:
            pieces -= int(np.count_nonzero(ids[1:] - ids[:-1] == 1))
        return self._bytes * count / max(pieces, 1)

    def moves(
        self, ids: Int64Array, start: int | None, staging: int, *, outward: bool, pitched: bool
    ) -> Moves:
        """As `pieces`, in fewer numbers where there are fewer.

        Args:
            ids: of the slots.
            start: the first of them, if they are `consecutive`.
            staging: address of the area, which has a block every `step` bytes.
            outward: from the area to the slots.
            pitched: whether strided copies may be asked for.
        """
        count = len(ids)
        if start is not None and (self.solid or (pitched and self.segments == 1)):
            at = start * self._host_step
            end = at + count * self._host_step
            if not self._cut or at // self._cut == (end - 1) // self._cut:
                return self._whole(self._host_at + at, staging, count, outward=outward)
        return Moves(many=self.pieces(ids, staging, self.step, outward=outward))

    def _whole(self, slots: int, staging: int, count: int, *, outward: bool) -> Moves:
        """All of some consecutive slots."""
        if self.solid:
            nbytes = count * self.step
            return Moves(((slots, staging, nbytes) if outward else (staging, slots, nbytes),))
        host = (slots + int(self._at[0]), self._host_step)
        area = (staging + int(self._place[0]), self.step)
        ends = (*host, *area) if outward else (*area, *host)
        return Moves(rows=(Rows(*ends, self._bytes, count),))

    def pieces(self, ids: Int64Array, staging: int, step: int, *, outward: bool) -> Pieces:
        """Slots of some ids against a staging area with a block every `step` bytes."""
        host = (self._host_at + ids[:, None] * self._host_step + self._at).ravel()
        local = np.arange(len(ids), dtype=np.int64)[:, None] * step
        area = (staging + local + self._place).ravel()
        nbytes = np.broadcast_to(self._nbytes, (len(ids), len(self._nbytes))).ravel()
        pieces = Pieces(host, area, nbytes) if outward else Pieces(area, host, nbytes)
        if self.segments == 1 and self._bytes < self._host_step:
            return pieces  # the rest of each slot lies between: none goes on
        return merge(pieces, self.registration(host))

    def registration(self, host: Int64Array) -> Int64Array | None:
        """Which registration each host address is in: one DMA may not cross into the next."""
        return (host - self._host_at) // self._cut if self._cut else None
