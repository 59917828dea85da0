"""Wire format 3: checking a header, and a section where it lies. docs/format-v3.md has the order.

Nothing is allocated in proportion to what a header claims: a plan is computed from its geometry with
Python integers and every other word has to be the one that the plan gives.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from tiers._crc import crc32, plain_crc32
from tiers._errors import (
    ChecksumMismatch,
    DtypeMismatch,
    LengthError,
    ProvenanceMismatch,
    SchemeMismatch,
    ShapeError,
    UnknownId,
    VersionError,
)
from tiers._format_common import Scheme, check, check_one_of, check_scales, check_zero, unpack
from tiers._format_v3 import (
    COMPONENTS,
    CRC_AT,
    FIXED,
    HEADER_BYTES,
    IDENTITY,
    KEY_DTYPES,
    MAGIC,
    ORDERS,
    SCHEMES,
    SCOPES,
    SECTION,
    SECTION_BYTES,
    SECTIONS_AT,
    VALUE_DTYPES,
    VERSION,
    BlobPlan,
    Identity,
    Section,
    pack_section,
    plan_of,
)
from tiers._layout import VALUE_SCALE, PageLayout
from transfer._errors import LayoutMismatch

if TYPE_CHECKING:
    from tiers._team import Team


@final
@dataclass(frozen=True, slots=True)
class V3Header:
    """A checked header: what a blob holds and what its sections' checksums are.

    Attributes:
        plan: what the blob holds and where.
        identity: whose bytes they are.
        crcs: checksum of each section, by component name.
    """

    plan: BlobPlan
    identity: Identity
    crcs: dict[str, int]

    def verify(self, blob: memoryview, name: str, team: Team) -> memoryview:
        """Check one component inside the whole blob, and give its bytes.

        Raises:
            FormatError: as for `verify_section`.
        """
        section = self.plan.section(name)
        return self.verify_section(blob[section.offset : section.end], name, team)

    def verify_section(self, data: memoryview, name: str, team: Team) -> memoryview:
        """Check one component that was read on its own, padding included, and give its bytes.

        Raises:
            ComponentMissing: the blob does not hold it.
            LengthError: `data` is not the section with its padding.
            ScaleError: a scale is not finite and positive.
            ChecksumMismatch: other bytes than those that were sealed.
            ReservedError: padding that is not zero.
        """
        section = self.plan.section(name)
        check(f"{name} section", len(data), section.end - section.offset)
        payload = data[: section.part.nbytes]
        if name == VALUE_SCALE:
            check_scales("scale", payload)
        found, expected = f"{crc32(payload, team):08x}", f"{self.crcs[name]:08x}"
        check(f"{name} CRC", found, expected, ChecksumMismatch)
        check_zero(f"{name} padding", data[section.part.nbytes :])
        return payload


def parse_v3(
    data: memoryview,
    *,
    total: int | None = None,
    layout: PageLayout | None = None,
    pages: int | None = None,
    scheme: Scheme | None = None,
    identity: Identity | None = None,
) -> V3Header:
    """Check a header, before any section is looked at.

    Args:
        data: the whole blob, or with `total` its first 4096 bytes.
        total: bytes of the whole blob when `data` is only its beginning.
        layout: the geometry, dtypes and scale scope asked for.
        pages: the number of pages asked for.
        scheme: the scheme asked for.
        identity: the key, provenance and put asked for.

    Raises:
        FormatError: a subclass for each kind of fault, in the order of docs/format-v3.md.
    """
    length = len(data) if total is None else total
    if min(length, len(data)) < HEADER_BYTES or length % HEADER_BYTES:
        raise LengthError("blob length", found=length, expected="a multiple of 4096, not 0")
    head = data[:HEADER_BYTES]
    plan = _parse_plan(head, length)
    crcs = {section.part.name: crc for section, crc in _parse_sections(head, plan)}
    _check_reserved(head, len(plan.sections))
    found, stated = plain_crc32(head[:CRC_AT]), unpack("<I", head, CRC_AT, "header CRC")[0]
    check("header CRC", f"{found:08x}", f"{stated:08x}", ChecksumMismatch)
    header = V3Header(plan, _parse_identity(head), crcs)
    _check_asked(header, layout, pages, scheme, identity)
    return header


def _parse_plan(head: memoryview, length: int) -> BlobPlan:
    """The plan that follows from the geometry and the named sections; lengths agree with it."""
    words = unpack(FIXED, head, 0, "header")
    magic, version, count, header_bytes, nbytes, scheme, scope, order, _, *geometry = words
    check("magic", magic.hex(), MAGIC.hex(), VersionError)
    check("version", version, VERSION, VersionError)
    check("header bytes", header_bytes, HEADER_BYTES, VersionError)
    check("blob length", length, nbytes)
    sizes, (key, value, scale) = geometry[:6], geometry[6:]
    check_one_of("scheme", scheme, SCHEMES, f"one of {list(SCHEMES)}", UnknownId)
    check_one_of("scale scope", scope, SCOPES, f"one of {list(SCOPES)}", UnknownId)
    check_one_of("page order", order, ORDERS, f"one of {list(ORDERS)}", UnknownId)
    check_one_of("key dtype id", key, KEY_DTYPES, f"one of {list(KEY_DTYPES)}", UnknownId)
    check_one_of("value dtype id", value, VALUE_DTYPES, f"one of {list(VALUE_DTYPES)}", UnknownId)
    check("scale dtype id", scale, 3 if value else 0, UnknownId)
    if len({bool(scheme), bool(scope), bool(value), bool(sizes[5])}) != 1:
        found = {"scheme": scheme, "scope": scope, "value dtype": value, "value row": sizes[5]}
        raise UnknownId("values", found=found, expected="all zero or none")
    if min(sizes[:5]) < 1:
        raise ShapeError("geometry", found=sizes[:5], expected="at least 1 of each")
    if not 1 <= count <= 3:
        raise ShapeError("number of sections", found=count, expected="1 to 3")
    layout = PageLayout(
        layers=sizes[0],
        page_size=sizes[2],
        kv_heads=sizes[3],
        head_dim=sizes[4],
        order=ORDERS[order],
        key=KEY_DTYPES[key],
        value=VALUE_DTYPES[value],
        value_dim=sizes[5] if value else None,
        scope=SCOPES[scope],
    )
    names = _section_names(head, count)
    try:
        return plan_of(layout, sizes[1], names, SCHEMES[scheme])
    except LayoutMismatch:
        raise ShapeError(
            "sections", found=sorted(names), expected="those of the geometry"
        ) from None


def _section_names(head: memoryview, count: int) -> frozenset[str]:
    numbers = [head[SECTIONS_AT + index * SECTION_BYTES] for index in range(count)]
    for number in numbers:
        check_one_of("component", number, COMPONENTS, "1, 2 or 3", UnknownId)
    check("components", numbers, sorted(set(numbers)), ShapeError)
    return frozenset(COMPONENTS[number] for number in numbers)


def _parse_sections(head: memoryview, plan: BlobPlan) -> list[tuple[Section, int]]:
    """Every word of the section entries is the one that the plan gives; their checksums."""
    # First, since lengths that pass have fewer than 64 bits and so can be packed below.
    check("blob length", unpack("<Q", head, 16, "blob length")[0], plan.nbytes)
    found = []
    for index, section in enumerate(plan.sections):
        offset = SECTIONS_AT + index * SECTION_BYTES
        crc = unpack("<I", head, offset + 4, "section CRC")[0]
        expected = bytearray(SECTION_BYTES)
        pack_section(expected, 0, section, crc)
        got = unpack(SECTION, head, offset, "section")
        if got != struct.unpack(SECTION, expected):
            raise ShapeError(
                f"{section.part.name} section",
                found=f"rank {got[2]}, bytes {got[5]} to {got[5] + got[6]}, axes {got[7]!r}, "
                f"sizes {got[8:14]}",
                expected=f"{section.part}, bytes {section.offset} to {section.end}",
            )
        found.append((section, crc))
    return found


def _check_reserved(head: memoryview, sections: int) -> None:
    check_zero("header from 27", head[27:28])
    check_zero("header from 55", head[55:64])
    check_zero("header from 144", head[144:SECTIONS_AT])
    end = SECTIONS_AT + sections * SECTION_BYTES
    check_zero(f"header from {end}", head[end:CRC_AT])


def _parse_identity(head: memoryview) -> Identity:
    key, provenance, put = unpack(IDENTITY, head, 64, "identity")
    return Identity(key=key, provenance=provenance, put=put)


def _check_asked(
    header: V3Header,
    layout: PageLayout | None,
    pages: int | None,
    scheme: Scheme | None,
    identity: Identity | None,
) -> None:
    """The blob is the one that is asked for."""
    found = header.identity
    if identity is not None:
        check("key digest", found.key, identity.key, ProvenanceMismatch)
        check("provenance digest", found.provenance, identity.provenance, ProvenanceMismatch)
        check("put id", found.put, identity.put, ProvenanceMismatch)
    if layout is not None:
        got = header.plan.layout
        check("key dtype", got.key, layout.key, DtypeMismatch)
        check("value dtype", got.value, layout.value, DtypeMismatch)
        check("page layout", got.components(), layout.components(), ProvenanceMismatch)
    if pages is not None:
        check("pages", header.plan.pages, pages, ProvenanceMismatch)
    if scheme is not None and header.plan.scheme is not None:
        check("scheme", header.plan.scheme, scheme, SchemeMismatch)
