"""The Triton kernels themselves; `attention.kernels` says what they compute and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

# Counts and the strides of scales do not change the code: one compilation serves all of them.
FREE_SCALES = ("s_page", "s_slot", "s_head")
FREE_DECODE = (*FREE_SCALES, "splits", "heads", "group")
FREE_MERGE = ("splits", "heads")
FREE_PREFILL = (*FREE_SCALES, "heads", "group")
FREE_APPEND = FREE_SCALES


@triton.jit  # type: ignore[untyped-decorator]
def _length(
    indptr: tl.tensor, last: tl.tensor, request: tl.tensor, page: tl.constexpr
) -> tl.tensor:
    """First page of a request in the table, its pages, its tokens."""
    first = tl.load(indptr + request)
    count = tl.load(indptr + request + 1) - first
    tokens = (count - 1) * page + tl.load(last + request)
    return first, count, tl.where(count > 0, tokens, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_pages(  # noqa: PLR0917 - a device function
    indices: tl.tensor, first: tl.tensor, count: tl.tensor, start: tl.tensor, tokens: tl.constexpr,
    page: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Page of each of `tokens` keys from `start` on (a multiple of tokens), int64."""
    if tokens % page == 0:
        many: tl.constexpr = tokens // page
        at = start // page + tl.arange(0, many)
        ids = tl.load(indices + first + at, mask=at < count, other=0).to(tl.int64)
        return tl.reshape(tl.broadcast_to(ids[:, None], [many, page]), [tokens])
    else:  # noqa: RET505 - Triton compiles one branch only if both are written out
        at = (start + tl.arange(0, tokens)) // page
        return tl.load(indices + first + at, mask=at < count, other=0).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(
    base: tl.tensor,
    held: tl.tensor,
    whole: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Rows [tokens, width] at the pointers `base`; 0 where `held` is not or behind `dim`.

    With `whole` every row is held: the loads of full rows have no mask then.
    """
    d = tl.arange(0, width)
    if whole and dim == width:
        return tl.load(base[:, None] + d[None, :])
    elif dim == width:  # noqa: RET505 - Triton compiles one branch only if all are written out
        return tl.load(base[:, None] + d[None, :], mask=held[:, None], other=0.0)
    else:
        return tl.load(
            base[:, None] + d[None, :], mask=held[:, None] & (d < dim)[None, :], other=0.0
        )


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # noqa: PLR0917 - a device function
    key: tl.tensor, value: tl.tensor, scale: tl.tensor, indices: tl.tensor, first: tl.tensor,
    count: tl.tensor, start: tl.tensor, end: tl.tensor, kv: tl.tensor, k_page: tl.tensor,
    k_slot: tl.tensor, k_head: tl.tensor, v_page: tl.tensor, v_slot: tl.tensor, v_head: tl.tensor,
    s_page: tl.tensor, s_slot: tl.tensor, s_head: tl.tensor, whole: tl.constexpr,
    tokens: tl.constexpr, page: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    by_token: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Keys, values and scales of `tokens` keys from `start` on; zeros from `end` on."""
    at = start + tl.arange(0, tokens)
    pages = _tile_pages(indices, first, count, start, tokens, page)
    slot = at % page
    held = at < end
    keys = _rows(key + pages * k_page + slot * k_slot + kv * k_head, held, whole, dim, width)
    values = _rows(value + pages * v_page + slot * v_slot + kv * v_head, held, whole, dim, width)
    scales = at
    if by_token:
        s_at = pages * s_page + slot * s_slot + kv * s_head
        scales = tl.load(scale + s_at, mask=held, other=0.0)
    return keys, values, scales


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # noqa: PLR0917 - a device function
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, scales: tl.tensor, seen: tl.tensor,
    peak: tl.tensor, total: tl.tensor, acc: tl.tensor, factor: tl.tensor, whole: tl.constexpr,
    by_token: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One step of the softmax: keys [tokens, dim], values [tokens, dim], seen [rows, tokens].

    `factor` is positive. With `whole` every row sees every key.
    """
    scores = tl.dot(query, tl.trans(keys))
    if not whole:
        scores = tl.where(seen, scores, -float("inf"))
    above = tl.maximum(peak, tl.max(scores, 1) * factor)
    shift = above
    if not whole:
        shift = tl.where(above == -float("inf"), 0.0, above)
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    if by_token:
        largest = tl.maximum(tl.max(scales, 0), 1e-30)
        weights = weights * (scales / largest)[None, :]
        acc += tl.dot(weights.to(tl.float16), values.to(tl.float16)) * largest
    else:
        acc = tl.dot(weights.to(tl.float16), values.to(tl.float16), acc)
    return above, total, acc


@triton.jit(do_not_specialize=FREE_DECODE)  # type: ignore[untyped-decorator]
def decode(  # noqa: PLR0917 - a kernel
    query: tl.tensor, key: tl.tensor, value: tl.tensor, scale: tl.tensor, indptr: tl.tensor,
    indices: tl.tensor, last: tl.tensor, out: tl.tensor, lse: tl.tensor, factor: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, k_page: tl.tensor, k_slot: tl.tensor, k_head: tl.tensor,
    v_page: tl.tensor, v_slot: tl.tensor, v_head: tl.tensor, s_page: tl.tensor, s_slot: tl.tensor,
    s_head: tl.tensor, splits: tl.tensor, heads: tl.tensor, group: tl.tensor, done: tl.tensor,
    joined: tl.tensor, joined_lse: tl.tensor, rows: tl.constexpr, blocks: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, page: tl.constexpr, tokens: tl.constexpr,
    by_token: tl.constexpr, stages: tl.constexpr, many: tl.constexpr, few: tl.constexpr,
) -> None:  # fmt: skip
    """One split of one request and KV head: out [batch, splits, heads, dim], lse without dim.

    With `many` above 0 the program that is the last of its request and KV head to be done joins the
    splits. `done` counts them, starts at 0 and is 0 again afterwards.
    """
    kv = tl.program_id(0) // blocks
    row = (tl.program_id(0) % blocks) * rows + tl.arange(0, rows)
    request = tl.program_id(1)
    first, count, length = _length(indptr, last, request, page)
    chunk = tl.cdiv(tl.cdiv(length, splits), tokens) * tokens
    begin = tl.minimum(tl.program_id(2) * chunk, length)
    end = tl.minimum(begin + chunk, length)
    middle = begin + (end - begin) // tokens * tokens
    d = tl.arange(0, width)
    n = tl.arange(0, tokens)
    head = kv * group + row
    live = row < group
    inside = d < dim
    at = request.to(tl.int64) * q_row + head * q_head
    q = tl.load(query + at[:, None] + d[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    peak = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, width], tl.float32)
    for start in tl.range(begin, middle, tokens, num_stages=stages):
        keys, values, scales = _tile(
            key, value, scale, indices, first, count, start, end, kv,
            k_page, k_slot, k_head, v_page, v_slot, v_head, s_page, s_slot, s_head,
            whole=True, tokens=tokens, page=page, dim=dim, width=width, by_token=by_token,
        )  # fmt: skip
        peak, total, acc = _step(
            q, keys, values, scales, n[None, :], peak, total, acc, factor,
            whole=True, by_token=by_token,
        )  # fmt: skip
    for start in tl.range(middle, end, tokens, num_stages=1):
        keys, values, scales = _tile(
            key, value, scale, indices, first, count, start, end, kv,
            k_page, k_slot, k_head, v_page, v_slot, v_head, s_page, s_slot, s_head,
            whole=False, tokens=tokens, page=page, dim=dim, width=width, by_token=by_token,
        )  # fmt: skip
        seen = (start + n < end)[None, :]
        peak, total, acc = _step(
            q, keys, values, scales, seen, peak, total, acc, factor, whole=False, by_token=by_token
        )
    if not by_token:
        acc = acc * tl.load(scale + kv * s_head)
    place = (request.to(tl.int64) * splits + tl.program_id(2)) * heads + head
    norm = tl.where(total > 0, total, 1.0)
    tl.store(lse + place, peak + tl.log2(norm), mask=live)
    result = (acc / norm[:, None]).to(out.dtype.element_ty)
    where = place[:, None] * dim + d[None, :]
    tl.store(out + where, result, mask=live[:, None] & inside[None, :])
    if many > 0:
        _last(
            done, out, lse, joined, joined_lse, request, kv, splits, heads, group, rows=rows,
            blocks=blocks, many=many, few=few, dim=dim, width=width,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _last(  # noqa: PLR0917 - a device function
    done: tl.tensor, part: tl.tensor, sums: tl.tensor, out: tl.tensor, lse: tl.tensor,
    request: tl.tensor, kv: tl.tensor, splits: tl.tensor, heads: tl.tensor, group: tl.tensor,
    rows: tl.constexpr, blocks: tl.constexpr, many: tl.constexpr, few: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Say that a split is done; join all of them if it was the last of its request and rows."""
    tl.debug_barrier()  # one thread counts for all: their stores come before
    mine = done + request * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(mine, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(mine, 0)
        base = (tl.program_id(0) % blocks) * rows
        for own in range(base, tl.minimum(base + rows, group)):
            _join(
                part, sums, out, lse, request.to(tl.int64), kv * group + own, splits, heads,
                many=many, few=few, dim=dim, width=width,
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # noqa: PLR0917 - a device function
    part: tl.tensor, sums: tl.tensor, out: tl.tensor, lse: tl.tensor, request: tl.tensor,
    head: tl.tensor, splits: tl.tensor, heads: tl.tensor, many: tl.constexpr, few: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Join the splits of one request and query head, `few` at a time, as they are in the L2 cache."""
    s = tl.arange(0, many)
    d = tl.arange(0, width)
    first = request * splits
    at = sums + (first + s) * heads + head
    found = tl.load(at, mask=s < splits, other=-float("inf"), cache_modifier=".cg")
    peak = tl.max(found, 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp2(found - shift), 0)
    acc = tl.zeros([width], tl.float32)
    for start in tl.range(0, splits, few):
        place = start + tl.arange(0, few)
        live = place < splits
        row = (first + place) * heads + head
        sum_ = tl.load(sums + row, mask=live, other=-float("inf"), cache_modifier=".cg")
        fill = live[:, None] & (d < dim)[None, :]
        rows = part + row[:, None] * dim + d[None, :]
        parts = tl.load(rows, mask=fill, other=0.0, cache_modifier=".cg")
        acc += tl.sum(parts * tl.exp2(sum_ - shift)[:, None], 0)
    norm = tl.where(total > 0, total, 1.0)
    target = request * heads + head
    tl.store(out + target * dim + d, (acc / norm).to(out.dtype.element_ty), mask=d < dim)
    tl.store(lse + target, peak + tl.log2(norm))


@triton.jit(do_not_specialize=FREE_MERGE)  # type: ignore[untyped-decorator]
def merge(  # noqa: PLR0917 - a kernel
    part: tl.tensor, sums: tl.tensor, out: tl.tensor, lse: tl.tensor, splits: tl.tensor,
    heads: tl.tensor, many: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Join the splits of one request and query head."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, many)
    d = tl.arange(0, width)
    place = (request * splits + s) * heads + head
    live = s < splits
    found = tl.load(sums + place, mask=live, other=-float("inf"))
    peak = tl.max(found, 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.exp2(found - shift)
    total = tl.sum(weights, 0)
    fill = live[:, None] & (d < dim)[None, :]
    parts = tl.load(part + place[:, None] * dim + d[None, :], mask=fill, other=0.0)
    norm = tl.where(total > 0, total, 1.0)
    merged = tl.sum(parts * weights[:, None], 0) / norm
    target = request * heads + head
    tl.store(out + target * dim + d, merged.to(out.dtype.element_ty), mask=d < dim)
    tl.store(lse + target, peak + tl.log2(norm))


@triton.jit(do_not_specialize=FREE_PREFILL)  # type: ignore[untyped-decorator]
def prefill(  # noqa: PLR0917 - a kernel
    query: tl.tensor, key: tl.tensor, value: tl.tensor, scale: tl.tensor, indptr: tl.tensor,
    indices: tl.tensor, last: tl.tensor, starts: tl.tensor, out: tl.tensor, lse: tl.tensor,
    factor: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, k_page: tl.tensor, k_slot: tl.tensor,
    k_head: tl.tensor, v_page: tl.tensor, v_slot: tl.tensor, v_head: tl.tensor, s_page: tl.tensor,
    s_slot: tl.tensor, s_head: tl.tensor, heads: tl.tensor, group: tl.tensor, rows: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, page: tl.constexpr, tokens: tl.constexpr,
    by_token: tl.constexpr, causal: tl.constexpr, stages: tl.constexpr,
) -> None:  # fmt: skip
    """A block of rows of one request and KV head; a row is one (new token, query head)."""
    request = tl.program_id(2)
    kv = tl.program_id(1)
    base = tl.load(starts + request)
    fresh = tl.load(starts + request + 1) - base
    if tl.program_id(0) * rows >= fresh * group:
        return
    first, count, length = _length(indptr, last, request, page)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token = row // group
    head = kv * group + row % group
    live = token < fresh
    d = tl.arange(0, width)
    n = tl.arange(0, tokens)
    inside = d < dim
    at = (base + token).to(tl.int64) * q_row + head * q_head
    q = tl.load(query + at[:, None] + d[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    limit = length - fresh + token if causal else length - 1 + 0 * token
    end = tl.minimum(length, tl.max(tl.where(live, limit, -1), 0) + 1)
    # Every row sees all keys before the first one's limit: those tiles need no mask.
    middle = tl.maximum(tl.minimum(end, tl.min(limit, 0) + 1), 0) // tokens * tokens
    peak = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, width], tl.float32)
    for start in tl.range(0, middle, tokens, num_stages=stages):
        keys, values, scales = _tile(
            key, value, scale, indices, first, count, start, end, kv,
            k_page, k_slot, k_head, v_page, v_slot, v_head, s_page, s_slot, s_head,
            whole=True, tokens=tokens, page=page, dim=dim, width=width, by_token=by_token,
        )  # fmt: skip
        peak, total, acc = _step(
            q, keys, values, scales, n[None, :], peak, total, acc, factor,
            whole=True, by_token=by_token,
        )  # fmt: skip
    for start in tl.range(middle, end, tokens, num_stages=1):
        keys, values, scales = _tile(
            key, value, scale, indices, first, count, start, end, kv,
            k_page, k_slot, k_head, v_page, v_slot, v_head, s_page, s_slot, s_head,
            whole=False, tokens=tokens, page=page, dim=dim, width=width, by_token=by_token,
        )  # fmt: skip
        seen = (start + n < end)[None, :] & (start + n[None, :] <= limit[:, None])
        peak, total, acc = _step(
            q, keys, values, scales, seen, peak, total, acc, factor, whole=False, by_token=by_token
        )
    if not by_token:
        acc = acc * tl.load(scale + kv * s_head)
    norm = tl.where(total > 0, total, 1.0)
    place = (base + token).to(tl.int64) * heads + head
    tl.store(lse + place, peak + tl.log2(norm), mask=live)
    result = (acc / norm[:, None]).to(out.dtype.element_ty)
    where = place[:, None] * dim + d[None, :]
    tl.store(out + where, result, mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=FREE_APPEND)  # type: ignore[untyped-decorator]
def append(  # noqa: PLR0917 - a kernel
    key: tl.tensor, value: tl.tensor, slots: tl.tensor, key_pages: tl.tensor,
    value_pages: tl.tensor, scale: tl.tensor, lost: tl.tensor, i_token: tl.tensor,
    i_head: tl.tensor, j_token: tl.tensor, j_head: tl.tensor, k_page: tl.tensor, k_slot: tl.tensor,
    k_head: tl.tensor, v_page: tl.tensor, v_slot: tl.tensor, v_head: tl.tensor, s_page: tl.tensor,
    s_slot: tl.tensor, s_head: tl.tensor, limit: tl.constexpr, dim: tl.constexpr,
    width: tl.constexpr, page: tl.constexpr, by_token: tl.constexpr, dynamic: tl.constexpr,
) -> None:  # fmt: skip
    """One new token and KV head: copy the key's bits, quantise the value, count what was lost."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = tl.load(slots + token)
    leaf, slot = place // page, place % page
    d = tl.arange(0, width)
    inside = d < dim
    bits = tl.load(key + token * i_token + head * i_head + d, mask=inside)
    tl.store(key_pages + leaf * k_page + slot * k_slot + head * k_head + d, bits, mask=inside)
    real = tl.load(value + token * j_token + head * j_head + d, mask=inside, other=0.0)
    real = real.to(tl.float32)
    factor_at = scale + head * s_head
    if by_token:
        factor_at = scale + leaf * s_page + slot * s_slot + head * s_head
    if dynamic:
        finite = tl.abs(real) < float("inf")
        largest = tl.max(tl.where(finite, tl.abs(real), 0.0), 0)
        step = tl.div_rn(largest, limit)
        step = tl.where(step > 0, step, 1.0)
        tl.store(factor_at, step)
    else:
        step = tl.load(factor_at)
    ratio = tl.div_rn(real, step)
    kept = tl.abs(ratio) <= limit
    clamped = tl.where(ratio > limit, limit, tl.where(ratio < -limit, -limit, ratio))
    codes = clamped.to(value_pages.dtype.element_ty)
    tl.store(value_pages + leaf * v_page + slot * v_slot + head * v_head + d, codes, mask=inside)
    missed = tl.sum((inside & (kept == 0)).to(tl.int32), 0)
    if missed > 0:
        tl.atomic_add(lost, missed.to(tl.int64))
