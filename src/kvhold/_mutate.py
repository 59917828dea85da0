"""Damage to valid blobs: bits, numbers that hurt, cuts, splices; with or without a right checksum.

A reader that stops at the checksum hides what lies behind it. So half of the damaged blobs get the
checksum that belongs to their new bytes, as an attacker would give them.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

HURTFUL: Final = (
    0,
    1,
    2,
    3,
    7,
    255,
    256,
    4095,
    4096,
    4097,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 4096,
    2**64 - 1,
)
_PAGE: Final = 4096


def mutate(seeds: Sequence[bytes], rng: Random) -> tuple[bytes, bool]:
    """One damaged blob: 1 to 4 steps of damage to a valid one, then perhaps right checksums.

    Returns:
        The blob, and whether it was given checksums.
    """
    blob = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(STEPS)(blob, seeds, rng)
    sealed = rng.random() < 0.5
    if sealed:
        reseal(blob)
    return bytes(blob), sealed


def _place(blob: bytearray, rng: Random) -> int:
    """Mostly in the header, where the numbers are."""
    if not blob:
        return 0
    limit = rng.choice((24, 120, 260, 400, len(blob)))
    return rng.randrange(min(limit, len(blob)))


def _flip(blob: bytearray, _seeds: Sequence[bytes], rng: Random) -> None:
    if blob:
        blob[_place(blob, rng)] ^= 1 << rng.randrange(8)


def _number(blob: bytearray, _seeds: Sequence[bytes], rng: Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    at = _place(blob, rng)
    value = rng.choice(HURTFUL) + rng.choice((0, 0, 0, -1, 1))
    data = (value % (1 << 8 * width)).to_bytes(width, "little")
    blob[at : at + width] = data[: max(len(blob) - at, 0)]


def _nudge(blob: bytearray, _seeds: Sequence[bytes], rng: Random) -> None:
    """Move a number by a little: lengths that almost fit."""
    width, at = rng.choice((1, 2, 4, 8)), _place(blob, rng)
    part = blob[at : at + width]
    value = int.from_bytes(part, "little") + rng.choice((-4096, -8, -4, -1, 1, 4, 8, 4096))
    blob[at : at + width] = (value % (1 << 8 * len(part))).to_bytes(len(part), "little")


def _cut(blob: bytearray, _seeds: Sequence[bytes], rng: Random) -> None:
    del blob[rng.choice((0, _place(blob, rng), len(blob) // 2, max(len(blob) - 1, 0))) :]


def _grow(blob: bytearray, _seeds: Sequence[bytes], rng: Random) -> None:
    blob += bytes(rng.choice((1, 8, 4096)))


def _splice(blob: bytearray, seeds: Sequence[bytes], rng: Random) -> None:
    """The front of one blob before the rest of another."""
    other, at = rng.choice(seeds), _place(blob, rng)
    blob[at:] = other[at:]


def _repeat(blob: bytearray, _seeds: Sequence[bytes], rng: Random) -> None:
    """A range twice: duplicate fields and sections."""
    at, size = _place(blob, rng), rng.choice((1, 2, 8, 64))
    blob[at:at] = blob[at : at + size]


def _noise(blob: bytearray, _seeds: Sequence[bytes], rng: Random) -> None:
    at = _place(blob, rng)
    size = min(rng.choice((4, 16, 64)), len(blob) - at)
    blob[at : at + size] = rng.randbytes(size)


STEPS: Final[tuple[Callable[[bytearray, Sequence[bytes], Random], None], ...]] = (
    _flip,
    _flip,
    _number,
    _number,
    _nudge,
    _cut,
    _grow,
    _splice,
    _repeat,
    _noise,
)


def reseal(blob: bytearray) -> None:
    """Give a blob the checksums that belong to its bytes, as far as its own numbers allow."""
    if blob[:4] == b"LMCK":
        _reseal_v1(blob)
    elif len(blob) >= _PAGE:
        _reseal_v3(blob)


def _reseal_v1(blob: bytearray) -> None:
    try:
        (rank,) = struct.unpack_from("<q", blob, 68)
        at = 100 + 8 * min(max(rank, 0), 64)
        (count,) = struct.unpack_from("<H", blob, at)
        at += 2
        for _ in range(2 * count):
            (length,) = struct.unpack_from("<H", blob, at)
            at += 2 + length
        start = zlib.crc32(blob[:at]) if blob[8] == 2 else 0
        struct.pack_into("<I", blob, at, zlib.crc32(blob[at + 4 :], start))
    except struct.error:
        return  # the numbers lead out of the blob: there is no checksum to mend


def _reseal_v3(blob: bytearray) -> None:
    for entry in range(192, 384, 64):
        offset, nbytes = struct.unpack_from("<QQ", blob, entry + 8)
        if 0 < offset <= len(blob) and nbytes <= len(blob) - offset and blob[entry]:
            crc = zlib.crc32(blob[offset : offset + nbytes])
            struct.pack_into("<I", blob, entry + 4, crc)
    struct.pack_into("<I", blob, _PAGE - 4, zlib.crc32(blob[: _PAGE - 4]))
