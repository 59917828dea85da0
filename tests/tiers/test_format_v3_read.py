"""Reading version 3: nothing that a header claims is believed before it was checked."""

import struct
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import pytest
from tests.tiers.blobs import IDENTITY, codecs, encode, page

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
from tiers._format_common import Scheme, as_bytes
from tiers._format_v3_read import parse_v3
from tiers._layout import PageOrder, ScaleScope
from tiers._team import Team

TEAM = Team()
NAMES = [name for name in codecs() if name.startswith("v3")]


def base(name: str = "v3 head") -> bytearray:
    return bytearray(encode(codecs()[name]))


def sealed(blob: bytearray) -> bytearray:
    """Give a changed header the checksum that belongs to it."""
    struct.pack_into("<I", blob, 4092, zlib.crc32(blob[:4092]))
    return blob


# case 30, every bit of the header
@pytest.mark.parametrize("name", ["v3 head", "v3 token_head value only", "v3 latent"])
def test_every_bit_of_the_header_is_guarded(name: str) -> None:
    blob = base(name)
    head = as_bytes(blob)[:4096]
    parse_v3(head, total=len(blob))
    refused = 0
    for bit in range(4096 * 8):
        blob[bit >> 3] ^= 1 << (bit & 7)
        try:
            parse_v3(head, total=len(blob))
        except FormatError:
            refused += 1
        blob[bit >> 3] ^= 1 << (bit & 7)
    assert refused == 32768


# case 30, every bit behind the header that belongs to a section or its padding
def test_every_bit_of_a_section_is_guarded() -> None:
    blob = base("v3 head value only")
    header = parse_v3(as_bytes(blob))
    for section in header.plan.sections:
        for bit in range(section.offset * 8, section.end * 8, 5):
            blob[bit >> 3] ^= 1 << (bit & 7)
            with pytest.raises((ChecksumMismatch, ReservedError, ScaleError)):
                header.verify(as_bytes(blob), section.part.name, TEAM)
            blob[bit >> 3] ^= 1 << (bit & 7)
        header.verify(as_bytes(blob), section.part.name, TEAM)


# case 31, with a header checksum that is right
@pytest.mark.parametrize(
    ("form", "offset", "value", "error"),
    [
        ("<B", 0, 0, VersionError),
        ("<H", 8, 2, VersionError),
        ("<I", 12, 8192, VersionError),
        ("<H", 10, 0, ShapeError),
        ("<H", 10, 4, ShapeError),
        ("<H", 10, 2, FormatError),
        ("<Q", 16, 2**64 - 4096, LengthError),
        ("<B", 24, 3, UnknownId),
        ("<B", 24, 0, UnknownId),
        ("<B", 25, 5, UnknownId),
        ("<B", 25, 3, FormatError),
        ("<B", 26, 0, UnknownId),
        ("<B", 26, 2, ShapeError),
        ("<B", 27, 1, ReservedError),
        ("<I", 28, 0, ShapeError),
        ("<I", 28, 2**32 - 1, LengthError),
        ("<I", 32, 0, ShapeError),
        ("<I", 36, 5, FormatError),
        ("<I", 40, 0, ShapeError),
        ("<I", 44, 2**31, LengthError),
        ("<I", 48, 0, UnknownId),
        ("<B", 52, 0, UnknownId),
        ("<B", 52, 16, UnknownId),
        ("<B", 52, 2, ShapeError),
        ("<B", 53, 1, UnknownId),
        ("<B", 53, 0, UnknownId),
        ("<B", 53, 17, ShapeError),
        ("<B", 54, 0, UnknownId),
        ("<B", 60, 1, ReservedError),
        ("<B", 150, 1, ReservedError),
        ("<B", 192, 4, UnknownId),
        ("<B", 192, 2, ShapeError),
        ("<B", 256, 1, ShapeError),
        ("<B", 194, 6, ShapeError),
        ("<B", 195, 1, ShapeError),
        ("<Q", 200, 0, ShapeError),
        ("<Q", 200, 2**64 - 4096, ShapeError),
        ("<Q", 208, 2**63, ShapeError),
        ("<Q", 208, 0, ShapeError),
        ("<B", 216, ord("P"), ShapeError),
        ("<I", 224, 3, ShapeError),
        ("<I", 244, 1, ShapeError),
        ("<Q", 248, 1, ShapeError),
        ("<B", 384, 1, ReservedError),
        ("<B", 4091, 1, ReservedError),
    ],
)
def test_a_hostile_number_is_refused_by_name(
    form: str, offset: int, value: int, error: type[FormatError]
) -> None:
    blob = base()
    struct.pack_into(form, blob, offset, value)
    with pytest.raises(error) as caught:
        parse_v3(as_bytes(sealed(blob)))
    assert not isinstance(caught.value, ChecksumMismatch)
    assert caught.value.field


