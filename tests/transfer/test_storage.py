"""Memory of our own and of others: real strides, nothing outside, nothing twice, forks."""

import gc
import os
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer._errors import LayoutMismatch, SpanError, WrongDevice
from transfer._extent import BlockLayout, Extent
from transfer._storage import (
    PAGE,
    MappedStorage,
    TensorStorage,
    keep_for_ever,
    let_go,
    own_layout,
    torch_dtype,
)

Tensors = dict[tuple[str, int | None], torch.Tensor]


def named(**tensors: torch.Tensor) -> Tensors:
    return {(name, None): tensor for name, tensor in tensors.items()}


def over(**tensors: torch.Tensor) -> TensorStorage:
    """Foreign memory described as it is."""
    return TensorStorage(named(**tensors), own_layout(named(**tensors)))


# Memory of our own


@pytest.mark.parametrize(
    ("nbytes", "align", "stride"),
    [
        (1, None, 64),
        (65, None, 128),
        (4095, None, 4096),
        (4096, None, 4096),
        (5000, None, 8192),
        (100, 512, 512),
        (0, None, 64),
    ],
)
def test_blocks_are_aligned(nbytes: int, align: int | None, stride: int) -> None:
    storage = MappedStorage(nbytes, 3, align=align)
    plane = storage.planes[0]
    assert (plane.stride, plane.nbytes) == (stride, nbytes)
    assert plane.address % PAGE == 0
    assert storage.nbytes == 3 * stride
    storage.close()


def test_an_alignment_under_which_blocks_overlap_is_refused() -> None:
    for align in (0, -64):
        with pytest.raises(SpanError, match="expected at least 1"):
            MappedStorage(100, 2, align=align)


def test_no_blocks_at_all() -> None:
    storage = MappedStorage(64, 0)
    assert storage.nbytes >= 1
    storage.close()


def test_views_and_tensors_are_the_same_bytes() -> None:
    storage = MappedStorage(64, 2)
    block = storage.planes[0].address + storage.planes[0].stride
    extent = Extent("a", (2, 3), "float16", offset=16, strides=(8, 1))
    storage.tensor(block, extent).copy_(torch.arange(6).reshape(2, 3))
    seen = np.frombuffer(storage.view(block + 16, 22), dtype=np.float16)
    assert seen[[0, 1, 2, 8, 9, 10]].tolist() == [0, 1, 2, 3, 4, 5]
    assert bytes(storage.view(block, 16)) == bytes(16)
    assert bytes(storage.view(storage.planes[0].address, 64)) == bytes(64)


def test_an_empty_tensor_of_mapped_memory() -> None:
    storage = MappedStorage(64, 1)
    tensor = storage.tensor(storage.planes[0].address, Extent("a", (0, 3), "float16"))
    assert tuple(tensor.shape) == (0, 3)
    assert tensor.dtype == torch.float16


def test_closing_leaves_the_mapping_to_a_callers_view() -> None:
    storage = MappedStorage(64, 1)
    tensor = storage.tensor(storage.planes[0].address, Extent("a", (4,), "uint8"))
    tensor.fill_(7)
    storage.close()
    assert tensor.tolist() == [7, 7, 7, 7]


def test_closing_leaves_the_mapping_to_a_callers_bytes() -> None:
    storage = MappedStorage(64, 1)
    view = storage.view(storage.planes[0].address, 4)
    storage.close()
    view[:] = b"kept"
    assert bytes(view) == b"kept"


def test_closing_unmaps_what_nobody_looks_at() -> None:
    storage = MappedStorage(64, 1)
    mapping = weakref.ref(storage._map)
    storage.close()
    assert mapping() is None
    with pytest.raises(ValueError, match="released"):
        storage.view(storage.planes[0].address, 1)


def test_a_forked_child_shares_the_pages() -> None:
    # A private mapping would be copied on write at the first write after the fork, and direct I/O
    # that is under way in the parent would go on into the page that the parent no longer sees.
    storage = MappedStorage(64, 1)
    view = storage.view(storage.planes[0].address, 64)
    view[0] = 1
    child = os.fork()
    if child == 0:
        view[1] = view[0] + 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(view[:2]) == b"\x01\x02"


