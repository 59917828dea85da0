"""The Triton kernels in Triton's interpreter, on the CPU, against the oracle."""

import importlib
import os
from types import ModuleType
from typing import Any

import pytest
import torch

from attention import _reference
from attention._scales import ValueScales, quantise, scale_of
from attention.cache import PagedKVCache
from kvhold.bench.attention_cases import Case, Inputs, build, lse_error, relative_error
from tiers._layout import PageOrder, ScaleScope

SCOPES = (ScaleScope.TENSOR, ScaleScope.HEAD, ScaleScope.TOKEN_HEAD)


pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is there: tests/gpu runs the kernels"
)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("attention.kernels")


def table(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    parts = (inputs.table.indptr, inputs.table.indices, inputs.table.last_page_len)
    return tuple(map(torch.from_numpy, parts))


def poisoned(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(like, torch.nan)
    return out, torch.full(like.shape[:2], torch.nan, dtype=torch.float32)


def run_decode(
    kernels: ModuleType, inputs: Inputs, splits: int, *, fused: bool = False
) -> tuple[float, float]:
    batch, heads, dim = inputs.query.shape
    partial = kernels.Partial.empty(batch, splits, heads, dim, inputs.query.device, fused=fused)
    out, lse = poisoned(inputs.query)
    for _ in range(2 if fused else 1):  # what counts the splits is as before afterwards
        out.fill_(torch.nan)
        launch_decode(kernels, inputs, splits, partial, (out, lse))
        assert partial is None or partial.done is None or not partial.done.any()
    expected = _reference.decode(inputs.query, inputs.view, inputs.table)
    return relative_error(out, expected.out), lse_error(lse, expected.lse)


def launch_decode(
    kernels: ModuleType,
    inputs: Inputs,
    splits: int,
    partial: Any,
    into: tuple[torch.Tensor, torch.Tensor],
) -> None:
    kernels.decode_pages(
        inputs.view,
        table(inputs),
        inputs.query,
        *into,
        sm_scale=inputs.query.shape[2] ** -0.5,
        splits=splits,
        partial=partial,
        tiles=kernels.Tiles(tokens=32),
    )


def run_prefill(kernels: ModuleType, inputs: Inputs, *, causal: bool) -> tuple[float, float]:
    out, lse = poisoned(inputs.query)
    starts = torch.tensor(inputs.query_indptr, dtype=torch.int32)
    kernels.prefill_pages(
        inputs.view,
        table(inputs),
        inputs.query,
        out,
        lse,
        starts=starts,
        sm_scale=inputs.query.shape[2] ** -0.5,
        fresh_max=int(starts.diff().max()),
        causal=causal,
        tiles=kernels.Tiles(tokens=32, rows=16),
    )
    expected = _reference.prefill(
        inputs.query, inputs.query_indptr, inputs.view, inputs.table, causal=causal
    )
    return relative_error(out, expected.out), lse_error(lse, expected.lse)


# case 60 and case 61, K16/V8 decode is right with NaN in every unused slot
@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("shape", [(16, 4, 1), (1, 1, 3), (5, 7, 2), (64, 3, 2)])
def test_decode(
    kernels: ModuleType, order: PageOrder, scope: ScaleScope, shape: tuple[int, int, int]
) -> None:
    page_size, group, splits = shape
    case = Case(
        key=torch.float16,
        order=order,
        scope=scope,
        page_size=page_size,
        group=group,
        head_dim=64,
        lengths=(0, 1, 33, 70),
    )
    error, sums = run_decode(kernels, build(case), splits)
    assert error < 2e-3
    assert sums < 1e-3


@pytest.mark.parametrize(
    ("group", "splits", "lengths", "head_dim"),
    [
        (1, 2, (0, 1, 33, 70), 64),
        (1, 5, (130, 0, 64), 128),
        (1, 40, (1290,), 64),  # more than are joined at once, and most of the last are empty
        (4, 3, (0, 97, 31), 48),
        (20, 2, (40, 7), 64),  # two rows of programs for one KV head
        (80, 3, (70,), 16),
    ],
)
def test_the_program_that_is_done_last_joins_the_splits(
    kernels: ModuleType, group: int, splits: int, lengths: tuple[int, ...], head_dim: int
) -> None:
    case = Case(key=torch.float16, group=group, head_dim=head_dim, kv_heads=2, lengths=lengths)
    error, sums = run_decode(kernels, build(case), splits, fused=True)
    assert error < 2e-3
    assert sums < 1e-3


@pytest.mark.parametrize("first", [0, 1])
def test_a_join_that_comes_too_early_shows(kernels: ModuleType, first: int) -> None:
    inputs = build(Case(key=torch.float16, head_dim=64, kv_heads=1, lengths=(400,)))
    batch, heads, dim = inputs.query.shape
    partial = kernels.Partial.empty(batch, 4, heads, dim, inputs.query.device, fused=True)
    partial.out.fill_(torch.nan)
    partial.done.fill_(first)  # as if one split had been done already
    out, lse = poisoned(inputs.query)
    launch_decode(kernels, inputs, 4, partial, (out, lse))
    assert bool(out.isnan().any()) is bool(first)


def test_splits_are_joined_apart_unless_asked_for(kernels: ModuleType) -> None:
    device = torch.device("cpu")
    assert kernels.Partial.empty(2, 3, 4, 64, device).done is None
    assert kernels.Partial.empty(2, 3, 4, 64, device, fused=True).done.tolist() == [0] * 8
    assert kernels.Partial.empty(2, 1, 4, 64, device, fused=True) is None


# The interpreter multiplies no bfloat16; tests/gpu has both 16-bit types.
@pytest.mark.parametrize("value", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_decode_of_both_formats(kernels: ModuleType, value: torch.dtype) -> None:
    case = Case(key=torch.float16, value=value, head_dim=48, group=20, kv_heads=1, lengths=(40, 7))
    error, sums = run_decode(kernels, build(case), 2)
    assert error < 2e-3
    assert sums < 1e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("order", list(PageOrder))
def test_prefill_over_a_prefix(
    kernels: ModuleType, causal: bool, scope: ScaleScope, order: PageOrder
) -> None:
    case = Case(
        key=torch.float16,
        order=order,
        scope=scope,
        page_size=4,
        group=3,
        head_dim=32,
        lengths=(0, 5, 33, 70),
        fresh=(0, 5, 2, 37),
    )
    error, sums = run_prefill(kernels, build(case), causal=causal)
    assert error < 2e-3
    assert sums < 1e-3


def test_damage_shows(kernels: ModuleType) -> None:
    """Controls: the comparison fails when a page of V, a page of K or the scale is wrong."""
    case = Case(key=torch.float16, head_dim=32, page_size=8, lengths=(20,))
    for damage in ("value", "key", "scale"):
        inputs = build(case)
        out, lse = poisoned(inputs.query)
        expected = _reference.decode(inputs.query, inputs.view, inputs.table)
        page = int(inputs.table.pages_of(0)[1])
        if damage == "value":
            inputs.view.value.view(torch.uint8)[page] ^= 0x80
        elif damage == "key":
            inputs.view.key[page] += 0.5
        else:
            inputs.view.scale.mul_(2)
        kernels.decode_pages(
            inputs.view,
            table(inputs),
            inputs.query,
            out,
            lse,
            sm_scale=32**-0.5,
            splits=1,
            partial=None,
            tiles=kernels.Tiles(tokens=16),
        )
        assert relative_error(out, expected.out) > 3e-2
        assert (lse_error(lse, expected.lse) > 2e-3) == (damage == "key")


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize(
    "scales", [ValueScales.static([[2.0**-6, 2.0**-7]]), ValueScales.per_token(), None]
)
def test_append_writes_what_the_plain_path_writes(
    kernels: ModuleType, order: PageOrder, scales: ValueScales | None
) -> None:
    cache = PagedKVCache(
        layers=1,
        pages=4,
        page_size=4,
        kv_heads=2,
        head_dim=16,
        key=torch.float16,
        order=order,
        scales=scales,
    )
    view = cache.layer(0)
    view.key.fill_(torch.nan)
    torch.manual_seed(3)
    key = torch.randn(3, 2, 16).to(torch.float16)
    # Normal codes under scales that are powers of two: the interpreter's own cast rounds wrongly
    # between codes and below the normal ones. tests/gpu has values off the grid.
    unit = 1.0 if scales is None else 2.0**-6
    grid = torch.randint(0x08, 0x58, (3, 2, 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    value = grid.to(torch.float16) * unit
    value[:, :, 5] = 448 * unit
    value[0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    slots = torch.tensor([5, 6, 15])
    lost = torch.zeros((), dtype=torch.int64)
    kernels.append_pages(
        view, key, value, slots, lost, dynamic=scales is not None and not scales.values is not None
    )
    page, place = slots // 4, slots % 4
    found = view.by_token(view.key)[page, place]
    assert torch.equal(found, key)
    step = (
        scale_of(value, (2,), torch.float8_e4m3fn)[..., None]
        if view.scope is ScaleScope.TOKEN_HEAD
        else view.scale.reshape(1, -1, 1)
    )
    codes, expected = quantise(value, step, torch.float8_e4m3fn)
    found = view.by_token(view.value)[page, place]
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert int(lost) == int(expected)
    untouched = torch.ones(16, dtype=torch.bool)
    untouched[slots] = False
    rows = view.by_token(view.key).reshape(16, 2, 16)
    assert torch.isnan(rows[untouched]).all()


def test_append_reads_rows_in_any_strides(kernels: ModuleType) -> None:
    torch.manual_seed(4)
    key = torch.randn(3, 16, 2).to(torch.float16).transpose(1, 2)
    value = (2.0 ** torch.arange(-3, 5).repeat(12)).to(torch.float16).view(3, 16, 2).transpose(1, 2)
    cache = PagedKVCache(layers=1, pages=1, page_size=4, kv_heads=2, head_dim=16, key=torch.float16)
    view, slots = cache.layer(0), torch.arange(3)
    lost = torch.zeros((), dtype=torch.int64)
    kernels.append_pages(view, key, value, slots, lost, dynamic=False)
    assert torch.equal(view.key[0, :3], key)
    assert torch.equal(view.value[0, :3].to(torch.float16), value)


H200 = 132


@pytest.mark.parametrize(
    ("lengths", "warps", "splits"),
    [
        ([4096] * 64, 2, 1),  # 512 programs of 528 places; 4 warps have 396 places
        ([32768] * 8, 4, 6),  # 384 of 396
        ([131072], 4, 49),  # 392 of 396
    ],
)
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_measured_batches_get_the_shape_that_measured_best(
    kernels: ModuleType, lengths: list[int], warps: int, splits: int, group: int
) -> None:
    choices = kernels.decode_tiles(128, group, by_token=False)
    tiles, found = kernels.schedule(lengths, 8, H200, choices)
    assert (tiles.tokens, tiles.warps, tiles.stages, found) == (64, warps, 5, splits)
    programs = len(lengths) * 8 * splits
    assert 0.96 < programs / (H200 * tiles.resident) <= 1  # one wave, and a full one


@pytest.mark.parametrize("head_dim", [16, 64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 16, 17, 64, 100])
@pytest.mark.parametrize("by_token", [False, True])
def test_splits_stay_worth_their_merge(
    kernels: ModuleType, head_dim: int, group: int, by_token: bool
) -> None:
    choices = kernels.decode_tiles(head_dim, group, by_token=by_token)
    assert kernels.schedule([], 8, H200, choices)[1] == 1
    assert kernels.schedule([0, 0], 8, H200, choices)[1] == 1
    assert kernels.schedule([100] * 4, 8, H200, choices)[1] == 1  # too short to split
    for batch in (1, 7, 64, 300):
        _, splits = kernels.schedule([4096] * batch, 8, H200, choices)
        assert 1 <= splits <= 4096 // kernels.SPLIT_TOKENS_MIN
    # One long request among short ones is split, though there are programs for every place.
    assert kernels.schedule([100] * 99 + [131072], 8, H200, choices)[1] > 16


def test_shapes_have_rows_for_every_query_head(kernels: ModuleType) -> None:
    for group, rows in ((1, 16), (16, 16), (17, 32), (64, 64), (100, 64)):
        assert kernels.decode_rows(group) == rows
    assert len(kernels.decode_tiles(128, 17, by_token=False)) == 1  # 2 warps would spill
    assert kernels.prefill_tiles(128).rows == 128
    assert kernels.prefill_tiles(256).tokens == 32