# case 31, no memory in proportion to what a header claims
def test_a_hostile_geometry_costs_no_memory() -> None:
    blob = base()
    struct.pack_into("<6I", blob, 28, *[2**32 - 1] * 6)
    sealed(blob)
    tracemalloc.start()
    with pytest.raises(FormatError):
        parse_v3(as_bytes(blob))
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


# case 31, lengths from nothing to the whole
def test_every_other_length_is_refused() -> None:
    blob = bytes(base("v3 head value only"))
    for length in [*range(300), 4095, 4096, 4097, 8192, len(blob) - 1, len(blob) - 4096]:
        with pytest.raises(LengthError):
            parse_v3(as_bytes(blob[:length]))
    with pytest.raises(LengthError):
        parse_v3(as_bytes(blob + bytes(4096)))


def test_a_bad_scale_is_refused_before_its_checksum() -> None:
    blob = base()
    header = parse_v3(as_bytes(blob))
    struct.pack_into("<f", blob, header.plan.section("value_scale").offset + 4, -1.0)
    with pytest.raises(ScaleError, match=r"scale 1: found -1\.0"):
        header.verify(as_bytes(blob), "value_scale", TEAM)


def test_a_section_is_read_without_the_others() -> None:
    blob = base()
    header = parse_v3(as_bytes(blob)[:4096], total=len(blob))
    section = header.plan.section("value")
    blob[4096 : section.offset] = b"\xff" * (section.offset - 4096)
    part = bytes(blob[section.offset : section.end])
    got = header.verify_section(as_bytes(part), "value", TEAM)
    assert bytes(got) == part[: section.part.nbytes]
    with pytest.raises(LengthError, match="value section"):
        header.verify_section(as_bytes(part[:-1]), "value", TEAM)
    with pytest.raises(ChecksumMismatch, match="key CRC"):
        header.verify(as_bytes(blob), "key", TEAM)
    alone = parse_v3(as_bytes(base("v3 head value only")))
    with pytest.raises(ComponentMissing, match="key"):
        alone.plan.section("key")


# cases 30 and 34, a blob under another key, of another model or another put
@pytest.mark.parametrize("field", ["key", "provenance", "put"])
def test_a_blob_names_its_own_key_provenance_and_put(field: str) -> None:
    blob = as_bytes(base())
    parse_v3(blob, identity=IDENTITY)
    change: dict[str, Any] = {field: bytes(len(getattr(IDENTITY, field)))}
    with pytest.raises(ProvenanceMismatch, match=field):
        parse_v3(blob, identity=replace(IDENTITY, **change))


# cases 56 and 57, another dtype, format, geometry or scheme is never reinterpreted
@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"layout": page(key="float16").encoded(scope=ScaleScope.HEAD)}, DtypeMismatch),
        (
            {"layout": page().encoded(value="float8_e4m3fnuz", scope=ScaleScope.HEAD)},
            DtypeMismatch,
        ),
        ({"layout": page().encoded(value="float8_e5m2", scope=ScaleScope.HEAD)}, DtypeMismatch),
        ({"layout": page(PageOrder.HND).encoded(scope=ScaleScope.HEAD)}, ProvenanceMismatch),
        ({"layout": page().encoded(scope=ScaleScope.TENSOR)}, ProvenanceMismatch),
        ({"pages": 1}, ProvenanceMismatch),
        ({"scheme": Scheme.PRODUCER_SCALED}, SchemeMismatch),
    ],
)
def test_what_is_asked_for_has_to_be_there(asked: dict[str, Any], error: type[FormatError]) -> None:
    blob = as_bytes(base())
    parse_v3(blob, layout=page().encoded(scope=ScaleScope.HEAD), pages=2, scheme=Scheme.COMPUTED)
    with pytest.raises(error):
        parse_v3(blob, **asked)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_comes_back_as_it_was_planned(name: str) -> None:
    codec: Any = codecs()[name]
    blob = as_bytes(encode(codec))
    header = parse_v3(blob)
    assert header.plan == codec.plan
    assert header.identity == IDENTITY
    for section in codec.plan.sections:
        part = header.verify(blob, section.part.name, TEAM)
        assert len(part) == section.part.nbytes