# Foreign memory: layouts with coinciding sizes, real strides


BLOCKS, N = 3, 2
"""Two KV heads, two tokens, two elements: every size coincides, so only strides can tell."""


def coded(*shape: int) -> torch.Tensor:
    """A tensor whose every element says where it is."""
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)


VIEWS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "NHD": lambda: {"k": coded(BLOCKS, N, N, N), "v": coded(BLOCKS, N, N, N)},
    "HND": lambda: {
        "k": coded(BLOCKS, N, N, N).transpose(1, 2),
        "v": coded(BLOCKS, N, N, N).transpose(1, 2),
    },
    "K and V first": lambda: dict(zip("kv", coded(2, BLOCKS, N, N, N), strict=True)),
    "blocks first": lambda: dict(zip("kv", coded(BLOCKS, 2, N, N, N).unbind(1), strict=True)),
    "interleaved by head": lambda: dict(
        zip("kv", coded(BLOCKS, N, 2, N, N).unbind(2), strict=True)
    ),
    "interleaved by element": lambda: dict(
        zip("kv", coded(BLOCKS, N, N, N, 2).unbind(4), strict=True)
    ),
    "padded rows": lambda: {
        "k": coded(BLOCKS, N, N, 5)[..., :N],
        "v": coded(BLOCKS, N, N, 3)[..., :N],
    },
    "scales behind each row": lambda: {
        "k": coded(BLOCKS, N, N, 4)[..., :3],
        "s": coded(BLOCKS, N, N, 4)[..., 3:],
    },
    "permuted": lambda: {"k": coded(N, BLOCKS, N, N).permute(1, 3, 0, 2)},
    "blocks innermost": lambda: {"k": coded(N, N, N, BLOCKS).permute(3, 0, 1, 2)},
    "one head of three": lambda: {"k": coded(BLOCKS, N, 3, N)[:, :, 1:2]},
    "every other block": lambda: {"k": coded(2 * BLOCKS, N, N)[::2], "v": coded(BLOCKS, N, N)},
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_the_programs_own_bytes(view: str) -> None:  # cases 16 and 17
    tensors = VIEWS[view]()
    storage = over(**tensors)
    assert storage.blocks == BLOCKS
    assert storage.kind == "host"
    assert not storage.pinned
    for plane, (extent, tensor) in enumerate(
        zip(own_layout(named(**tensors)).extents, tensors.values(), strict=True)
    ):
        where = storage.planes[plane]
        for block in range(BLOCKS):
            address = where.address + block * where.stride
            assert torch.equal(storage.tensor(address, extent), tensor[block])
            raw = np.frombuffer(storage.view(address, where.nbytes), dtype=np.uint8)
            for at in np.ndindex(*extent.shape):
                byte = sum(i * s for i, s in zip(at, extent.strides, strict=True)) * 4
                assert raw[byte : byte + 4].view(np.int32)[0] == int(tensor[(block, *at)])


def test_a_layout_that_disagrees_with_the_strides_is_refused() -> None:  # case 16: axes guessed
    tensor = coded(BLOCKS, N, N, N)
    claimed = BlockLayout((Extent("k", (N, N, N), "int32"),), (N * N * N * 4,))
    TensorStorage(named(k=tensor), claimed)
    with pytest.raises(LayoutMismatch, match=r"memory has strides \[2, 4, 1\].*says \[4, 2, 1\]"):
        TensorStorage(named(k=tensor.transpose(1, 2)), claimed)


@pytest.mark.parametrize(
    ("extent", "words"),
    [
        (Extent("k", (N, N), "float32"), r"memory is int32\[2, 2\] per block, layout says float32"),
        (Extent("k", (N, 3), "int32"), r"layout says int32\[2, 3\]"),
        (Extent("k", (N, N), "int32", offset=4), "offset 4"),
        (Extent("x", (N, N), "int32"), "expected a tensor for it"),
    ],
)
def test_a_layout_that_disagrees_with_the_tensor_is_refused(extent: Extent, words: str) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        TensorStorage(named(k=coded(BLOCKS, N, N)), BlockLayout((extent,), (64,)))


