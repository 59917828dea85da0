"""Versions 1 and 2: published vectors, and refusals before the checksum is looked at."""

import hashlib
import struct
import zlib
from typing import Any

import pytest
import torch
from tests.tiers.blobs import codecs, encode

from tiers._errors import (
    ChecksumMismatch,
    ComponentMissing,
    DtypeMismatch,
    FormatError,
    LengthError,
    ProvenanceMismatch,
    ReservedError,
    ScaleError,
    SchemeMismatch,
    ShapeError,
    UnknownId,
    VersionError,
)
from tiers._format_common import Scheme, Strings, as_bytes
from tiers._format_v1 import V1Header, V1Scope, need_keys, open_v1, seal_v1
from tiers._team import Team
from tiers.codec import BLOB, V1Codec

TEAM = Team()


def blob_of(codec: V1Codec, **parts: torch.Tensor) -> bytes:
    room = bytearray(codec.outputs[BLOB].capacity)
    return bytes(codec.encode(parts, {BLOB: room})[BLOB].data)


KEY = torch.tensor([1.0, -2.0, 0.15625, 3.0], dtype=torch.bfloat16)
VALUE = torch.tensor([0.5, -3.0, 0.0, 0.0078125], dtype=torch.bfloat16)


def test_the_vector_of_keys_and_values() -> None:
    blob = blob_of(V1Codec((4,)), key=KEY, value=VALUE)
    assert len(blob) == 229 == 3 * 4 + 217
    assert blob[209:213].hex() == "57343253"
    assert blob[213:].hex() == "803f00c0203e404069fe0039b76ddb3b"
    assert hashlib.sha256(blob).hexdigest() == (
        "3d00715c42c2860938ea7a596310be894712b73f0c1572bbd8d433467be35743"
    )


def test_the_vector_of_values_alone() -> None:
    blob = blob_of(V1Codec((4,), keys=False), value=VALUE)
    assert len(blob) == 221 == 4 + 217
    assert blob[209:213].hex() == "2a249b21"
    assert blob[213:].hex() == "69fe0039b76ddb3b"
    assert hashlib.sha256(blob).hexdigest() == (
        "e799eb9e8b55130db0267f4bcf768f30eac481821eb26066e3d6bf601c20f4b7"
    )


def test_the_vector_of_scales_per_page_and_head() -> None:
    codec = V1Codec(
        (3, 2, 4),
        key="float16",
        value="float16",
        scope=V1Scope.PAGE_HEAD,
        head_axis=1,
        page_axis=0,
        strings=Strings(model_id="m", kv_layout="NHD"),
        numbers={
            "layer_id": 3,
            "chunk_id": 9,
            "chunk_size": 256,
            "page_size": 16,
            "kv_head_count": 2,
            "head_dim": 4,
        },
    )
    numbers = torch.arange(24).reshape(3, 2, 4)
    blob = blob_of(codec, key=numbers.half(), value=((numbers - 5) / 7).half())
    assert (len(blob), codec.header.header_bytes) == (329, 233)
    assert hashlib.sha256(blob).hexdigest() == (
        "1864c61c96ffd2cfe20cbe2a8a608e4b678cf1074dddaabdbce6909fcedae4ce"
    )


def base() -> bytearray:
    """Keys and values, per head: shape (3, 2, 4), scales at the end."""
    return bytearray(encode(codecs()["v1 head"]))


def put(blob: bytearray, form: str, offset: int, *values: int) -> bytearray:
    struct.pack_into(form, blob, offset, *values)
    return blob


LONG = 2**63 - 1


