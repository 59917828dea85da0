"""The three FP8 formats, from their definitions.

E4M3 and E5M2 are those of "FP8 Formats for Deep Learning" (Micikevicius and others, 2022), as the OCP
8-bit floating-point specification fixes them; e4m3fnuz is the variant with bias 8, no negative zero and
no infinities of "8-bit Numerical Formats for Deep Neural Networks" (Noune and others, 2022). They share
a size, not a meaning: codes of one are never read as another.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt


@final
@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Sign, exponent and mantissa bits of an 8-bit float.

    Attributes:
        name: the dtype's name.
        exponent_bits: width of the exponent.
        mantissa_bits: width of the mantissa.
        bias: subtracted from a stored exponent.
        largest: largest finite magnitude.
        top: its code.
        nan: the code that NaN is encoded to.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    top: int
    nan: int

    @property
    def smallest(self) -> float:
        """Smallest magnitude above zero."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    def value(self, code: int) -> float:
        """What a code stands for."""
        sign = -1.0 if code >> 7 else 1.0
        exponent = code >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        top = exponent == (1 << self.exponent_bits) - 1
        if self.name == "float8_e4m3fnuz" and code == 0x80:
            return math.nan
        if self.name == "float8_e4m3fn" and top and mantissa == 7:
            return math.nan
        if self.name == "float8_e5m2" and top:
            return math.nan if mantissa else sign * math.inf
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * math.ldexp(fraction, 1 - self.bias)
        return sign * math.ldexp(1.0 + fraction, exponent - self.bias)


FORMATS: Final[Mapping[str, Fp8Format]] = MappingProxyType(
    {
        known.name: known
        for known in (
            Fp8Format("float8_e4m3fn", 4, 3, 7, 448.0, 0x7E, 0x7F),
            Fp8Format("float8_e5m2", 5, 2, 15, 57344.0, 0x7B, 0x7F),
            Fp8Format("float8_e4m3fnuz", 4, 3, 8, 240.0, 0x7F, 0x80),
        )
    }
)
"""By dtype name."""


@functools.cache
def decode_table(name: str) -> npt.NDArray[np.float32]:
    """What each of the 256 codes stands for; float32 (256,), read-only. Every value is exact."""
    table = np.array([FORMATS[name].value(code) for code in range(256)], dtype=np.float32)
    table.setflags(write=False)
    return table


@functools.cache
def pair_table(name: str) -> npt.NDArray[np.float64]:
    """Two decoded codes at once, as the bits of a float64.

    Entry ``low + 256 high`` holds float32 `low` then float32 `high`; (65536,), read-only. A little-
    endian pair of codes read as one 16-bit number is the index.
    """
    bits = decode_table(name).view(np.uint32).astype(np.uint64)
    table = (bits[None, :] | bits[:, None] << np.uint64(32)).reshape(-1).view(np.float64)
    table.setflags(write=False)
    return table