def test_strides_of_one_element_axes_do_not_matter() -> None:
    tensor = coded(BLOCKS, 1, N).as_strided((BLOCKS, 1, N), (N, 77, 1))
    TensorStorage(named(k=tensor), BlockLayout((Extent("k", (1, N), "int32"),), (8,)))


def test_planes_follow_the_extents_in_order() -> None:
    extents = (Extent("k", (N,), "int32", plane=1), Extent("v", (N,), "int32", plane=0))
    with pytest.raises(LayoutMismatch, match="plane 0 and offset 0; found plane 1"):
        TensorStorage(named(k=coded(BLOCKS, N), v=coded(BLOCKS, N)), BlockLayout(extents, (8, 8)))


def test_one_kind_of_memory_and_one_number_of_blocks() -> None:
    with pytest.raises(WrongDevice, match=r"blocks \[2, 3\]"):
        over(k=coded(BLOCKS, N), v=coded(2, N))
    with pytest.raises(WrongDevice, match=r"kinds \['host', 'meta:0'\]"):
        over(k=coded(BLOCKS, N), v=torch.empty(BLOCKS, N, device="meta"))
    layout = own_layout(named(k=coded(BLOCKS, N)))
    with pytest.raises(WrongDevice, match="2 tensors for 1 extents"):
        TensorStorage(named(k=coded(BLOCKS, N), v=coded(BLOCKS, N)), layout)
    with pytest.raises(WrongDevice, match="0 tensors for 0 extents"):
        TensorStorage({}, BlockLayout((), ()))


def test_memory_of_another_kind_has_no_host_view() -> None:
    storage = over(k=torch.empty(BLOCKS, N, device="meta"))
    assert storage.kind == "meta:0"
    assert not storage.pinned
    with pytest.raises(WrongDevice, match="cannot be viewed from the host"):
        storage.view(0, 1)


def test_blocks_past_the_allocation_are_refused() -> None:  # case 17: every range is checked
    class Lying(torch.Tensor):
        """A tensor that claims more blocks than its allocation has."""

        @property
        def shape(self) -> torch.Size:  # type: ignore[override]
            return torch.Size((BLOCKS + 1, N))

    tensor = coded(BLOCKS, N).as_subclass(Lying)
    with pytest.raises(SpanError, match="ends at byte 32 of an allocation of 24 bytes"):
        TensorStorage(named(k=tensor), BlockLayout((Extent("k", (N,), "int32"),), (8,)))


def test_a_view_outside_every_tensor_is_refused() -> None:
    storage = over(k=coded(BLOCKS, N), v=coded(BLOCKS, N))
    end = storage.planes[1].address + BLOCKS * 8
    assert len(storage.view(end - 8, 8)) == 8
    with pytest.raises(SpanError, match="lie in no tensor"):
        storage.view(end - 4, 8)


@pytest.mark.parametrize(
    "tensor",
    [
        coded(N).expand(BLOCKS, N),
        coded(8).as_strided((BLOCKS, 4), (2, 1)),
        coded(8).as_strided((BLOCKS, 2, 2), (2, 1, 1)),
    ],
    ids=["expanded", "sliding window", "folded rows"],
)
def test_a_view_that_overlaps_itself_is_refused(tensor: torch.Tensor) -> None:  # case 17
    shape = tuple(tensor.shape[1:])
    strides = tuple(tensor.stride()[1:])
    with pytest.raises(LayoutMismatch, match="overlap"):
        TensorStorage(named(k=tensor), claim(shape, strides))


def claim(shape: tuple[int, ...], strides: tuple[int, ...]) -> BlockLayout:
    return BlockLayout((Extent("k", shape, "int32", strides=strides),), (32,))


def overlaps() -> dict[str, dict[str, torch.Tensor]]:
    base = coded(BLOCKS + 1, 4)
    wide = coded(BLOCKS, 8)
    flat = coded(24)
    return {
        "the same tensor": {"k": base, "v": base},
        "shifted by one block": {"k": base[:-1], "v": base[1:]},
        "shared columns": {"k": wide[:, :5], "v": wide[:, 4:]},
        "one column each way": {"k": wide[:, 0:4:2], "v": wide[:, 2:6:2]},
        "different block strides": {
            "k": flat.as_strided((BLOCKS, 2), (4, 1)),
            "v": flat.as_strided((BLOCKS, 2), (6, 1), 2),
        },
        "half a block further": {
            "k": flat.as_strided((BLOCKS, 4), (4, 1)),
            "v": flat.as_strided((BLOCKS, 4), (4, 1), 6),
        },
    }


