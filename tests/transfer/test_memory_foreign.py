"""Memory of a host program as blocks: exact there and back, neighbours untouched, ids and all."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.kit import Rig, move

from transfer._errors import LayoutMismatch, LeaseError, PoolBusy, SpanError, WrongPool
from transfer._extent import BlockLayout, Extent
from transfer._handle import Lease
from transfer._memory import HostPool, Pool
from transfer._storage import own_layout

Tensors = dict[tuple[str, int | None], torch.Tensor]

BLOCKS, PAGE, HEADS, DIM = 4, 2, 2, 2
"""Tokens in a page, heads and head size coincide: no axis can be told from another by its size."""


def halves(whole: torch.Tensor, axis: int) -> dict[str, torch.Tensor]:
    """Keys and values as views of one tensor."""
    return dict(zip(("key", "value"), whole.unbind(axis), strict=True))


def flat(*shape: int) -> torch.Tensor:
    """Elements numbered where they lie, so that a wrong place shows as a wrong number."""
    return torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)


# Per block every view has the shape (page, heads, dim); `whole` is the allocation behind it.
VIEWS: dict[str, Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]]] = {
    "NHD, blocks first": lambda: (w := flat(BLOCKS, 2, PAGE, HEADS, DIM), halves(w, 1)),
    "NHD, K and V first": lambda: (w := flat(2, BLOCKS, PAGE, HEADS, DIM), halves(w, 0)),
    "HND, blocks first": lambda: (
        w := flat(BLOCKS, 2, HEADS, PAGE, DIM),
        {name: half.transpose(1, 2) for name, half in halves(w, 1).items()},
    ),
    "HND, K and V first": lambda: (
        w := flat(2, BLOCKS, HEADS, PAGE, DIM),
        {name: half.transpose(1, 2) for name, half in halves(w, 0).items()},
    ),
    "interleaved by head": lambda: (w := flat(BLOCKS, PAGE, HEADS, 2, DIM), halves(w, 3)),
    "interleaved by element": lambda: (w := flat(BLOCKS, PAGE, HEADS, DIM, 2), halves(w, 4)),
    "rows padded": lambda: (
        w := flat(BLOCKS, 2, PAGE, HEADS, DIM + 3),
        {name: half[..., :DIM] for name, half in halves(w, 1).items()},
    ),
    "rows widened by scales": lambda: (
        w := flat(BLOCKS, PAGE, HEADS, 2 * DIM + 1),
        {"key": w[..., :DIM], "value": w[..., DIM + 1 :]},
    ),
    "permuted": lambda: (
        w := flat(DIM, HEADS, BLOCKS, PAGE, 2),
        {name: half.permute(2, 3, 1, 0) for name, half in halves(w, 4).items()},
    ),
    "one head of three, odd stride": lambda: (
        w := flat(BLOCKS, PAGE, 3 * HEADS + 1, DIM),
        {"key": w[:, :, 1:3], "value": w[:, :, 4:6]},
    ),
    "every other block": lambda: (
        w := flat(2 * BLOCKS, 2, PAGE, HEADS, DIM),
        {name: half[1::2] for name, half in halves(w, 1).items()},
    ),
}


def foreign(tensors: dict[str, torch.Tensor]) -> Pool:
    named: Tensors = {(name, None): tensor for name, tensor in tensors.items()}
    return Pool.over(named, own_layout(named), name="pages")


def slot_layout() -> BlockLayout:
    """Dense on the other side, values before keys."""
    shape = (PAGE, HEADS, DIM)
    return BlockLayout.packed([Extent("value", shape, "int16"), Extent("key", shape, "int16")])


@pytest.mark.parametrize("view", VIEWS)
def test_there_and_back_is_exact(view: str) -> None:  # cases 16 and 17
    whole, tensors = VIEWS[view]()
    before = whole.clone()
    pages, slots = foreign(tensors), HostPool(slot_layout(), BLOCKS)
    chosen = [2, 0, 3]
    here = slots.lease(len(chosen)).handle
    move(pages.blocks_of(chosen), here)
    for block_id, slot in zip(chosen, here, strict=True):
        for name, tensor in tensors.items():
            assert torch.equal(slot.tensor(name), tensor[block_id])
    assert torch.equal(whole, before)
    # Into other pages: exactly these change, and what lies around them does not.
    target = [1, 3, 2]
    expected = before.clone()
    _, mirror = VIEWS[view]()
    written = torch.zeros_like(whole, dtype=torch.bool)
    for name, tensor in tensors.items():
        where = torch.as_strided(written, tensor.shape, tensor.stride(), tensor.storage_offset())
        there = torch.as_strided(expected, tensor.shape, tensor.stride(), tensor.storage_offset())
        for block_id, slot_number in zip(target, chosen, strict=True):
            where[block_id] = True
            there[block_id] = mirror[name][slot_number]
    move(here, pages.blocks_of(target))
    assert torch.equal(whole, expected)
    assert torch.equal(whole[~written], before[~written])
    assert int(written.sum()) == 2 * len(target) * PAGE * HEADS * DIM


@pytest.mark.parametrize("source", VIEWS)
@pytest.mark.parametrize("target", ["HND, blocks first", "interleaved by element", "permuted"])
def test_any_view_fills_any_other(source: str, target: str) -> None:  # cases 16 and 17
    _, theirs = VIEWS[source]()
    _, ours = VIEWS[target]()
    for tensor in ours.values():
        tensor.zero_()
    move(foreign(theirs).blocks_of([1, 2]), foreign(ours).blocks_of([3, 0]))
    for name, tensor in ours.items():
        assert torch.equal(tensor[3], theirs[name][1])
        assert torch.equal(tensor[0], theirs[name][2])
        assert int(tensor[1:3].abs().sum()) == 0


@given(st.permutations(range(4)), st.lists(st.integers(0, 2), min_size=4, max_size=4), st.data())
def test_any_order_of_axes_and_any_padding(
    axes: list[int], pads: list[int], data: st.DataObject
) -> None:  # case 17, real strides
    sizes = [BLOCKS, PAGE, HEADS, DIM]
    padded = [sizes[axis] + pad for axis, pad in zip(axes, pads, strict=True)]
    whole = flat(*padded)
    view = whole[tuple(slice(0, sizes[axis]) for axis in axes)].permute(
        *(axes.index(axis) for axis in range(4))
    )
    before = whole.clone()
    pages = foreign({"key": view})
    layout = BlockLayout.packed([Extent("key", (PAGE, HEADS, DIM), "int16")])
    slots = HostPool(layout, 1).lease().handle
    one, other = data.draw(st.permutations(range(BLOCKS)).map(lambda ids: ids[:2]))
    move(pages.block(one), slots)
    assert torch.equal(slots.tensor("key"), view[one])
    move(slots, pages.block(other))
    expected = before.clone()
    inside = expected[tuple(slice(0, sizes[axis]) for axis in axes)].permute(
        *(axes.index(axis) for axis in range(4))
    )
    inside[other] = inside[one].clone()
    assert torch.equal(whole, expected)


def test_a_layout_is_required_and_checked() -> None:  # case 16, a conflict at registration
    _, tensors = VIEWS["HND, blocks first"]()
    named: Tensors = {(name, None): tensor for name, tensor in tensors.items()}
    shape = (PAGE, HEADS, DIM)
    claimed = BlockLayout(
        (Extent("key", shape, "int16"), Extent("value", shape, "int16", plane=1)), (16, 16)
    )
    with pytest.raises(LayoutMismatch, match="memory has strides"):
        Pool.over(named, claimed)


def test_foreign_blocks_are_named_by_id() -> None:
    pages = foreign({"key": flat(BLOCKS, DIM)})
    assert pages.foreign
    assert pages.counts() == (0, BLOCKS, 0, 0)
    assert pages.block(3).id == 3
    assert pages.blocks_of([]).ids.tolist() == []
    for ids in ([3, 1], np.array([3, 1], dtype=np.int32)):
        blocks = pages.blocks_of(ids)
        assert blocks.ids.tolist() == [3, 1]
        assert blocks.ids.dtype == np.int64
    with pytest.raises(LeaseError, match=r"named twice in \[1, 1\]"):
        pages.blocks_of([1, 1])
    for ids in ([-1], [0, BLOCKS]):
        with pytest.raises(WrongPool, match="pages has 4 blocks"):
            pages.blocks_of(ids)
    with pytest.raises(WrongPool):
        pages.block(BLOCKS)
    with pytest.raises(LeaseError, match="had by lease"):
        HostPool(BlockLayout.raw(8), 1).block(0)


def test_foreign_memory_is_kept_while_it_is_held() -> None:  # case 12, the source is dropped
    rig = Rig()
    pages = foreign({"key": flat(BLOCKS, DIM)})
    op = rig.submit(writes=[pages.block(1)])
    assert pages.counts() == (0, BLOCKS - 1, 1, 0)
    with pytest.raises(PoolBusy):
        pages.close()
    assert pages.storage.tensor(pages.address(0, 1), pages.layout.extent("key")).tolist() == [2, 3]
    rig.signal(op)
    assert pages.counts() == (0, BLOCKS, 0, 0)


def test_ids_may_be_used_again_while_blocks_are_held() -> None:
    rig = Rig()
    pages = foreign({"key": flat(BLOCKS, DIM)})
    ids = np.array([0, 1])
    op = rig.submit(writes=[pages.blocks_of(ids)])
    ids[:] = 2, 3
    assert pages.holders(pages.block(1)) == [op]
    rig.signal(op)
    assert pages.counts() == (0, BLOCKS, 0, 0)


def test_ids_of_few_bits_do_not_narrow_addresses() -> None:
    pages = foreign({"key": flat(BLOCKS, DIM)})
    block = pages.block(np.int32(3))
    assert type(block.id) is int
    assert block.span().address == pages.address(0, 3)


def test_bytes_between_those_of_a_block_are_others() -> None:
    whole = flat(HEADS, BLOCKS, DIM)
    pages = foreign({"key": whole.permute(1, 0, 2)})
    for look in (pages.block(0).span, pages.block(0).view):
        with pytest.raises(SpanError, match="gaps that belong to others"):
            look()
    with pytest.raises(SpanError):  # the layout says more than the memory has
        Pool.over(
            {("key", None): flat(BLOCKS, DIM)},
            BlockLayout((Extent("key", (DIM,), "int16"),), (2 * DIM * 2,)),
        ).block(0).span()


def test_there_is_no_lease_on_foreign_blocks_to_end() -> None:
    pages = foreign({"key": flat(BLOCKS, DIM)})
    with pytest.raises(LeaseError, match="a host program's"):
        Lease(pages.block(0)).release()
    assert pages.counts() == (0, BLOCKS, 0, 0)
