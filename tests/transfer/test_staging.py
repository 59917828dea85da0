"""Tiles, pieces and staging areas against plain counting."""

import numpy as np
import pytest
import torch
from tests.transfer.cuda_rig import PAGE, Rig, each
from tests.transfer.gpu_kit import FakeDriver, pinned_pool

from transfer._errors import BadWork
from transfer._pieces import Pieces, SlotImage, merge
from transfer._staging import LARGE, SMALL, CopyPipeline, Pipeline, Tiles
from transfer._work import Copy


def words(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(
    ("at", "nbytes", "word"),
    [(0, 64, 8), (16, 48, 8), (8, 64, 4), (4, 60, 4), (2, 64, 1), (0, 63, 1), (0, 40, 4)],
)
def test_words_are_as_wide_as_everything_allows(at: int, nbytes: int, word: int) -> None:
    ends = (words(1024 + at, 4096), words(512, 512))
    assert Tiles.of(ends, (words(0, 64), words(256, 256)), words(nbytes, 64)).word == word


@pytest.mark.parametrize("nbytes", [16, SMALL - 16, SMALL, SMALL + 16, LARGE // 2, 3 * LARGE + 32])
def test_tiles_cover_every_byte_once(nbytes: int) -> None:
    tiles = Tiles.of(
        (words(1 << 20), words(1 << 17)), (words(1 << 22), words(1 << 18)), words(nbytes)
    )
    assert tiles.large == (nbytes >= LARGE // 2)
    most = LARGE if tiles.large else SMALL
    end = 0
    for src, src_step, dst, dst_step, length in tiles.rows.tolist():
        assert (src - (1 << 20), dst - (1 << 22)) == (end, end)
        assert (src_step, dst_step) == (1 << 17, 1 << 18)
        assert 0 < length * 8 <= most
        end += length * 8
    assert end == nbytes


def test_pieces_that_go_on_are_joined() -> None:
    dst, src, nbytes = words(0, 10, 20, 40), words(100, 110, 121, 141), words(10, 10, 20, 5)
    joined = merge(Pieces(dst, src, nbytes))
    assert [column.tolist() for column in joined] == [[0, 20], [100, 121], [20, 25]]
    apart = merge(Pieces(dst, src, nbytes), words(0, 1, 1, 1))
    assert apart.nbytes.tolist() == [10, 10, 25]
    one = Pieces(words(0), words(1), words(2))
    assert merge(one) == one


@pytest.mark.parametrize("ids", [[3], [0, 1, 2, 3], [3, 2, 1, 0], [5, 1, 9], [0, 2, 1, 3], [1, 3]])
@pytest.mark.parametrize("outward", [True, False])
@pytest.mark.parametrize("names", [None, ("key",), ("value",)])
@pytest.mark.parametrize("registration", [64 << 10, 1 << 30])
def test_pieces_of_slots_are_their_bytes(
    ids: list[int], outward: bool, names: tuple[str, ...] | None, registration: int
) -> None:
    """Against the same, run by run and block by block; none crosses a registration."""
    host = pinned_pool(PAGE, 16, FakeDriver(manual=True), registration=registration)
    runs = [extent for extent in PAGE.extents if names is None or extent.name in names]
    offset = words(*(extent.offset for extent in runs))
    image = SlotImage(host, offset, words(*(extent.nbytes for extent in runs)))
    staging = 1 << 40
    pieces = image.pieces(words(*ids), staging, image.step, outward=outward)
    moved: dict[int, int] = {}
    for dst, src, nbytes in zip(*(column.tolist() for column in pieces), strict=True):
        slot, area = (dst, src) if outward else (src, dst)
        base = slot - host.address(0, 0)
        assert base // registration == (base + nbytes - 1) // registration
        moved |= {slot + at: area + at for at in range(0, nbytes, 16)}
    wanted: dict[int, int] = {}
    low = int(offset.min())
    for place, number in enumerate(ids):
        for extent in runs:
            slot = host.address(0, number) + extent.offset
            area = staging + place * image.step + extent.offset - low
            wanted |= {slot + at: area + at for at in range(0, extent.nbytes, 16)}
    assert moved == wanted
    mean = sum(pieces.nbytes.tolist()) / len(pieces.nbytes)
    if registration > 64 << 10 and ids != [3, 2, 1, 0]:
        assert image.fragment(words(*ids)) == pytest.approx(mean)


def test_a_copy_knows_its_size_and_its_pieces() -> None:
    rig = Rig()
    work = rig.copy(5)
    running = rig.device._running
    assert running is not None
    pipe, _ = rig.device._choice.of_copy(work, running)
    assert isinstance(pipe, CopyPipeline)
    assert pipe.nbytes == work.nbytes == 5 * PAGE.nbytes
    assert pipe.page_fragment == PAGE.extents[0].nbytes
    assert pipe.host_fragment == 5 * PAGE.nbytes
    single = sorted(pipe.single_pieces())
    joined = pipe.fragments(0, 5)
    assert len(single) == 40
    assert sum(size for _, _, size in single) == int(joined.nbytes.sum()) == work.nbytes
    staged = pipe.upload(1, 3, staged=True)
    assert staged[pipe.fixed_words :].tolist() == [1, 2, 3, 1, 2, 3]
    assert len(pipe.programs()) == 1
    rig.close()


def test_a_part_of_the_names_only() -> None:
    rig = Rig()
    whole = rig.copy(6)
    rig.fill(rig.leased(rig.host)[:6], 99)
    # As integers: random bits are sometimes NaN, which equals nothing.
    before = [block.tensor("value", 1).view(torch.int16).clone() for block in each(whole.dst)]
    rig.post(Copy(whole.src, whole.dst, names=("key",)))
    rig.ends(1)
    for src, dst, value in zip(each(whole.src), each(whole.dst), before, strict=True):
        keys = [side.tensor("key", 3).view(torch.int16) for side in (src, dst)]
        assert torch.equal(*keys)
        assert torch.equal(dst.tensor("value", 1).view(torch.int16), value)
    rig.close()


def test_other_devices_cannot_run_a_pipeline() -> None:
    with pytest.raises(BadWork, match="runs on a CudaDevice only"):
        Pipeline()()