# case 31, each length, id, rank and product, with a checksum that stays right
@pytest.mark.parametrize(
    ("form", "offset", "value", "error"),
    [
        ("<B", 0, 0x4D, VersionError),
        ("<H", 8, 3, VersionError),
        ("<H", 8, 0, VersionError),
        ("<H", 10, 4, UnknownId),
        ("<H", 10, 0, ShapeError),
        ("<H", 10, 2, ShapeError),
        ("<H", 12, 9, UnknownId),
        ("<H", 12, 0, LengthError),
        ("<H", 12, 4, LengthError),
        ("<H", 14, 8, UnknownId),
        ("<H", 14, 3, UnknownId),
        ("<H", 16, 2, UnknownId),
        ("<H", 18, 1, ReservedError),
        ("<q", 20, -2, LengthError),
        ("<q", 52, -(2**63), LengthError),
        ("<q", 68, -1, ShapeError),
        ("<q", 68, 9, ShapeError),
        ("<q", 68, LONG, ShapeError),
        ("<q", 76, -2, ShapeError),
        ("<q", 76, 0, ShapeError),
        ("<q", 76, LONG, ShapeError),
        ("<q", 76, 5, ShapeError),
        ("<q", 76, 3, ShapeError),
        ("<q", 84, -1, LengthError),
        ("<q", 84, LONG, LengthError),
        ("<q", 92, -24, LengthError),
        ("<q", 92, 2**62, LengthError),
        ("<q", 100, -8, LengthError),
        ("<q", 100, 4, LengthError),
        ("<H", 108, 5, LengthError),
        ("<H", 108, 0xFFFF, LengthError),
        ("<H", 110, 0xFFFF, LengthError),
        ("<B", 112, 0x4E, UnknownId),
    ],
)
def test_a_hostile_number_is_refused_by_name(
    form: str, offset: int, value: int, error: type[FormatError]
) -> None:
    blob = put(base(), form, offset, value)
    with pytest.raises(error) as caught:
        open_v1(as_bytes(blob))
    assert caught.value.field
    assert "expected" in str(caught.value)


# case 31, negative lengths that add up to the right sum
def test_lengths_that_only_balance_are_refused() -> None:
    blob = put(base(), "<3q", 84, 48 + 100, 24 - 100, 8)
    with pytest.raises(LengthError, match="bytes"):
        open_v1(as_bytes(blob))


# case 31, files of no length up to that of the header, and a cut or added byte
def test_every_other_length_is_refused() -> None:
    blob = bytes(base())
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            open_v1(as_bytes(blob[:length]))
    with pytest.raises(LengthError, match="payload"):
        open_v1(as_bytes(blob + b"\0"))


@pytest.mark.parametrize("bad", [0, 0x7F800000, 0x7FC00000, 0xBF800000])
def test_a_bad_scale_is_refused_before_the_checksum(bad: int) -> None:
    blob = base()
    put(blob, "<I", len(blob) - 4, bad)
    with pytest.raises(ScaleError, match="scale 1"):
        open_v1(as_bytes(blob))


