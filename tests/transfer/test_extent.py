"""Layouts of blocks, and the byte runs between them, against a model that copies by element."""

import itertools
import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer._errors import LayoutMismatch, SpanError
from transfer._extent import (
    DTYPES,
    BlockLayout,
    Extent,
    HasBlockLayout,
    copy_runs,
    overlapping,
    row_major,
)


def elements(extent: Extent) -> list[int]:
    """First byte, in its plane, of every element in row-major order: the model."""
    return [
        extent.offset
        + extent.itemsize * sum(i * s for i, s in zip(at, extent.strides, strict=True))
        for at in itertools.product(*map(range, extent.shape))
    ]


def touched(extent: Extent) -> set[tuple[int, int]]:
    """Every (plane, byte) of an extent's payload."""
    return {
        (extent.plane, start + byte)
        for start in elements(extent)
        for byte in range(extent.itemsize)
    }


def model(
    src: BlockLayout, dst: BlockLayout, names: set[str]
) -> dict[tuple[int, int], tuple[int, int]]:
    """Destination (plane, byte) to source (plane, byte), element by element."""
    found = {}
    for there in dst.extents:
        if there.name not in names:
            continue
        here = src.extent(there.name, there.layer)
        for a, b in zip(elements(here), elements(there), strict=True):
            for byte in range(here.itemsize):
                found[there.plane, b + byte] = (here.plane, a + byte)
    return found


