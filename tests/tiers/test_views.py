"""Layouts of other programs' caches. Elements hold their own index, so a wrong place shows."""

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tiers._layout import PageLayout
from tiers._views import CacheKind, view_cache
from transfer._errors import LayoutMismatch, SpanError, TransferError
from transfer._extent import BlockLayout, Extent, copy_runs
from transfer._memory import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator

# Sizes that coincide, so that nothing can be told from a shape: heads = tokens = components.
BLOCKS, TOKENS, HEADS, DIM = 3, 2, 2, 2
SIZES = {"B": BLOCKS, "C": 2, "T": TOKENS, "H": HEADS, "D": DIM}
COMBINED = [kind for kind in CacheKind if kind.combined]
SEPARATE = [CacheKind.NHD, CacheKind.HND]


def page(kind: CacheKind, *, layers: int = 1) -> PageLayout:
    return PageLayout(
        layers=layers,
        page_size=TOKENS,
        kv_heads=HEADS,
        head_dim=DIM,
        order=kind.order,
        key="float32",
        value="float32",
    )


def code(component: int, block: int, token: int, head: int, dim: int) -> int:
    return ((((component * 10 + block) * 10 + token) * 10 + head) * 10 + dim) + 1


def fill(tensor: torch.Tensor, axes: str, component: int | None = None) -> None:
    for index in itertools.product(*(range(n) for n in tensor.shape)):
        at = dict(zip(axes, index, strict=True))
        own = at.get("C", component)
        assert own is not None
        tensor[index] = code(own, at["B"], at["T"], at["H"], at["D"])


def elements(order: str) -> "Iterator[tuple[tuple[int, ...], dict[str, int]]]":
    letters = order.replace("N", "T")
    for index in itertools.product(*(range(SIZES[x]) for x in letters)):
        yield index, dict(zip(letters, index, strict=True))


def check_extents(layout: BlockLayout, pool: Pool, order: str) -> None:
    """Every element lies where its extent says, in raw memory."""
    for component, name in enumerate(("key", "value")):
        extent = layout.extent(name, 0)
        for block in range(BLOCKS):
            base = pool.address(extent.plane, block)
            for index, at in elements(order):
                steps = sum(i * s for i, s in zip(index, extent.strides, strict=True))
                address = base + extent.offset + steps * 4
                value = np.frombuffer(pool.storage.view(address, 4), np.float32)[0]
                assert value == code(component, block, at["T"], at["H"], at["D"])


# case 16, every kind, with sizes that coincide
@pytest.mark.parametrize("kind", [*COMBINED, *SEPARATE])
def test_every_kind_is_read_where_its_axes_say(kind: CacheKind) -> None:
    tensors = [
        torch.zeros([SIZES[axis] for axis in kind.value]) for _ in range(1 if kind.combined else 2)
    ]
    for component, tensor in enumerate(tensors):
        fill(tensor, kind.value, component)
    view = view_cache(page(kind), [tensors], kind=kind)
    check_extents(view.block_layout, Pool.over(view.tensors, view), kind.order.value)


# case 17, rows widened by inline scales, and blocks padded to an alignment
@pytest.mark.parametrize("kind", [*COMBINED, *SEPARATE])
def test_padded_rows_round_trip_and_their_padding_stays(kind: CacheKind) -> None:
    shape = [SIZES[axis] for axis in kind.value]
    wide = [torch.full([*shape[:-1], DIM + 3], -7.0) for _ in range(1 if kind.combined else 2)]
    tensors = [whole[..., :DIM] for whole in wide]
    for component, tensor in enumerate(tensors):
        fill(tensor, kind.value, component)
    with pytest.raises(LayoutMismatch, match="strides"):
        view_cache(page(kind), [tensors], kind=kind)
    view = view_cache(page(kind), [tensors], kind=kind, padded=True)
    pool = Pool.over(view.tensors, view)
    check_extents(view.block_layout, pool, kind.order.value)
    slot = np.zeros(page(kind).block_layout.nbytes, np.uint8)
    runs = copy_runs(view.block_layout, page(kind).block_layout)
    for plane, start, _, end, count in runs.rows:
        source = pool.storage.view(pool.address(plane, 1) + start, count)
        slot[end : end + count] = np.frombuffer(source, np.uint8)
    expected = [
        code(c, 1, at["T"], at["H"], at["D"])
        for c in (0, 1)
        for _, at in elements(kind.order.value)
    ]
    got = [
        slot[e.offset :][: e.nbytes].view(np.float32).tolist()
        for e in page(kind).block_layout.extents
    ]
    assert [x for part in got for x in part] == expected
    assert all(bool((whole[..., DIM:] == -7).all()) for whole in wide)


