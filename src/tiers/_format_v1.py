"""Wire formats 1 and 2: one header, then keys, value codes and scales without gaps.

Version 1 is the one that LMCache's asymmetric K16/V8 codec reads and writes. Version 2 differs in the
word at offset 18 (the scale scheme), in a further scale scope for "none", and in its CRC, which covers
the header too; kvhold knows it for values that are FP8 already, with a scale of one (raw-unit).

Everything a header says is checked against the length of the bytes before anything is allocated and
before the CRC is looked at. All integers are little-endian, those of lengths signed on the wire.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, final

from tiers._crc import crc32, plain_crc32
from tiers._errors import (
    ChecksumMismatch,
    ComponentMissing,
    DtypeMismatch,
    LengthError,
    ProvenanceMismatch,
    ReservedError,
    SchemeMismatch,
    ShapeError,
    UnknownId,
    VersionError,
)
from tiers._format_common import (
    NO_STRINGS,
    Scheme,
    Strings,
    check,
    check_one_of,
    check_scales,
    unpack,
)
from transfer._extent import DTYPES

if TYPE_CHECKING:
    from tiers._team import Team

MAGIC: Final = bytes.fromhex("4c4d434b56010001")
KEY_IDS: Final = {
    0: "",
    1: "float16",
    2: "float16",
    3: "bfloat16",
    4: "float32",
    5: "float64",
    6: "uint8",
    7: "float8_e4m3fn",
    8: "float8_e5m2",
}
"""Dtype by id; 1 and 2 both mean float16, of which 2 is written."""
IDS: Final = {name: number for number, name in KEY_IDS.items()}
VALUE_ID: Final = 7
SCALE_ID: Final = 4
MAX_RANK: Final = 8
_FIXED: Final = "<8s6H7q"
_LENGTHS: Final = "<3q"
_NUMBERS: Final = (
    "layer_id",
    "chunk_id",
    "chunk_size",
    "page_size",
    "kv_head_count",
    "head_dim",
)


class V1Scope(IntEnum):
    """How many values share a scale, as versions 1 and 2 number it."""

    TENSOR = 0
    HEAD = 1
    PAGE_HEAD = 2
    EXTERNAL = 3
    NONE = 4

    @property
    def rank(self) -> int | None:
        """Rank of the scale tensor; None when the blob does not hold it."""
        return None if self is V1Scope.EXTERNAL else {1: 1, 2: 2}.get(self.value, 0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class V1Header:
    """A header of version 1 or 2.

    Attributes:
        scope: how scales are shared.
        key: dtype of keys, a tag only when there are none; empty for "none".
        key_bytes: bytes of the keys; 0 in a blob of values alone.
        value_bytes: bytes of the codes, one for each value.
        scale_shape: sizes of the scale tensor, row-major.
        strings: origin.
        layer_id: and the numbers after it, -1 when not set; sizes in tokens, heads, elements.
        raw_unit: version 2 with scheme raw-unit; version 1 otherwise.
    """

    scope: V1Scope
    key: str
    key_bytes: int
    value_bytes: int
    scale_shape: tuple[int, ...] = ()
    strings: Strings = NO_STRINGS
    layer_id: int = -1
    chunk_id: int = -1
    chunk_size: int = -1
    page_size: int = -1
    kv_head_count: int = -1
    head_dim: int = -1
    raw_unit: bool = False

    @property
    def version(self) -> int:
        """1 or 2."""
        return 2 if self.raw_unit else 1

    @property
    def scheme(self) -> Scheme:
        """Where codes and scales come from."""
        return Scheme.RAW_UNIT if self.raw_unit else Scheme.COMPUTED

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales in the blob."""
        held = self.scope not in {V1Scope.EXTERNAL, V1Scope.NONE}
        return 4 * math.prod(self.scale_shape) if held else 0

    @property
    def payload_bytes(self) -> int:
        """Bytes behind the header."""
        return self.key_bytes + self.value_bytes + self.scale_bytes

    def pack(self) -> bytes:
        """The header up to its CRC field.

        Raises:
            LengthError: a string of more than 65535 bytes.
        """
        numbers = [getattr(self, name) for name in _NUMBERS]
        head = struct.pack(
            _FIXED,
            MAGIC,
            self.version,
            self.scope,
            IDS[self.key],
            VALUE_ID,
            SCALE_ID,
            int(self.raw_unit),
            *numbers,
            len(self.scale_shape),
        )
        shape = struct.pack(f"<{len(self.scale_shape)}q", *self.scale_shape)
        lengths = struct.pack(_LENGTHS, self.key_bytes, self.value_bytes, self.scale_bytes)
        pairs = self.strings.items()
        words = b"".join(_pack_word(name) + _pack_word(value) for name, value in pairs)
        return head + shape + lengths + struct.pack("<H", len(pairs)) + words

    @property
    def header_bytes(self) -> int:
        """Bytes of the header with its CRC field."""
        words = sum(4 + len(n.encode()) + len(v.encode()) for n, v in self.strings.items())
        return 106 + 8 * len(self.scale_shape) + words

    @property
    def nbytes(self) -> int:
        """Bytes of the whole blob."""
        return self.header_bytes + self.payload_bytes


