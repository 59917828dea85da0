"""Triton kernels over paged 16-bit keys and FP8 values: decode in splits, prefill, append.

They take any order of the page's axes (by strides), any page size, any head_dim that is a multiple
of 16, any number of query heads per KV head, e4m3fn and e5m2, and every scope of scales.

In the second product P and V are float16, which holds both FP8 formats exactly; widening FP8 to
float16 is one instruction for two elements. Scales per token are folded into P relative to the
largest of their tile, so that their size cannot leave float16's range.

Importing this module needs Triton.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
import triton

from attention import _jit
from attention._scales import LIMITS
from tiers._layout import ScaleScope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention._view import LayerView

    Table: TypeAlias = tuple[Tensor, Tensor, Tensor]

LOG2_E: Final = 1.0 / math.log(2.0)
ROWS_MIN: Final = 16
"""Rows of the smallest matrix product."""
ROWS_MAX: Final = 64
"""Query heads of one KV head that one decode program takes at most."""
SPLIT_TOKENS_MIN: Final = 256
"""Tokens that a split has at least: less does not pay for the merge."""
SPLITS_MAX: Final = 128
JOINED_AT_ONCE: Final = 32
"""Splits that a program of 4 warps joins at a time: 32 registers of a thread at head_dim 128."""
START_TOKENS: Final = 64
"""What starting a program and merging its part cost, in tokens of its reading."""

TWO_WARPS: Final = 1.015
"""Time of programs of 2 warps relative to those of 4, all places taken: 202.8 us to 199.9."""


class Tiles(NamedTuple):
    """Shape of a program.

    Attributes:
        tokens: keys of one step.
        warps: warps of a program.
        stages: steps in the pipeline.
        rows: rows of a prefill program.
        resident: programs that a processor of compute capability 9.0 runs at once: its 64 Ki
            registers or its 227 KiB of shared memory divided by what the compiler takes.
        pace: time that reading takes with every place taken, relative to the fastest shape.
    """

    tokens: int = 64
    warps: int = 4
    stages: int = 5
    rows: int = 64
    resident: int = 3
    pace: float = 1.0


class Partial(NamedTuple):
    """Results of the splits before they are joined.

    Attributes:
        out: float32 [batch, splits, query_heads, head_dim].
        lse: float32 [batch, splits, query_heads].
        done: int32, one for each request and program of it, 0 between launches: the program that is
            its last to be done joins the splits. None to join them in a launch of its own.
    """

    out: Tensor
    lse: Tensor
    done: Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        splits: int,
        heads: int,
        dim: int,
        device: torch.device,
        *,
        fused: bool = False,
    ) -> Partial | None:
        """Room for the splits; None where there is one, which needs none.

        Args:
            batch: requests.
            splits: parts of each.
            heads: query heads.
            dim: elements of a head.
            device: where.
            fused: join the splits in the launch that computes them.
        """
        if splits == 1:
            return None
        shape = (batch, splits, heads)
        return cls(
            torch.empty((*shape, dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.zeros(batch * heads, dtype=torch.int32, device=device) if fused else None,
        )


def prefill_tiles(head_dim: int) -> Tiles:
    """The shape of prefill programs that measured best on an H200 (docs/attention.md)."""
    if head_dim > 128:
        return Tiles(tokens=32, rows=64)
    return Tiles(tokens=128, warps=8, rows=128)


def decode_tiles(head_dim: int, group: int, *, by_token: bool) -> tuple[Tiles, ...]:
    """The shapes of decode programs that `schedule` chooses from.

    The page numbers are loads of their own, so a tile takes two stages: 5 of them keep two tiles on
    the way. Two shapes measured best on an H200 at head_dim 128, each with all programs running at
    once: 3 programs of 4 warps on a processor (199.9 us for 8 requests of 32768 tokens in 6 splits),
    and 4 of 2 warps (202.8 us in 8 splits). Which one fills the device depends on the batch.

    Args:
        head_dim: elements of a head.
        group: query heads per KV head.
        by_token: whether each token has scales of its own, which take registers.
    """
    if decode_rows(group) > ROWS_MIN:
        return (Tiles(tokens=32 if head_dim > 128 else 64, resident=2),)
    if head_dim > 128:
        return (Tiles(tokens=32),)
    if by_token:
        return (Tiles(warps=2, resident=4, pace=TWO_WARPS),)
    small = head_dim <= 64
    return Tiles(resident=4 if small else 3), Tiles(
        warps=2, resident=6 if small else 4, pace=TWO_WARPS
    )


def decode_rows(group: int) -> int:
    """Rows of a decode program: the query heads of one KV head, or a part of them."""
    rows: int = triton.next_power_of_2(group)
    return min(max(rows, ROWS_MIN), ROWS_MAX)


def schedule(
    lengths: list[int], programs: int, processors: int, choices: Sequence[Tiles]
) -> tuple[Tiles, int]:
    """The shape of program and the splits of each request that take least time by the model.

    The model: places = processors x resident. Programs that fit into the places all run at once, and
    the longest decides; more of them run in waves, or as places become free. Half of the idle time
    is lost, since the programs that still run then get more of the memory's bandwidth.

    Args:
        lengths: tokens of each request.
        programs: programs of one request in one split: KV heads x blocks of query heads.
        processors: multiprocessors of the device.
        choices: shapes to choose from.
    """
    longest, total = max(lengths, default=0), sum(lengths) * programs
    if not total:
        return choices[0], 1
    most = min(max(longest // SPLIT_TOKENS_MIN, 1), SPLITS_MAX)

    def cost(choice: tuple[Tiles, int]) -> float:
        tiles, splits = choice
        places = processors * tiles.resident
        chunk, ideal = longest / splits, total / places
        waves = -(-len(lengths) * programs * splits // places)
        took = min(waves * chunk, ideal + chunk)
        return tiles.pace * (1 + (took / ideal - 1) / 2 + START_TOKENS / chunk)

    return min(itertools.product(choices, range(1, most + 1)), key=cost)


def decode_pages(
    view: LayerView,
    table: Table,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    sm_scale: float,
    splits: int,
    partial: Partial | None,
    tiles: Tiles,
) -> None:
    """Decode one token of each request, on the current stream.

    Args:
        view: one layer's pages.
        table: indptr, indices and last_page_len of the requests, int32 on the device.
        query: [batch, query_heads, head_dim] of the key's dtype.
        out: as query, written.
        lse: float32 [batch, query_heads], written: base 2, -inf for length 0.
        sm_scale: factor of the scores, positive.
        splits: parts that every request's tokens are read in.
        partial: room for as many splits, None for one.
        tiles: shape of a program.
    """
    batch, heads, dim = query.shape
    group = heads // view.kv_heads
    rows = decode_rows(group)
    blocks = -(-group // rows)
    key, value = view.by_token(view.key), view.by_token(view.value)
    whole = partial is None
    done = None if partial is None else partial.done
    many = triton.next_power_of_2(splits) if done is not None else 0
    _jit.decode[view.kv_heads * blocks, batch, splits](
        query,
        key,
        value,
        view.scale,
        *table,
        out if partial is None else partial.out,
        lse if partial is None else partial.lse,
        sm_scale * LOG2_E,
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        *_scale_strides(view),
        1 if whole else splits,
        heads,
        group=group,
        done=lse if done is None else done,
        joined=out,
        joined_lse=lse,
        rows=rows,
        blocks=blocks,
        dim=dim,
        width=triton.next_power_of_2(dim),
        page=view.page_size,
        tokens=tiles.tokens,
        by_token=view.scope is ScaleScope.TOKEN_HEAD,
        stages=tiles.stages,
        many=many,
        few=min(max(many, 1), JOINED_AT_ONCE),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if partial is not None and done is None:
        _merge(partial, out, lse)


def _merge(partial: Partial, out: Tensor, lse: Tensor) -> None:
    """Join splits in a launch of its own."""
    batch, splits, heads, dim = partial.out.shape
    _jit.merge[batch, heads](
        partial.out,
        partial.lse,
        out,
        lse,
        splits,
        heads,
        many=triton.next_power_of_2(splits),
        dim=dim,
        width=triton.next_power_of_2(dim),
    )


def prefill_pages(
    view: LayerView,
    table: Table,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    starts: Tensor,
    sm_scale: float,
    fresh_max: int,
    causal: bool,
    tiles: Tiles,
) -> None:
    """Attention of new tokens over their request's pages, which hold them too.

    Args:
        view: one layer's pages.
        table: indptr, indices and last_page_len of the requests, int32 on the device.
        query: [rows, query_heads, head_dim] of the key's dtype.
        out: as query, written.
        lse: float32 [rows, query_heads], written: base 2.
        starts: int32 [batch + 1], rows of each request in the query.
        sm_scale: factor of the scores, positive.
        fresh_max: most new tokens of a request.
        causal: whether a token sees no token after it.
        tiles: shape of a program.
    """
    heads, dim = query.shape[1:]
    group = heads // view.kv_heads
    batch = starts.shape[0] - 1
    key, value = view.by_token(view.key), view.by_token(view.value)
    _jit.prefill[-(-fresh_max * group // tiles.rows), view.kv_heads, batch](
        query,
        key,
        value,
        view.scale,
        *table,
        starts,
        out,
        lse,
        sm_scale * LOG2_E,
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        *_scale_strides(view),
        heads,
        group=group,
        rows=tiles.rows,
        dim=dim,
        width=triton.next_power_of_2(dim),
        page=view.page_size,
        tokens=tiles.tokens,
        by_token=view.scope is ScaleScope.TOKEN_HEAD,
        causal=causal,
        stages=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def append_pages(
    view: LayerView,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    lost: Tensor,
    *,
    dynamic: bool,
) -> None:
    """Write new tokens into pages: keys bit by bit, values as codes.

    Args:
        view: one layer's pages, written; with `dynamic` its scales too.
        key: [tokens, kv_heads, head_dim] of the pages' key dtype.
        value: [tokens, kv_heads, head_dim].
        slots: int64 [tokens], page * page_size + place.
        lost: int64 scalar, increased by the values that were clamped or not finite.
        dynamic: take each token's scale from its own values.
    """
    tokens, heads, dim = key.shape
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
    bits = key.view(torch.int16)
    key_pages = view.by_token(view.key).view(torch.int16)
    value_pages = view.by_token(view.value)
    _jit.append[tokens, heads](
        bits,
        value,
        slots,
        key_pages,
        value_pages,
        view.scale,
        lost,
        *bits.stride()[:2],
        *value.stride()[:2],
        *key_pages.stride()[:3],
        *value_pages.stride()[:3],
        *_scale_strides(view),
        limit=LIMITS[view.value.dtype],
        dim=dim,
        width=triton.next_power_of_2(dim),
        page=view.page_size,
        by_token=view.scope is ScaleScope.TOKEN_HEAD,
        dynamic=dynamic,
        num_warps=1,
    )


def _scale_strides(view: LayerView) -> tuple[int, int, int]:
    """Strides of the scales by page, slot and head; 0 where they do not differ."""
    if view.scope is ScaleScope.TOKEN_HEAD:
        page, slot, head = view.by_token(view.scale).stride()
        return page, slot, head
    return 0, 0, 1 if view.scope is ScaleScope.HEAD else 0