def carried(
    src: BlockLayout, dst: BlockLayout, names: tuple[str, ...] | None
) -> dict[tuple[int, int], tuple[int, int]]:
    """The same from the runs; a byte that is written twice fails."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    runs = copy_runs(src, dst, names)
    assert runs.total == int(runs.nbytes.sum())
    for sp, so, dp, do, nbytes in runs.rows:
        for byte in range(nbytes):
            assert (dp, do + byte) not in found
            found[dp, do + byte] = (sp, so + byte)
    columns = (runs.src_plane, runs.src_offset, runs.dst_plane, runs.dst_offset, runs.nbytes)
    assert all(column.dtype == np.int64 for column in columns)
    assert runs.rows == tuple(zip(*(column.tolist() for column in columns), strict=True))
    return found


def strided(shape: tuple[int, ...], order: list[int], gaps: list[int]) -> tuple[int, ...]:
    """Strides for axes in any order of nesting, each with a gap of some elements."""
    strides = [0] * len(shape)
    reach = 1
    for axis, gap in zip(order, gaps, strict=True):
        strides[axis] = reach + gap
        reach += strides[axis] * max(shape[axis] - 1, 0)
    return tuple(strides)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[BlockLayout, BlockLayout]:
    """Two layouts of the same tensors, each with strides, planes and places of its own."""
    what = []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        dtype = draw(st.sampled_from(["uint8", "float16", "float32"]))
        what.append((f"t{number % 2}", number, shape, dtype))
    return _layout(draw, what), _layout(draw, what)


def _layout(draw: st.DrawFn, what: list[tuple[str, int, tuple[int, ...], str]]) -> BlockLayout:
    planes = draw(st.integers(1, 2))
    ends = [0] * planes
    extents = []
    for name, layer, shape, dtype in draw(st.permutations(what)):
        order = list(draw(st.permutations(range(len(shape)))))
        gaps = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
        plane = draw(st.integers(0, planes - 1))
        offset = ends[plane] + draw(st.integers(0, 3))
        extent = Extent(
            name,
            shape,
            dtype,
            offset=offset,
            layer=layer,
            plane=plane,
            strides=strided(shape, order, gaps),
        )
        ends[plane] = offset + extent.span
        extents.append(extent)
    return BlockLayout(tuple(extents), tuple(end + draw(st.integers(0, 2)) for end in ends))


@given(pairs())
def test_runs_carry_exactly_the_elements(layouts: tuple[BlockLayout, BlockLayout]) -> None:
    src, dst = layouts
    names = {extent.name for extent in dst.extents}
    assert carried(src, dst, None) == model(src, dst, names)


@given(pairs(), st.sampled_from(["t0", "t1"]))
def test_runs_of_some_names_carry_these_only(
    layouts: tuple[BlockLayout, BlockLayout], name: str
) -> None:
    src, dst = layouts
    if any(extent.name == name for extent in dst.extents):
        assert carried(src, dst, (name,)) == model(src, dst, {name})
    else:
        with pytest.raises(LayoutMismatch, match="asked for"):
            copy_runs(src, dst, (name,))


@given(pairs())
def test_padding_and_neighbours_are_in_no_run(layouts: tuple[BlockLayout, BlockLayout]) -> None:
    src, dst = layouts
    payload = set().union(*map(touched, dst.extents))
    assert set(carried(src, dst, None)) == payload


@given(pairs())
def test_span_and_offsets_agree_with_the_elements(layouts: tuple[BlockLayout, BlockLayout]) -> None:
    for extent in (*layouts[0].extents, *layouts[1].extents):
        where = elements(extent)
        assert extent.offsets(len(extent.shape)).tolist() == where
        assert extent.nbytes == len(where) * extent.itemsize
        last = max(where, default=extent.offset - extent.itemsize) + extent.itemsize
        assert extent.span == last - extent.offset
        dense = where == [extent.offset + n * extent.itemsize for n in range(len(where))]
        assert not extent.contiguous or dense
        if 0 not in extent.shape:
            assert extent.contiguous == dense


def test_dense_tensors_side_by_side_are_one_run() -> None:
    parts = [Extent("k", (4, 8), "float16", layer=n) for n in range(8)]
    layout = BlockLayout.packed(parts)
    assert copy_runs(layout, layout).rows == ((0, 0, 0, 0, 8 * 64),)


def test_runs_of_different_planes_are_not_joined() -> None:
    one = BlockLayout((Extent("a", (4,), "uint8"), Extent("b", (4,), "uint8", offset=4)), (8,))
    two = BlockLayout((Extent("a", (4,), "uint8"), Extent("b", (4,), "uint8", plane=1)), (4, 4))
    assert copy_runs(one, two).rows == ((0, 0, 0, 0, 4), (0, 4, 1, 0, 4))
    assert copy_runs(two, one).rows == ((0, 0, 0, 0, 4), (1, 0, 0, 4, 4))


def test_zero_elements_are_zero_runs() -> None:  # case 51: empty tensors and zero layers
    empty = BlockLayout((Extent("a", (4, 0), "float16"),), (0,))
    assert copy_runs(empty, empty).rows == ()
    assert copy_runs(empty, empty).total == 0
    none = BlockLayout((), (0,))
    assert copy_runs(none, none).rows == ()
    assert Extent("a", (3, 0, 2), "uint8").contiguous


@pytest.mark.parametrize(
    ("dst", "words"),
    [
        (Extent("a", (4,), "uint8"), r"source uint8\[8\], destination uint8\[4\]"),
        (Extent("a", (2, 4), "uint8"), r"source uint8\[8\], destination uint8\[2, 4\]"),
        (Extent("a", (8,), "int8"), r"source uint8\[8\], destination int8\[8\]"),
        # Two kinds of 16 bits that mean different things, case 57.
        (Extent("h", (8,), "bfloat16"), r"source float16\[8\], destination bfloat16\[8\]"),
    ],
)
def test_shape_and_dtype_must_agree(dst: Extent, words: str) -> None:
    src = Extent(dst.name, (8,), "float16" if dst.name == "h" else "uint8")
    with pytest.raises(LayoutMismatch, match=words):
        copy_runs(BlockLayout((src,), (16,)), BlockLayout((dst,), (16,)))


def test_the_same_tensors_are_expected_on_both_sides() -> None:
    a, b = Extent("a", (4,), "uint8"), Extent("b", (4,), "uint8", offset=4)
    both, one = BlockLayout((a, b), (8,)), BlockLayout((a,), (8,))
    other = BlockLayout((Extent("c", (4,), "uint8"),), (8,))
    with pytest.raises(LayoutMismatch, match=r"source has \['a', 'b'\] in 2 extents"):
        copy_runs(both, one)
    with pytest.raises(LayoutMismatch, match=r"destination \['a', 'b'\] in 2"):
        copy_runs(one, both)
    with pytest.raises(LayoutMismatch, match="no extent 'c' of layer None"):
        copy_runs(one, other)
    assert copy_runs(both, one, ("a",)).rows == ((0, 0, 0, 0, 4),)
    with pytest.raises(LayoutMismatch, match=r"asked for \['a', 'x'\]"):
        copy_runs(both, both, ("a", "x"))
    with pytest.raises(LayoutMismatch, match="no extent 'b' of layer None"):
        copy_runs(one, both, ("b",))


def test_runs_are_computed_once_per_pair_of_layouts() -> None:
    layout = BlockLayout.raw(48)
    assert copy_runs(layout, layout) is copy_runs(BlockLayout.raw(48), BlockLayout.raw(48))


@pytest.mark.parametrize("boundary", [1 << 31, 1 << 32])
def test_offsets_beyond_32_bits_are_exact(boundary: int) -> None:  # case 18: offsets that wrap
    def layout(start: int) -> BlockLayout:
        shape, strides = (2, 4), (boundary // 2, 1)
        extent = Extent("a", shape, "float16", offset=start, strides=strides)
        return BlockLayout((extent,), (start + boundary * 2,))

    for start in (0, boundary - 8, boundary, boundary + 8):
        rows = copy_runs(layout(start), layout(0)).rows
        assert rows == ((0, start, 0, 0, 8), (0, start + boundary, 0, boundary, 8))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"dtype": "bf16"}, "dtype 'bf16', expected one of bfloat16"),
        ({"strides": (1,)}, "1 strides for 2 axes"),
        ({"offset": -1}, "negative"),
        ({"plane": -1}, "negative"),
        ({"shape": (-1, 2)}, "negative"),
        ({"strides": (-4, 1)}, "negative"),
        ({"strides": (3, 1)}, r"strides \(3, 1\) of shape \(2, 4\) overlap"),
        ({"strides": (0, 1)}, "overlap"),
        ({"strides": (1, 1)}, "overlap"),
    ],
)
def test_a_wrong_extent_is_refused(keywords: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"name": "a", "shape": (2, 4), "dtype": "uint8"}
    with pytest.raises(LayoutMismatch, match=words):
        Extent(**(good | keywords))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3))
def test_overlapping_is_never_missed(axes: list[tuple[int, int]]) -> None:
    shape, strides = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    where = [
        sum(i * s for i, s in zip(at, strides, strict=True))
        for at in itertools.product(*map(range, shape))
    ]
    if len(set(where)) != len(where):
        assert overlapping(shape, strides)


def test_axes_of_one_element_may_have_any_stride() -> None:
    extent = Extent("a", (4, 1, 8), "uint8", strides=(8, 0, 1))
    assert extent.contiguous
    assert Extent("a", (1, 8), "uint8", strides=(77, 1)).contiguous


def test_row_major() -> None:
    assert row_major(()) == ()
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major((4, 0)) == (1, 1)
    assert Extent("a", (2, 3, 4), "uint8").strides == (12, 4, 1)
    assert Extent("scalar", (), "float32").nbytes == 4


def test_layouts_refuse_what_cannot_lie_inside_a_block() -> None:
    a = Extent("a", (8,), "uint8", offset=4)
    with pytest.raises(SpanError, match="ends at byte 12 of a block of 11 bytes in plane 0"):
        BlockLayout((a,), (11,))
    with pytest.raises(LayoutMismatch, match="two extents are named"):
        BlockLayout((a, a), (12,))
    with pytest.raises(LayoutMismatch, match="plane 1 of 1"):
        BlockLayout((Extent("a", (8,), "uint8", plane=1),), (12,))


def test_packed_aligns_every_tensor() -> None:
    layout = BlockLayout.packed(
        [Extent("a", (3,), "uint8"), Extent("b", (5,), "uint8", layer=1)], align=32
    )
    assert [extent.offset for extent in layout.extents] == [0, 32]
    assert layout.plane_bytes == (37,)
    assert layout.nbytes == 37
    assert layout.payload == 8
    assert BlockLayout.packed([]).nbytes == 0


def test_a_layout_finds_its_tensors() -> None:
    layout = BlockLayout.packed([Extent("k", (3,), "uint8", layer=n) for n in range(2)])
    assert layout.extent("k", 1).layer == 1
    with pytest.raises(LayoutMismatch, match=r"no extent 'k' of layer 2; there are \[\('k', 0\)"):
        layout.extent("k", 2)


def test_a_layout_stands_wherever_one_is_wanted() -> None:
    layout = BlockLayout.raw(10)
    wanted: HasBlockLayout = layout
    assert wanted.block_layout is layout
    assert layout.extent("bytes").shape == (10,)
    assert hash(layout) == hash(BlockLayout.raw(10))
    with pytest.raises(FrozenInstanceError):
        layout.plane_bytes = (3,)  # type: ignore[misc]


def test_item_sizes_are_those_of_torch() -> None:
    import torch

    for name, size in DTYPES.items():
        assert torch.empty(0, dtype=getattr(torch, name)).element_size() == size
        assert math.prod((2, 3)) * size == Extent("a", (2, 3), name).nbytes