# case 16, a statement that the strides contradict
def test_a_permuted_view_is_refused() -> None:
    stored = torch.zeros(BLOCKS, HEADS, TOKENS, DIM)
    shown = stored.permute(0, 2, 1, 3)
    with pytest.raises(LayoutMismatch, match="strides"):
        view_cache(page(CacheKind.NHD), [[shown, shown]], kind=CacheKind.NHD)
    with pytest.raises(LayoutMismatch, match="strides"):
        view_cache(page(CacheKind.NHD), [[shown, shown]], kind=CacheKind.NHD, padded=True)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(BLOCKS, TOKENS, HEADS),
        torch.zeros(BLOCKS, TOKENS, HEADS, DIM + 1),
        torch.zeros(BLOCKS, TOKENS, HEADS, DIM, dtype=torch.float16),
        torch.zeros(BLOCKS, TOKENS, HEADS, DIM, dtype=torch.int32),
        torch.zeros(1).expand(BLOCKS, TOKENS, HEADS, DIM),
        torch.zeros(100).as_strided((BLOCKS, TOKENS, HEADS, DIM), (4, 2, 2, 1)),
        torch.zeros(BLOCKS + 1, TOKENS, HEADS, DIM),
    ],
)
def test_other_shapes_dtypes_and_overlaps_are_refused(bad: torch.Tensor) -> None:
    good = torch.zeros(BLOCKS, TOKENS, HEADS, DIM)
    with pytest.raises(TransferError):
        view_cache(page(CacheKind.NHD), [[good, bad]], kind=CacheKind.NHD, padded=True)


def test_order_layers_and_members_have_to_agree() -> None:
    good = torch.zeros(BLOCKS, TOKENS, HEADS, DIM)
    with pytest.raises(LayoutMismatch, match="page order"):
        view_cache(page(CacheKind.NHD), [[good, good]], kind=CacheKind.HND)
    with pytest.raises(LayoutMismatch, match="layers"):
        view_cache(page(CacheKind.NHD, layers=2), [[good, good]], kind=CacheKind.NHD)
    with pytest.raises(LayoutMismatch, match="1 tensors"):
        view_cache(page(CacheKind.NHD), [[good]], kind=CacheKind.NHD)
    narrow = PageLayout(
        layers=1, page_size=2, kv_heads=2, head_dim=2, value_dim=1, order=CacheKind.NHD.order
    )
    with pytest.raises(LayoutMismatch, match="like the keys"):
        view_cache(narrow, [[good]], kind=CacheKind.KV_FIRST_NHD)


# case 17, an address behind the allocation
def test_a_view_past_its_allocation_is_refused() -> None:
    stored = torch.zeros(BLOCKS, TOKENS, HEADS, DIM)
    layout = page(CacheKind.NHD)
    view_cache(layout, [[stored, stored.clone()]], kind=CacheKind.NHD)
    short = torch.zeros(BLOCKS, TOKENS, HEADS, DIM)
    short.untyped_storage().resize_(short.untyped_storage().nbytes() - 4)
    with pytest.raises(SpanError, match="last byte"):
        view_cache(layout, [[stored, short]], kind=CacheKind.NHD)


def test_one_kv_head_may_have_any_stride() -> None:
    layout = PageLayout(
        layers=1, page_size=2, kv_heads=1, head_dim=2, order=CacheKind.NHD.order, value=None
    )
    odd = torch.zeros(100, dtype=torch.bfloat16).as_strided((3, 2, 1, 2), (4, 2, 77, 1))
    view = view_cache(layout, [[odd]], kind=CacheKind.NHD)
    assert view.block_layout.extent("key", 0).shape == (2, 1, 2)


def test_a_latent_cache_gets_a_head_axis() -> None:
    layout = PageLayout(
        layers=2, page_size=2, kv_heads=1, head_dim=6, order=CacheKind.NHD.order, value=None
    )
    layers = [[torch.zeros(BLOCKS, 2, 6, dtype=torch.bfloat16)] for _ in range(2)]
    view = view_cache(layout, layers, kind=CacheKind.LATENT)
    pool = Pool.over(view.tensors, view)
    assert [e.shape for e in pool.layout.extents] == [(2, 1, 6)] * 2
    assert isinstance(pool.layout.extents[0], Extent)
