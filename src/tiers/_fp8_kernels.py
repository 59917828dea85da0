"""Triton kernels of the FP8 cast: values of pages to codes and scales, and back.

The rules are those of `tiers.fp8`, bit for bit: its scale of a group of values, its division, its
clamp, its rounding, its NaN. The cast itself is done in integers and float32 here, since what the
hardware and Triton's interpreter make of it differs in the last bit, in signs of NaN, and by GPU.
Addresses and block ids are 64-bit; strides are in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _widen(values: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Bit patterns as float32."""
    if kind == 0:
        wide = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif kind == 1:
        wide = values.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = values.to(tl.float32, bitcast=True)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def _narrow(wide: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """float32 rounded once, ties to even, as bit patterns."""
    bits = wide.to(tl.int32, bitcast=True)
    if kind == 0:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        found = tl.where(wide != wide, 0x7FC0, rounded).to(tl.int16)  # noqa: PLR0124 - NaN
    elif kind == 1:
        found = wide.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        found = bits
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _magnitude(wide: tl.tensor) -> tl.tensor:
    """Magnitudes of finite values as bits, which are ordered as the magnitudes are; others as 0."""
    bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(peak: tl.tensor) -> tl.tensor:
    """The scale for a largest magnitude, given as bits."""
    scale = tl.math.div_rn(peak.to(tl.float32, bitcast=True), 448.0)
    smallest = tl.maximum(scale.to(tl.int32, bitcast=True), 1)
    return tl.where(peak > 0, smallest.to(tl.float32, bitcast=True), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(wide: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Codes of e4m3fn: divide, clamp, round to the nearest, ties to even."""
    quotient = tl.math.div_rn(wide, scale)
    quotient = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
    bits = quotient.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # From 2^-6 on: three bits of fraction are kept, the exponent's bias changes from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below: a sum with 2^14, whose last bit is worth 2^-9, counts steps of 2^-9 and rounds.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(wide != wide, 0x7F, code).to(tl.int8)  # noqa: PLR0124 - NaN


@triton.jit  # type: ignore[untyped-decorator]
def _decode(codes: tl.tensor) -> tl.tensor:
    """float32 of codes of e4m3fn, by way of float16, whose exponent's bias is larger by 8."""
    raw = codes.to(tl.int32)
    half = ((raw & 0x80) << 8) | ((raw & 0x7F) << 7)
    wide = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    nan = tl.full(wide.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where((raw & 0x7F) == 0x7F, nan, wide)


@triton.jit  # type: ignore[untyped-decorator]
def _ends(  # noqa: PLR0917 - a kernel's arguments are positional
    table: tl.int64,
    layer: tl.int64,
    block: tl.int64,
    page_ids: tl.int64,
    slot_ids: tl.int64,
    slot_at: tl.int64,
    words: tl.constexpr,
    row_words: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where the values of a page, its codes and its scales are."""
    row = (table + layer * (row_words * 8)).to(tl.pointer_type(tl.int64))
    page_id = tl.load((page_ids + block * 8).to(tl.pointer_type(tl.int64)))
    slot_id = block
    if slot_ids != 0:
        slot_id = tl.load((slot_ids + block * 8).to(tl.pointer_type(tl.int64)))
    page = (tl.load(row) + page_id * tl.load(row + 1)).to(tl.pointer_type(words))
    slot = slot_at + tl.load(row + 2) + slot_id * tl.load(row + 3)
    slot = slot.to(tl.pointer_type(tl.int8))
    scales = slot_at + tl.load(row + 4) + slot_id * tl.load(row + 5)
    return page, slot, scales.to(tl.pointer_type(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _values(  # noqa: PLR0917 - a kernel's arguments are positional
    page: tl.tensor,
    t: tl.tensor,
    h: tl.tensor,
    d: tl.tensor,
    page_token: tl.int64,
    page_head: tl.int64,
    inside: tl.tensor,
    kind: tl.constexpr,
) -> tl.tensor:
    """Values of a page as float32."""
    at = tl.multiple_of(page + t * page_token + h * page_head + d, [1, 1, 16])
    return _widen(tl.load(at, mask=inside, other=0), kind)


@triton.jit  # type: ignore[untyped-decorator]
def _found_scale(  # noqa: PLR0917 - a kernel's arguments are positional
    wide: tl.tensor,
    shared: tl.tensor,
    scales: tl.tensor,
    t: tl.tensor,
    h: tl.tensor,
    scale_token: tl.int64,
    scale_head: tl.int64,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    scope: tl.constexpr,
) -> tl.tensor:
    """The scale of each value, computed and stored; `shared` is the largest magnitude of all."""
    if scope == 0:
        scale = _scale_of(tl.full((1, 1, 1), 0, tl.int32) + shared)
        tl.store(scales + tl.full((1, 1, 1), 0, tl.int32), scale)
    elif scope == 1:
        peak = tl.max(_magnitude(wide), axis=2, keep_dims=True)
        scale = _scale_of(tl.max(peak, axis=0, keep_dims=True))
        tl.store(scales + h * scale_head, scale, mask=h < heads)
    else:
        scale = _scale_of(tl.max(_magnitude(wide), axis=2, keep_dims=True))
        kept = (t < tokens) & (h < heads)
        tl.store(scales + t * scale_token + h * scale_head, scale, mask=kept)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def pack_values(  # noqa: PLR0917 - a kernel's arguments are positional
    table: tl.int64,
    layers: tl.int64,
    blocks: tl.int64,
    page_ids: tl.int64,
    slot_ids: tl.int64,
    slot_at: tl.int64,
    given: tl.int64,
    given_layer: tl.int64,
    given_head: tl.int64,
    page_token: tl.int64,
    page_head: tl.int64,
    slot_token: tl.int64,
    slot_head: tl.int64,
    scale_token: tl.int64,
    scale_head: tl.int64,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    token_tile: tl.constexpr,
    head_tile: tl.constexpr,
    width_tile: tl.constexpr,
    kind: tl.constexpr,
    scope: tl.constexpr,
    computed: tl.constexpr,
    stored: tl.constexpr,
    row_words: tl.constexpr,
) -> None:
    """Cast the values of pages into slots or staging, with their scales.

    An item is one page, layer and group of heads: all heads where they share a scale. Scales are
    computed, or read from `given`; they are stored where the slot has them.
    """
    groups: tl.constexpr = (heads + head_tile - 1) // head_tile
    passes: tl.constexpr = groups if scope == 0 else 1
    parts: tl.constexpr = 1 if scope == 0 else groups
    words: tl.constexpr = tl.int32 if kind == 2 else tl.int16
    t = tl.arange(0, token_tile)[:, None, None]
    h0 = tl.arange(0, head_tile)[None, :, None]
    d = tl.arange(0, width_tile)[None, None, :]
    step = tl.num_programs(0).to(tl.int64)
    for item in range(tl.program_id(0).to(tl.int64), blocks * layers * parts, step):
        block = item // (layers * parts)
        layer = (item // parts) % layers
        lead = (item % parts) * head_tile
        page, slot, scales = _ends(
            table, layer, block, page_ids, slot_ids, slot_at, words, row_words
        )
        origin = (given + layer * given_layer * 4).to(tl.int64).to(tl.pointer_type(tl.float32))
        shared = tl.full((), 0, tl.int32)
        if computed and scope == 0:
            for group in range(passes):
                h = h0 + group * head_tile
                inside = (t < tokens) & (h < heads) & (d < width)
                found = _magnitude(_values(page, t, h, d, page_token, page_head, inside, kind))
                shared = tl.maximum(shared, tl.max(tl.max(tl.max(found, 2), 1), 0))
        for group in range(passes):
            h = h0 + lead + group * head_tile
            inside = (t < tokens) & (h < heads) & (d < width)
            wide = _values(page, t, h, d, page_token, page_head, inside, kind)
            if not computed:
                scale = tl.load(origin + h * given_head, mask=h < heads, other=1.0)
                if stored:
                    tl.store(scales + h * scale_head, scale, mask=h < heads)
            else:
                scale = _found_scale(
                    wide, shared, scales, t, h, scale_token, scale_head, tokens, heads, scope
                )
            target = tl.multiple_of(slot + t * slot_token + h * slot_head + d, [1, 1, 8])
            tl.store(target, _encode(wide, scale), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_values(  # noqa: PLR0917 - a kernel's arguments are positional
    table: tl.int64,
    layers: tl.int64,
    blocks: tl.int64,
    page_ids: tl.int64,
    slot_ids: tl.int64,
    slot_at: tl.int64,
    given: tl.int64,
    given_layer: tl.int64,
    given_head: tl.int64,
    page_token: tl.int64,
    page_head: tl.int64,
    slot_token: tl.int64,
    slot_head: tl.int64,
    scale_token: tl.int64,
    scale_head: tl.int64,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    token_tile: tl.constexpr,
    head_tile: tl.constexpr,
    width_tile: tl.constexpr,
    kind: tl.constexpr,
    scope: tl.constexpr,
    computed: tl.constexpr,
    stored: tl.constexpr,  # noqa: ARG001 - both kernels are launched alike
    row_words: tl.constexpr,
) -> None:
    """Turn codes in slots or staging into values in pages: the code times its scale, rounded once.

    Items and scales as for `pack_values`; `computed` says that each slot has its scales.
    """
    groups: tl.constexpr = (heads + head_tile - 1) // head_tile
    passes: tl.constexpr = groups if scope == 0 else 1
    parts: tl.constexpr = 1 if scope == 0 else groups
    words: tl.constexpr = tl.int32 if kind == 2 else tl.int16
    t = tl.arange(0, token_tile)[:, None, None]
    h0 = tl.arange(0, head_tile)[None, :, None]
    d = tl.arange(0, width_tile)[None, None, :]
    first = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    for item in range(first, blocks * layers * parts, step):
        block = item // (layers * parts)
        layer = (item // parts) % layers
        lead = (item % parts) * head_tile
        page, slot, scales = _ends(
            table, layer, block, page_ids, slot_ids, slot_at, words, row_words
        )
        origin = (given + layer * given_layer * 4).to(tl.int64).to(tl.pointer_type(tl.float32))
        for group in range(passes):
            h = h0 + lead + group * head_tile
            inside = (t < tokens) & (h < heads) & (d < width)
            if not computed:
                scale = tl.load(origin + h * given_head, mask=h < heads, other=1.0)
            elif scope == 0:
                scale = tl.load(scales + tl.full((1, 1, 1), 0, tl.int32))
            elif scope == 1:
                scale = tl.load(scales + h * scale_head, mask=h < heads, other=1.0)
            else:
                kept = (t < tokens) & (h < heads)
                scale = tl.load(scales + t * scale_token + h * scale_head, mask=kept, other=1.0)
            source = tl.multiple_of(slot + t * slot_token + h * slot_head + d, [1, 1, 8])
            wide = _decode(tl.load(source, mask=inside, other=0)) * scale
            target = tl.multiple_of(page + t * page_token + h * page_head + d, [1, 1, 16])
            tl.store(target, _narrow(wide, kind), mask=inside)
