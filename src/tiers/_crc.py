"""CRC-32 (zlib's) of large buffers in pieces, and the sum that joins the pieces.

The CRC of A followed by B is ``crc(A) · x^(8 |B|) + crc(B)`` over GF(2) modulo the CRC polynomial:
the pieces can be computed by several threads, since the interpreter lock is released meanwhile.

isal computes the same CRC with the processor's carry-less multiplication, several times as fast as
zlib; where it is not installed (it is optional on processors that it does not know) zlib does it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

if TYPE_CHECKING:
    from tiers._team import Team

plain_crc32: Final = _crc32
"""CRC of one buffer, continued from a second argument, by the calling thread."""
_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31
PIECE: Final = 4 << 20
"""Bytes below which a second thread costs more than it gains."""


def _product(a: int, b: int) -> int:
    """Product of two polynomials in the reflected bit order of the CRC, modulo its polynomial."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@functools.lru_cache(maxsize=1024)
def _shift(nbytes: int) -> int:
    """``x^(8 nbytes)`` modulo the CRC polynomial, by squaring."""
    result, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(square, result)
        square = _product(square, square)
        nbytes >>= 1
    return result


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC of two byte strings joined, from their CRCs and the length of the second."""
    return _product(_shift(second_bytes), first) ^ second


def crc32(data: memoryview, team: Team, *, start: int = 0) -> int:
    """CRC of `data`, continued from `start`, by all threads of `team`."""
    pieces = min(team.threads, len(data) // PIECE)
    if pieces < 2:
        return plain_crc32(data, start)
    size = -(-len(data) // pieces)
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    sums = team.run([functools.partial(plain_crc32, part) for part in parts])
    total = start
    for part, crc in zip(parts, sums, strict=True):
        total = combine(total, crc, len(part))
    return total
