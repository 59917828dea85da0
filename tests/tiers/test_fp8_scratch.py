import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiers import _fp8_scratch
from tiers._fp8_scratch import (
    LOOKUP,
    WIDE,
    Scratch,
    merge_axes,
    one_torch_thread,
    pieces,
    scale_box,
    split_shape,
)

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=5).map(tuple)


@given(shapes, st.integers(1, 40))
def test_pieces_cover_every_element_once_in_order(shape: tuple[int, ...], limit: int) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    seen = [numbers[box].reshape(-1) for box in pieces(shape, limit)]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *seen]), numbers.reshape(-1))
    assert all(part.size <= limit for part in seen)


@given(shapes, st.integers(0, 4))
def test_shares_of_threads_cover_every_element_once(shape: tuple[int, ...], parts: int) -> None:
    count = np.zeros(shape, int)
    boxes = split_shape(shape, parts)
    for box in boxes:
        count[box] += 1
    assert (count == 1).all()
    assert len(boxes) <= max(parts, 1)


def test_a_share_is_one_run_of_memory_where_it_can_be() -> None:
    assert [box[0] for box in split_shape((1000, 8, 128), 2)] == [slice(0, 500), slice(500, 1000)]
    assert [box[2] for box in split_shape((1, 8, 128), 2)] == [slice(0, 64), slice(64, 128)]


@given(shapes, st.data())
def test_merging_axes_keeps_elements_and_groups(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    order = data.draw(st.permutations(range(len(shape))))
    plain = np.arange(math.prod(shape)).reshape(shape)
    turned = np.ascontiguousarray(plain.transpose(order)).transpose(np.argsort(order))
    (first, second), flags = merge_axes([plain, turned], kept)
    assert len(flags) == first.ndim <= max(len(shape), 1)
    assert np.array_equal(first.reshape(-1), plain.reshape(-1))
    assert np.shares_memory(first, plain) or not plain.size
    assert np.array_equal(first, second)
    assert np.shares_memory(second, turned) or not plain.size
    groups = [n for n, keep in zip(shape, kept, strict=True) if keep]
    assert math.prod(n for n, keep in zip(first.shape, flags, strict=True) if keep) == math.prod(
        groups
    )


def test_dense_neighbours_become_one_axis() -> None:
    dense = np.zeros((2, 1, 16, 8, 128), np.uint16)
    assert merge_axes([dense], [False] * 5)[0][0].shape == (dense.size,)
    head = merge_axes([dense], [True, False, False, True, False])
    assert (head[0][0].shape, head[1]) == ((2, 16, 8, 128), (True, False, True, False))
    assert merge_axes([np.zeros((1, 1), np.uint16)], [True, True])[0][0].shape == (1,)


def test_a_boxs_scales_are_cut_along_their_own_axes() -> None:
    box = (slice(2, 4), slice(0, 3))
    assert scale_box(box, (True, False)) == (slice(2, 4), slice(0, 1))


def test_tensors_share_memory_with_arrays() -> None:
    scratch = Scratch()
    scratch.narrow[:2] = 0x3F80
    assert scratch.narrow_tensors["bfloat16"][:2].tolist() == [1.0, 1.0]
    scratch.index[5] = 9
    assert int(scratch.index_tensor[5]) == 9
    assert WIDE <= LOOKUP
    assert WIDE % 2 == LOOKUP % 2 == 0
    grown = scratch.scales(10)
    assert scratch.scales(4).base is grown.base or np.shares_memory(scratch.scales(4), grown)


def test_torch_keeps_to_the_calling_thread_and_gets_its_number_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def work() -> None:
        with one_torch_thread(1 << 20):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    with one_torch_thread(1 << 20):
        other = threading.Thread(target=work)
        other.start()
        other.join()
        assert torch.get_num_threads() in {1, before}
    assert torch.get_num_threads() == before
    assert seen[1] == before
    assert seen[0] in {1, before}


def test_torch_without_openmp_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fp8_scratch, "_openmp_setter", lambda: None)
    before = torch.get_num_threads()
    with one_torch_thread(1 << 20):
        assert torch.get_num_threads() == before


def test_small_pieces_are_left_alone() -> None:
    before = torch.get_num_threads()
    with one_torch_thread(32768):
        assert torch.get_num_threads() == before