def _pack_word(text: str) -> bytes:
    data = text.encode()
    if len(data) > 0xFFFF:
        raise LengthError("string", found=f"{len(data)} bytes", expected="at most 65535")
    return struct.pack("<H", len(data)) + data


def seal_v1(header: V1Header, blob: memoryview, team: Team, *, packed: bytes | None = None) -> None:
    """Write the header in front of a payload that is in place already.

    Args:
        header: what the payload is.
        blob: writable, exactly ``header.nbytes`` long.
        team: threads for the CRC.
        packed: ``header.pack()``, when the caller has it already.

    Raises:
        LengthError: another length.
    """
    head = header.pack() if packed is None else packed
    check("blob length", len(blob), len(head) + 4 + header.payload_bytes)
    payload = blob[len(head) + 4 :]
    start = plain_crc32(head) if header.raw_unit else 0
    blob[: len(head)] = head
    struct.pack_into("<I", blob, len(head), crc32(payload, team, start=start))


@final
@dataclass(frozen=True, slots=True)
class V1Blob:
    """A blob whose header and scales were checked; `verify` looks at the CRC.

    Attributes:
        header: what it says.
        head: its header bytes up to the CRC.
        crc: what the CRC field holds.
        key: bytes of the keys, in place.
        value: bytes of the codes, in place.
        scale: bytes of the scales, in place.
    """

    header: V1Header
    head: memoryview
    crc: int
    key: memoryview
    value: memoryview
    scale: memoryview

    def verify(self, team: Team) -> None:
        """Refuse bytes that do not have the CRC the header states.

        Raises:
            ChecksumMismatch: they have another.
        """
        start = plain_crc32(self.head) if self.header.raw_unit else 0
        found = crc32(self.key, team, start=start)
        found = crc32(self.value, team, start=found)
        found = crc32(self.scale, team, start=found)
        check("payload CRC", f"{found:08x}", f"{self.crc:08x}", ChecksumMismatch)


def open_v1(
    data: memoryview,
    *,
    elements: int | None = None,
    key: str | None = None,
    scheme: Scheme | None = None,
    strings: Strings | None = None,
) -> V1Blob:
    """Check a blob of version 1 or 2 up to its CRC, without copying its payload.

    Args:
        data: the whole blob and nothing else.
        elements: number of values the destination has.
        key: dtype that keys have to have.
        scheme: computed (version 1) or raw-unit (version 2).
        strings: origin asked for. In version 1 a field that both sides state has to agree; in
            version 2 the blob has to state what the reader states.

    Raises:
        FormatError: a subclass for each kind of fault; nothing has been allocated in proportion
            to what the bytes claim.
    """
    header, end = _parse(data)
    if scheme is not None:
        check("scale scheme", header.scheme.value, scheme.value, SchemeMismatch)
    if elements is not None:
        check("value elements", header.value_bytes, elements, LengthError)
    if key is not None:
        check("key dtype", header.key, key, DtypeMismatch)
    _check_origin(header, strings or NO_STRINGS)
    return split_v1(header, data, end)


def split_v1(header: V1Header, data: memoryview, end: int) -> V1Blob:
    """The sections behind a header that ends at `end`, their lengths checked already.

    Raises:
        ScaleError: a scale is not finite and positive.
    """
    (crc,) = unpack("<I", data, end, "CRC")
    payload = data[end + 4 :]
    bounds = (header.key_bytes, header.key_bytes + header.value_bytes)
    scale = payload[bounds[1] :]
    check_scales("scale", scale)
    return V1Blob(header, data[:end], crc, payload[: bounds[0]], payload[slice(*bounds)], scale)


