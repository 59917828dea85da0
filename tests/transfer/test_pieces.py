"""Ranges in few numbers say the same as run by run."""

import numpy as np
import pytest
from tests.transfer.cuda_rig import PAGE
from tests.transfer.gpu_kit import FakeDriver, pinned_pool

from transfer._extent import BlockLayout, Extent
from transfer._pieces import Moves, Pieces, SlotImage, consecutive, joined

PADDED = BlockLayout((Extent("bytes", (40,), "uint8"),), (64,))
"""A slot whose last bytes belong to nothing."""


def words(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def ranges(moves: Moves) -> set[tuple[int, int]]:
    """(destination, source) of every byte."""
    pieces = list(moves.few)
    for rows in moves.rows:
        for row in range(rows.number):
            at = (rows.dst + row * rows.dst_step, rows.src + row * rows.src_step, rows.nbytes)
            pieces.append(at)
    if moves.many is not None:
        pieces += zip(*(column.tolist() for column in moves.many), strict=True)
    return {(dst + at, src + at) for dst, src, nbytes in pieces for at in range(nbytes)}


@pytest.mark.parametrize(
    ("ids", "first"),
    [
        ([4], 4),
        ([4, 5], 4),
        ([4, 5, 6], 4),
        ([], None),
        ([4, 6], None),
        ([4, 7, 5, 7], None),
        ([6, 5, 4], None),
        ([4, 6, 5, 7], None),
    ],
)
def test_ids_that_follow_one_another(ids: list[int], first: int | None) -> None:
    assert consecutive(words(*ids)) == first


@pytest.mark.parametrize("layout", [PAGE, PADDED], ids=["solid", "padded"])
@pytest.mark.parametrize("ids", [[2, 3, 4, 5], [3], [5, 2, 9], [0, 1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("outward", [True, False])
@pytest.mark.parametrize("pitched", [True, False])
def test_moves_are_the_pieces(
    layout: BlockLayout, ids: list[int], outward: bool, pitched: bool
) -> None:
    registration = 4 * layout.nbytes
    host = pinned_pool(layout, 16, FakeDriver(manual=True), registration=registration)
    extents = layout.extents
    image = SlotImage(
        host, words(*(e.offset for e in extents)), words(*(e.nbytes for e in extents))
    )
    staging = 1 << 40
    given = words(*ids)
    start = consecutive(given)
    moves = image.moves(given, start, staging, outward=outward, pitched=pitched)
    plain = image.pieces(given, staging, image.step, outward=outward)
    assert ranges(moves) == ranges(Moves(many=plain))
    cut = int(getattr(host.storage, "registration_bytes", 0))
    whole = (
        start is not None
        and start * layout.nbytes // cut == ((start + len(ids)) * layout.nbytes - 1) // cut
    )
    assert len(moves.few) == (whole and layout is PAGE)
    assert len(moves.rows) == (whole and layout is PADDED and pitched)
    assert (moves.many is None) == bool(moves.few or moves.rows)


def test_some_pieces_and_then_others() -> None:
    both = joined(Pieces(words(1), words(2), words(3)), Pieces(words(4), words(5), words(6)))
    assert [column.tolist() for column in both] == [[1, 4], [2, 5], [3, 6]]