# case 30, a bit of the payload
@pytest.mark.parametrize("name", ["v1 tensor", "v1 value only", "v1 page head"])
def test_every_bit_of_the_payload_is_guarded(name: str) -> None:
    codec = codecs()[name]
    blob = bytearray(encode(codec))
    assert isinstance(codec, V1Codec)
    for bit in range(codec.header.header_bytes * 8, len(blob) * 8):
        blob[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises((ChecksumMismatch, ScaleError)):
            open_v1(as_bytes(blob)).verify(TEAM)
        blob[bit >> 3] ^= 1 << (bit & 7)
    open_v1(as_bytes(blob)).verify(TEAM)


def test_every_bit_of_a_version_2_blob_is_guarded() -> None:
    blob = bytearray(encode(codecs()["v2"]))
    for bit in range(len(blob) * 8):
        blob[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(FormatError):
            open_v1(as_bytes(blob)).verify(TEAM)
        blob[bit >> 3] ^= 1 << (bit & 7)
    open_v1(as_bytes(blob)).verify(TEAM)


def test_the_checksum_of_version_2_covers_the_header() -> None:
    blob = encode(codecs()["v2"])
    opened = open_v1(as_bytes(blob))
    end = len(opened.head)
    assert opened.crc == zlib.crc32(blob[:end] + blob[end + 4 :])
    assert (opened.header.version, opened.header.scope) == (2, V1Scope.NONE)
    assert blob[18:20] == b"\1\0"
    assert len(opened.scale) == 0


# case 57, a dtype other than the one asked for
def test_what_is_asked_for_has_to_be_there() -> None:
    blob = as_bytes(bytes(base()))
    open_v1(blob, elements=24, key="float16", scheme=Scheme.COMPUTED)
    with pytest.raises(DtypeMismatch, match="found float16, expected bfloat16"):
        open_v1(blob, key="bfloat16")
    with pytest.raises(LengthError, match="value elements"):
        open_v1(blob, elements=25)
    with pytest.raises(SchemeMismatch):
        open_v1(blob, scheme=Scheme.RAW_UNIT)
    with pytest.raises(SchemeMismatch):
        open_v1(as_bytes(encode(codecs()["v2"])), scheme=Scheme.COMPUTED)
    need_keys(open_v1(blob).header, keys=True)
    with pytest.raises(ComponentMissing, match="found keys, expected no keys"):
        need_keys(open_v1(blob).header, keys=False)
    alone = open_v1(as_bytes(encode(codecs()["v1 value only"]))).header
    with pytest.raises(ComponentMissing, match="found no keys, expected keys"):
        need_keys(alone, keys=True)


def test_both_numbers_of_float16_are_read() -> None:
    blob = put(base(), "<H", 12, 1)
    assert open_v1(as_bytes(blob)).header.key == "float16"


def test_version_2_holds_no_fp8_keys() -> None:
    blob = put(bytearray(encode(codecs()["v2"])), "<H", 12, 7)
    with pytest.raises(DtypeMismatch, match="no FP8"):
        open_v1(as_bytes(blob))


# case 34, other models, strict where the format says so
@pytest.mark.parametrize(
    ("name", "asked", "good"),
    [
        ("v1 value only", {"model_id": "m"}, True),
        ("v1 value only", {"model_id": "other"}, False),
        ("v1 value only", {"tokenizer_hash": "t"}, True),
        ("v2", {"model_id": "m"}, True),
        ("v2", {"model_id": "other"}, False),
        ("v2", {"tokenizer_hash": "t"}, False),
        ("v2", {}, True),
    ],
)
def test_origin(name: str, asked: dict[str, str], good: bool) -> None:
    blob = as_bytes(encode(codecs()[name]))
    if good:
        open_v1(blob, strings=Strings(**asked))
        return
    with pytest.raises(ProvenanceMismatch, match=next(iter(asked))):
        open_v1(blob, strings=Strings(**asked))


def test_text_that_is_not_utf_8_is_refused() -> None:
    codec = codecs()["v1 value only"]
    blob = bytearray(encode(codec))
    at = bytes(blob).index(b"model_id") + 10
    blob[at] = 0xFF
    with pytest.raises(UnknownId, match="UTF-8"):
        open_v1(as_bytes(blob))


@pytest.mark.parametrize(
    "changes",
    [
        {"strings": Strings(model_id="é" * 40_000)},
        {"key_bytes": 7},
    ],
)
def test_a_header_that_cannot_be_is_not_written(changes: dict[str, Any]) -> None:
    header = V1Header(
        **{"scope": V1Scope.TENSOR, "key": "bfloat16", "key_bytes": 8, "value_bytes": 4, **changes}
    )
    with pytest.raises(LengthError):
        seal_v1(header, as_bytes(bytearray(229)), TEAM)


def test_external_scales_are_not_in_the_blob() -> None:
    header = V1Header(scope=V1Scope.EXTERNAL, key="bfloat16", key_bytes=0, value_bytes=4)
    blob = bytearray(header.nbytes)
    seal_v1(header, as_bytes(blob), TEAM)
    opened = open_v1(as_bytes(blob))
    opened.verify(TEAM)
    assert (len(opened.scale), opened.header) == (0, header)