@pytest.mark.parametrize("kind", overlaps())
def test_extents_that_share_bytes_are_refused(kind: str) -> None:  # case 17: over all blocks
    with pytest.raises(LayoutMismatch, match=r"share bytes|lie between each other"):
        over(**overlaps()[kind])


def test_extents_of_a_single_block_are_compared_too() -> None:
    wide = coded(1, 8)
    over(k=wide[:, :4], v=wide[:, 4:])
    over(k=wide[:, 0::2], v=wide[:, 1::2])
    with pytest.raises(LayoutMismatch, match="share bytes"):
        over(k=wide[:, :5], v=wide[:, 4:])


def test_parts_of_one_allocation_side_by_side_are_fine() -> None:
    flat = coded(8 * 4 * 2)
    over(k=flat[:32].reshape(8, 4), v=flat[32:].reshape(8, 4))
    over(k=flat[:32].reshape(8, 4), v=flat[32:40].reshape(8, 1), w=flat[40:48].reshape(8, 1))


def test_empty_extents_and_no_blocks() -> None:
    assert over(k=torch.empty(BLOCKS, 0), v=coded(BLOCKS, N)).blocks == BLOCKS
    empty = coded(BLOCKS, N)[:0]
    assert over(k=empty, v=empty).blocks == 0


@given(st.data())
def test_shared_bytes_are_found_exactly(data: st.DataObject) -> None:
    """Two extents in one allocation with one block stride, against a count of every byte."""
    blocks, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(4, 12))
    memory = torch.zeros(200, dtype=torch.uint8)
    tensors = {}
    for name in "kv":
        rows = data.draw(st.integers(1, 2))
        row = data.draw(st.integers(1, stride // rows))
        width = data.draw(st.integers(1, row))
        start = data.draw(st.integers(0, 60))
        tensors[name] = memory.as_strided((blocks, rows, width), (stride, row, 1), start)
    count = np.zeros(200, dtype=np.int64)
    for tensor in tensors.values():
        start = int(tensor.storage_offset())
        (_, rows, width), (_, row, _) = tensor.shape, tensor.stride()
        for block in range(blocks):
            for line in range(rows):
                begin = start + block * stride + line * row
                count[begin : begin + width] += 1
    if count.max() > 1:
        with pytest.raises(LayoutMismatch, match="share bytes"):
            over(**tensors)
    else:
        over(**tensors)


def test_the_programs_memory_lives_as_long_as_the_storage() -> None:  # case 12: source dropped
    tensor = coded(BLOCKS, N)
    before = tensor.clone()
    storage = over(k=tensor)
    extent = own_layout(named(k=tensor)).extents[0]
    del tensor
    gc.collect()
    where = storage.planes[0]
    assert torch.equal(storage.tensor(where.address + where.stride, extent), before[1])
    storage.close()
    with pytest.raises(IndexError):
        storage.tensor(where.address, extent)


def test_a_block_stride_of_zero_is_the_only_block() -> None:
    tensor = coded(N).as_strided((1, N), (0, 1))
    storage = over(k=tensor)
    extent = own_layout(named(k=tensor)).extents[0]
    assert storage.tensor(storage.planes[0].address, extent).tolist() == [0, 1]


def test_own_layout_refuses_unknown_dtypes() -> None:
    with pytest.raises(LayoutMismatch, match="dtype complex64"):
        own_layout(named(k=torch.zeros(2, 2, dtype=torch.complex64)))
    assert torch_dtype("bfloat16") is torch.bfloat16


def test_what_is_kept_is_kept() -> None:
    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    keep_for_ever(memory)
    del memory
    gc.collect()
    assert alive() is not None
    let_go(alive())
    gc.collect()
    assert alive() is None
