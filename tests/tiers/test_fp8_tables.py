"""The formats against tables made another way: from the fields, straight into float32's bits."""

import math
import struct

import numpy as np
import pytest
import torch

from tiers._fp8_tables import FORMATS, decode_table, pair_table

# Codes and values as the OCP 8-bit floating-point specification and the fnuz paper print them.
PRINTED = {
    "float8_e4m3fn": {
        0x00: 0.0,
        0x80: -0.0,
        0x01: 2.0**-9,
        0x07: 7 * 2.0**-9,
        0x08: 2.0**-6,
        0x38: 1.0,
        0x7E: 448.0,
        0xFE: -448.0,
        0x7F: math.nan,
        0xFF: math.nan,
    },
    "float8_e5m2": {
        0x00: 0.0,
        0x80: -0.0,
        0x01: 2.0**-16,
        0x03: 3 * 2.0**-16,
        0x04: 2.0**-14,
        0x3C: 1.0,
        0x7B: 57344.0,
        0x7C: math.inf,
        0xFC: -math.inf,
        0x7D: math.nan,
        0xFF: math.nan,
    },
    "float8_e4m3fnuz": {
        0x00: 0.0,
        0x80: math.nan,
        0x01: 2.0**-10,
        0x08: 2.0**-7,
        0x40: 1.0,
        0x7F: 240.0,
        0xFF: -240.0,
        0x81: -(2.0**-10),
    },
}
FIELDS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15), "float8_e4m3fnuz": (3, 8)}


def bits_of(name: str, code: int) -> int:
    """float32 bits of a code, by moving its fields and normalising subnormals by hand."""
    mantissa_bits, bias = FIELDS[name]
    magnitude = code & 0x7F
    if name == "float8_e4m3fnuz" and code == 0x80:
        return 0x7FC00000
    if (name == "float8_e4m3fn" and magnitude == 0x7F) or (
        name == "float8_e5m2" and magnitude > 0x7C
    ):
        return 0x7FC00000
    sign = (code >> 7) << 31
    if name == "float8_e5m2" and magnitude == 0x7C:
        return sign | 0x7F800000
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        if mantissa == 0:
            return sign
        exponent = 1
        while not mantissa >> mantissa_bits:
            mantissa <<= 1
            exponent -= 1
        mantissa &= (1 << mantissa_bits) - 1
    return sign | exponent - bias + 127 << 23 | mantissa << 23 - mantissa_bits


# case 56, all 256 codes of each format, with signed zero and NaN
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_stands_for_what_the_standard_says(name: str) -> None:
    table = decode_table(name)
    for code in range(256):
        expected = struct.unpack("<f", struct.pack("<I", bits_of(name, code)))[0]
        if math.isnan(expected):
            assert math.isnan(table[code]), hex(code)
        else:
            assert struct.pack("<f", table[code]) == struct.pack("<f", expected), hex(code)


@pytest.mark.parametrize("name", FORMATS)
def test_printed_values(name: str) -> None:
    for code, value in PRINTED[name].items():
        found = float(decode_table(name)[code])
        assert math.isnan(found) if math.isnan(value) else found == value
        assert math.copysign(1, found) == math.copysign(1, value) or math.isnan(value)
    form = FORMATS[name]
    finite = decode_table(name)[np.isfinite(decode_table(name))]
    assert form.largest == finite.max() == -finite.min()
    assert math.isnan(decode_table(name)[form.nan])
    assert decode_table(name)[form.top] == form.largest
    assert decode_table(name)[1] == form.smallest


@pytest.mark.parametrize("name", FORMATS)
def test_this_torch_agrees_with_the_standard(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    assert np.array_equal(codes.float().numpy(), decode_table(name), equal_nan=True)


# case 56, the formats are never read as one another
def test_no_two_formats_agree() -> None:
    names = list(FORMATS)
    for first in names:
        for second in names[names.index(first) + 1 :]:
            same = decode_table(first) == decode_table(second)
            assert same.sum() < 10
    with np.errstate(invalid="ignore"):
        halves = decode_table("float8_e4m3fn") / decode_table("float8_e4m3fnuz")
    assert halves[0x38] == 2


@pytest.mark.parametrize("name", FORMATS)
def test_pairs_are_two_values_low_byte_first(name: str) -> None:
    pairs = pair_table(name).view(np.float32).reshape(256, 256, 2)
    low = np.broadcast_to(decode_table(name)[None, :], (256, 256))
    high = np.broadcast_to(decode_table(name)[:, None], (256, 256))
    assert np.array_equal(pairs[..., 0], low, equal_nan=True)
    assert np.array_equal(pairs[..., 1], high, equal_nan=True)
    assert not pair_table(name).flags.writeable
