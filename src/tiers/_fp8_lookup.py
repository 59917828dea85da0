"""The table way of the FP8 codec: what every bit pattern becomes, then a lookup.

Encoding looks 16-bit patterns up in a table of codes, decoding looks pairs of codes up in a table of two
values. A table belongs to a scale.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiers._fp8_scratch import LOOKUP, WIDE, Scratch, pieces
from tiers._fp8_tables import Fp8Format, decode_table

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from tiers._fp8_scratch import Bits

    Floats = npt.NDArray[np.float32]

INFINITY: Final = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
"""Bits of positive infinity: of the magnitudes, larger bits are NaN and smaller ones finite."""


def encode_lookup(
    values: Bits, codes: Bits, scales: Floats, scratch: Scratch, *, dtype: str, form: Fp8Format
) -> None:
    """Encode values that share one scale.

    Args:
        values: 16-bit patterns.
        codes: destination, uint8 of the same shape.
        scales: float32, of any shape with one element.
        scratch: the thread's.
        dtype: of the values.
        form: of the codes.
    """
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    _fill_encode_table(scratch.encode_table, scales.reshape(1), dtype, form, scratch)
    table = torch.from_numpy(scratch.encode_table)
    for box in pieces(values.shape, LOOKUP):
        part, out = values[box], codes[box]
        index = _indices(part, scratch)
        if out.flags.c_contiguous:
            torch.index_select(table, 0, index, out=torch.from_numpy(out.reshape(-1)))
        else:
            torch.index_select(table, 0, index, out=scratch.codes_tensor[: part.size])
            np.copyto(out, scratch.codes[: part.size].reshape(out.shape))


def decode_lookup(
    codes: Bits, values: Bits, scales: Floats, scratch: Scratch, *, dtype: str, form: Fp8Format
) -> None:
    """Decode codes that share one scale.

    Args:
        codes: uint8, an even number in each row, rows without gaps.
        values: destination, 16-bit patterns of the same shape.
        scales: as for `encode_lookup`.
        scratch: the thread's.
        dtype: of the values.
        form: of the codes.
    """
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    _fill_decode_table(scratch.decode_table, scales.reshape(1), dtype, form, scratch)
    table = torch.from_numpy(scratch.decode_table.view(np.int32))
    for box in pieces(values.shape, LOOKUP):
        out = values[box]
        index = _indices(codes[box].view(np.uint16), scratch)
        if out.flags.c_contiguous and out.ctypes.data % 4 == 0:
            target = torch.from_numpy(out.reshape(-1).view(np.int32))
            torch.index_select(table, 0, index, out=target)
        else:
            torch.index_select(table, 0, index, out=scratch.narrow_pairs_tensor[: out.size // 2])
            np.copyto(out, scratch.narrow[: out.size].reshape(out.shape))


def _indices(patterns: Bits, scratch: Scratch) -> torch.Tensor:
    """Patterns as indices, flat."""
    np.copyto(scratch.index[: patterns.size].reshape(patterns.shape), patterns)
    return scratch.index_tensor[: patterns.size]


def _fill_encode_table(
    table: Bits, scale: Floats, dtype: str, form: Fp8Format, scratch: Scratch
) -> None:
    """Codes of all patterns: cast where they change, constant below and above, NaN by rule."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    infinity = INFINITY[dtype]
    low, high = _changing(float(scale[0]), dtype, form)
    # A tensor: a plain number may be turned into a product with its reciprocal.
    divisor = torch.from_numpy(scale)
    table[:low] = 0
    table[high : infinity + 1] = form.top
    for start in range(low, high, WIDE):
        end = min(start + WIDE, high)
        count = end - start
        scratch.narrow[:count] = np.arange(start, end, dtype=np.uint16)
        wide = scratch.wide_tensor[:count].copy_(scratch.narrow_tensors[dtype][:count])
        cast(wide.div_(divisor), scratch.fp8_tensors[form.name][:count], form)
        table[start:end] = scratch.codes[:count]
    negative = table[0x8000 : 0x8000 + infinity + 1]
    np.bitwise_or(table[: infinity + 1], 0x80, out=negative)
    if form.name == "float8_e4m3fnuz":
        negative[negative == 0x80] = 0  # there is no negative zero
    table[infinity + 1 : 0x8000] = form.nan
    table[0x8000 + infinity + 1 :] = form.nan


def _changing(scale: float, dtype: str, form: Fp8Format) -> tuple[int, int]:
    """Patterns of positive numbers outside of which a code is zero, or the largest.

    With room to spare: a quarter of the smallest code above zero, and twice the largest.
    """
    ends = np.array([scale * form.smallest / 4, scale * form.largest * 2])
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float16":
            bits = ends.astype(np.float16).view(np.uint16)
        else:
            bits = ends.astype(np.float32).view(np.uint32) >> np.uint32(16)
    return int(bits[0]), min(int(bits[1]) + 1, INFINITY[dtype] + 1)


def _fill_decode_table(
    table: Bits, scale: Floats, dtype: str, form: Fp8Format, scratch: Scratch
) -> None:
    """Two values for every pair of codes, the low byte's first."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    wide = scratch.wide_tensor[:256]
    torch.mul(codes_tensor(form.name), torch.from_numpy(scale), out=wide)
    scratch.narrow_tensors[dtype][:256].copy_(wide)
    single = scratch.narrow[:256].astype(np.uint32)
    np.bitwise_or(single[None, :], single[:, None] << np.uint32(16), out=table.reshape(256, 256))


def cast(wide: torch.Tensor, codes: torch.Tensor, form: Fp8Format, *, clamp: bool = True) -> None:
    """Divided values, clamped by ourselves, to the nearest code, ties to even.

    Args:
        wide: float32; clamped in place.
        codes: destination.
        form: its format.
        clamp: False if all are known to be rounded to the largest code at most.
    """
    if clamp:
        wide.clamp_(-form.largest, form.largest)
    codes.copy_(wide)


@functools.cache
def codes_tensor(name: str) -> Any:
    """The format's table of 256 values as a float32 tensor."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    return torch.from_numpy(decode_table(name).copy())