def _parse(data: memoryview) -> tuple[V1Header, int]:
    """The checked header and the offset of its CRC field."""
    magic, *words = unpack(_FIXED, data, 0, "header")
    version, scope, key, value, scale, last, *numbers, rank = words
    check("magic", magic, MAGIC, VersionError)
    check_one_of("version", version, (1, 2), "1 or 2", VersionError)
    scopes = range(4) if version == 1 else (V1Scope.NONE,)
    check_one_of("scale scope", scope, scopes, f"one of {list(scopes)}", UnknownId)
    check_one_of("key dtype id", key, KEY_IDS, "0 to 8", UnknownId)
    check("value dtype id", value, VALUE_ID, UnknownId)
    check("scale dtype id", scale, SCALE_ID, UnknownId)
    if version == 1:
        check("reserved word", last, 0, ReservedError)
    else:
        check("scale scheme", last, 1, SchemeMismatch)
        if KEY_IDS[key].startswith("float8"):
            raise DtypeMismatch("key dtype", found=KEY_IDS[key], expected="no FP8 in version 2")
    for name, number in zip(_NUMBERS, numbers, strict=True):
        if number < -1:
            raise LengthError(name, found=number, expected="-1 or more")
    if not 0 <= rank <= MAX_RANK:
        raise ShapeError("scale rank", found=rank, expected=f"0 to {MAX_RANK}")
    shape = unpack(f"<{rank}q", data, 76, "scale shape")
    lengths = unpack(_LENGTHS, data, 76 + 8 * rank, "section lengths")
    strings, end = _parse_strings(data, 100 + 8 * rank)
    header = V1Header(
        scope=V1Scope(scope),
        key=KEY_IDS[key],
        key_bytes=lengths[0],
        value_bytes=lengths[1],
        scale_shape=shape,
        strings=strings,
        raw_unit=version == 2,
        **dict(zip(_NUMBERS, numbers, strict=True)),
    )
    _check_lengths(header, lengths, len(data) - end - 4)
    return header, end


def _check_lengths(header: V1Header, lengths: tuple[int, ...], rest: int) -> None:
    """Section lengths, scale shape and geometry agree with each other and with the bytes."""
    for name, length in zip(("key", "value", "scale"), lengths, strict=True):
        if not 0 <= length <= rest:
            raise LengthError(f"{name} bytes", found=length, expected=f"0 to {max(rest, 0)}")
    check("payload bytes", rest, sum(lengths))
    elements = header.value_bytes
    rank = header.scope.rank
    if rank is not None:
        check("scale rank", len(header.scale_shape), rank, ShapeError)
    for size in header.scale_shape:
        if not 0 < size <= max(elements, 1):
            raise ShapeError("scale size", found=size, expected=f"1 to {elements}")
    if elements % math.prod(header.scale_shape):
        raise ShapeError("scales", found=header.scale_shape, expected=f"to divide {elements}")
    check("scale bytes", lengths[2], header.scale_bytes, ShapeError)
    if header.key_bytes:
        width = DTYPES.get(header.key, 0)
        check("key bytes", header.key_bytes, elements * width)
    row = header.kv_head_count * header.head_dim
    if min(header.kv_head_count, header.head_dim) > 0 and elements % row:
        raise ShapeError("value elements", found=elements, expected=f"a multiple of {row}")


def _parse_strings(data: memoryview, offset: int) -> tuple[Strings, int]:
    names = [name for name, _ in NO_STRINGS.items()]
    (count,) = unpack("<H", data, offset, "number of strings")
    check("number of strings", count, len(names))
    offset += 2
    found = {}
    for name in names:
        word, offset = _parse_word(data, offset, "string name")
        check("string name", word, name, UnknownId)
        found[name], offset = _parse_word(data, offset, name)
    return Strings(**found), offset


def _parse_word(data: memoryview, offset: int, field: str) -> tuple[str, int]:
    (length,) = unpack("<H", data, offset, f"{field} length")
    (raw,) = unpack(f"{length}s", data, offset + 2, field)
    try:
        return raw.decode(), offset + 2 + length
    except UnicodeDecodeError:
        raise UnknownId(field, found=raw, expected="UTF-8") from None


def _check_origin(header: V1Header, asked: Strings) -> None:
    for (name, found), (_, expected) in zip(header.strings.items(), asked.items(), strict=True):
        stated = expected and (found or header.raw_unit)
        if stated and found != expected:
            raise ProvenanceMismatch(name, found=found or "nothing", expected=expected)


def need_keys(header: V1Header, *, keys: bool) -> None:
    """Refuse a blob of values alone where keys are asked for, and the reverse.

    Raises:
        ComponentMissing: keys are missing, or there although none are expected.
    """
    if header.value_bytes and keys != bool(header.key_bytes):
        words = ("no keys", "keys")
        raise ComponentMissing("keys", found=words[not keys], expected=words[keys])
