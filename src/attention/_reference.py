"""Paged attention in plain torch: the oracle of every kernel, and the path on a CPU.

For a query row q over keys k_j and values v_j: s_j = scale * (q . k_j), out = sum_j p_j v_j with
p = softmax(s), and lse = log2(sum_j exp(s_j)). The log-sum-exp is in base 2 everywhere in this
package, as FlashInfer has it (m + log2(d)); times ln 2 it is the natural one. A row that sees no
key has out = 0 and lse = -inf.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from attention._view import LayerView
from tiers._layout import ScaleScope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention._pages import PageTable

LOG2_E = 1.0 / math.log(2.0)
QUERY_ROWS = 256
"""Query rows whose scores are in memory at a time."""


class Attended(NamedTuple):
    """Result of attention over some keys.

    Attributes:
        out: [tokens, query_heads, head_dim].
        lse: [tokens, query_heads] float, log-sum-exp in base 2; -inf where no key was seen.
    """

    out: Tensor
    lse: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Attended:
    """Attention of one request over dense keys and values, in the dtype of the arguments.

    Args:
        query: [tokens, query_heads, head_dim].
        key: [length, kv_heads, head_dim]; kv_heads divides query_heads.
        value: [length, kv_heads, head_dim].
        scale: factor of the scores; 1 / sqrt(head_dim) when None.
        causal: the last query row sees all keys, each row before it one less.
    """
    tokens, heads, dim = query.shape
    length, kv_heads = key.shape[:2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads")
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    grouped = query.reshape(tokens, kv_heads, heads // kv_heads, dim)
    rows = []
    for start in range(0, tokens, QUERY_ROWS):
        limit = start + length - tokens if causal else None
        rows.append(_rows(grouped[start : start + QUERY_ROWS], key, value, factor, limit))
    if not rows:
        return Attended(query.new_zeros(query.shape), query.new_zeros(tokens, heads))
    out = torch.cat([part.out for part in rows]).reshape(tokens, heads, -1)
    return Attended(out, torch.cat([part.lse for part in rows]).reshape(tokens, heads))


def _rows(query: Tensor, key: Tensor, value: Tensor, scale: float, limit: int | None) -> Attended:
    """Some rows of `attend`; with `limit`, row i sees the keys up to and including limit + i."""
    scores = torch.einsum("thgd,lhd->thgl", query, key) * scale
    if limit is not None:
        last = torch.arange(query.shape[0], device=key.device) + limit
        unseen = torch.arange(key.shape[0], device=key.device)[None, :] > last[:, None]
        scores = scores.masked_fill(unseen[:, None, None, :], -math.inf)
    if key.shape[0] == 0:
        empty = scores.new_full(scores.shape[:3], -math.inf)
        return Attended(query.new_zeros((*query.shape[:3], value.shape[-1])), empty)
    lse = torch.logsumexp(scores, dim=-1)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    weights = torch.exp(scores - shift[..., None])
    return Attended(torch.einsum("thgl,lhd->thgd", weights, value), lse * LOG2_E)


def dequantise(view: LayerView, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Real values of all slots, [pages, page_size, kv_heads, head_dim] (axes by token)."""
    codes = view.by_token(value).to(dtype)
    if view.scope is ScaleScope.TOKEN_HEAD:
        return codes * view.by_token(view.scale).to(dtype)[..., None]
    return codes * view.scale.to(dtype).reshape(1, 1, -1, 1)


def gather(
    view: LayerView, table: PageTable, request: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys and dequantised values of one request, each [length, kv_heads, head_dim].

    Slots behind the request's length are not read.
    """
    ids = torch.from_numpy(table.pages_of(request)).to(view.key.device, torch.int64)
    length = table.lengths[request]
    picked = LayerView(
        view.key[ids],
        view.value.view(torch.uint8)[ids].view(view.value.dtype),
        view.order,
        view.scale[ids] if view.scope is ScaleScope.TOKEN_HEAD else view.scale,
        view.scope,
    )
    key = view.by_token(picked.key).to(dtype).flatten(0, 1)[:length]
    return key, dequantise(picked, picked.value, dtype).flatten(0, 1)[:length]


def decode(
    query: Tensor,
    view: LayerView,
    table: PageTable,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Attended:
    """One new token for each request: query [batch, query_heads, head_dim], row i of request i."""
    starts = list(range(table.batch + 1))
    return prefill(query, starts, view, table, scale=scale, causal=False, dtype=dtype)


def prefill(
    query: Tensor,
    query_indptr: Sequence[int],
    view: LayerView,
    table: PageTable,
    *,
    scale: float | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Attended:
    """New tokens over their request's pages, which hold the new tokens' K and V already.

    Args:
        query: [tokens, query_heads, head_dim]; rows query_indptr[i]:query_indptr[i + 1] are the
            last tokens of request i.
        query_indptr: batch + 1 rising row numbers.
        view: the layer's pages.
        table: the requests' pages.
        scale: factor of the scores; 1 / sqrt(head_dim) when None.
        causal: whether a token sees no token after it.
        dtype: float32 or float64, in which all is computed and returned.
    """
    outs, sums = [], []
    for request in range(table.batch):
        rows = query[query_indptr[request] : query_indptr[request + 1]].to(dtype)
        key, value = gather(view, table, request, dtype)
        part = attend(rows, key, value, scale=scale, causal=causal)
        outs.append(part.out)
        sums.append(part.lse)
    if not outs:
        return Attended(query.to(dtype), query.new_zeros(query.shape[:2], dtype=dtype))
    return Attended(torch.cat(outs), torch.cat(sums))


def merge(*parts: Attended) -> Attended:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    Source of the formula: FlashAttention (arXiv:2205.14135), section 3.1; here in base 2.
    """
    sums = torch.stack([part.lse for part in parts])
    peak = sums.amax(dim=0)
    shift = peak.masked_fill(peak == -math.inf, 0.0)
    weights = torch.exp2(sums - shift)
    total = weights.sum(dim=0)
    divisor = total.masked_fill(total == 0.0, 1.0)
    outs = torch.stack([part.out for part in parts])
    out = (outs * (weights / divisor)[..., None]).sum(dim=0)
    return Attended(out, torch.log2(total) + shift)
