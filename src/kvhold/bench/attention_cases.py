"""Inputs for attention kernels: pages in shuffled order, everything unused poisoned.

Slots behind a request's length and pages of nobody hold NaN in keys, values and scales: a kernel
that reads one shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from attention._pages import PageTable
from attention._scales import quantise
from attention._view import LayerView
from tiers._layout import PageOrder, ScaleScope

if TYPE_CHECKING:
    from torch import Tensor

NAN_CODE: Final = 0x7F
"""NaN in both FP8 formats."""
SPARE: Final = 3
"""Pages of nobody in each pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination.

    Attributes:
        key: dtype of queries, keys and output.
        value: format of the value codes.
        order: order of the page's axes.
        group: query heads per KV head.
        kv_heads: KV heads.
        head_dim: elements of a head.
        page_size: tokens of a page.
        lengths: tokens of each request, the new ones included.
        fresh: new tokens of each request; None for decode, which has one row for each.
        scope: what one scale of the values covers.
        seed: of the random numbers.
    """

    key: torch.dtype = torch.bfloat16
    value: torch.dtype = torch.float8_e4m3fn
    order: PageOrder = PageOrder.NHD
    group: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    lengths: tuple[int, ...] = (0, 1, 17, 130)
    fresh: tuple[int, ...] | None = None
    scope: ScaleScope = ScaleScope.HEAD
    seed: int = 0


class Inputs(NamedTuple):
    """What a kernel is given.

    Attributes:
        view: one layer's pages.
        table: the requests' pages.
        query: [rows, query_heads, head_dim].
        query_indptr: rows of each request.
    """

    view: LayerView
    table: PageTable
    query: Tensor
    query_indptr: list[int]


def build(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Make the inputs of a case; the same seed makes the same inputs on one kind of device."""
    source = torch.Generator(device=device).manual_seed(case.seed)
    table = shuffled_table(case.lengths, case.page_size, case.seed)
    view = _pages(case, table, source, device)
    rows = (1,) * len(case.lengths) if case.fresh is None else case.fresh
    shape = (sum(rows), case.group * case.kv_heads, case.head_dim)
    query = torch.randn(shape, generator=source, device=device).to(case.key)
    return Inputs(view, table, query, [0, *np.cumsum(rows).tolist()])


def shuffled_table(lengths: tuple[int, ...], page_size: int, seed: int) -> PageTable:
    """A table whose pages are in random order in a pool with some to spare."""
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts) + SPARE
    ids = np.random.default_rng(seed).permutation(total)[: sum(counts)]
    last = [n - (c - 1) * page_size if c else 0 for n, c in zip(lengths, counts, strict=True)]
    starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    return PageTable.raw(starts, ids, last, page_size=page_size, pages=total)


def _pages(
    case: Case, table: PageTable, source: torch.Generator, device: torch.device | str
) -> LayerView:
    """Poisoned pages with the live slots filled."""
    pages = len(table.indices) + SPARE
    inner = (case.page_size, case.kv_heads)
    if case.order is PageOrder.HND:
        inner = (case.kv_heads, case.page_size)
    shape = (pages, *inner, case.head_dim)
    key = torch.full(shape, math.nan, dtype=case.key, device=device)
    codes = torch.full(shape, NAN_CODE, dtype=torch.uint8, device=device)
    scale = _scales(case, shape[:3], source, device)
    view = LayerView(key, codes.view(case.value), case.order, scale, case.scope)
    live = torch.from_numpy(table.slots(table.lengths)).to(device)
    page, place = live // case.page_size, live % case.page_size
    fill = (len(live), case.kv_heads, case.head_dim)
    keys = torch.randn(fill, generator=source, device=device).to(case.key)
    values = torch.randn(fill, generator=source, device=device)
    if case.scope is ScaleScope.TOKEN_HEAD:
        tokens = torch.rand(fill[:2], generator=source, device=device) * 0.05 + 0.005
        view.by_token(scale)[page, place] = tokens
        step = tokens[..., None]
    else:
        step = scale.reshape(1, -1, 1)
    real, _ = quantise(values, step, case.value)
    view.by_token(key).view(torch.int16)[page, place] = keys.view(torch.int16)
    view.by_token(view.value).view(torch.uint8)[page, place] = real.view(torch.uint8)
    return view


def _scales(
    case: Case, slots: tuple[int, ...], source: torch.Generator, device: torch.device | str
) -> Tensor:
    """Scales of a size that puts normal values well inside the format, all of them different."""
    if case.scope is ScaleScope.TOKEN_HEAD:
        return torch.full(slots, math.nan, dtype=torch.float32, device=device)
    count = 1 if case.scope is ScaleScope.TENSOR else case.kv_heads
    return torch.rand(count, generator=source, device=device) * 0.05 + 0.005


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Largest ‖out - ref‖ / ‖ref‖ over rows and heads; a row of zeros must be zeros.

    NaN anywhere counts as infinite.
    """
    difference = (out.to(torch.float64) - reference.to(torch.float64)).norm(dim=-1)
    norm = reference.to(torch.float64).norm(dim=-1)
    ratio = torch.where(norm > 0, difference / norm.clamp_min(1e-300), difference)
    worst = ratio.nan_to_num(math.inf).max() if ratio.numel() else torch.zeros(())
    return float(worst)


def lse_error(lse: Tensor, reference: Tensor) -> float:
    """Largest absolute difference; -inf must meet -inf. NaN counts as infinite."""
    empty = reference == -math.inf
    if bool(((lse == -math.inf) != empty).any()):
        return math.inf
    difference = (lse.to(torch.float64) - reference.to(torch.float64)).abs()
    difference = difference.masked_fill(empty, 0.0).nan_to_num(math.inf)
    return float(difference.max()) if difference.numel() else 0.0
