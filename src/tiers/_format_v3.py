"""Wire format 3, kvhold's own: planning and sealing. docs/format-v3.md specifies it byte by byte.

A blob is planned from a page layout alone, so that its size and the place of every section are known
before anything is encoded. Sections are encoded where they belong and `seal_v3` then writes the header
in front of them: no copy is made.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from tiers._crc import crc32, plain_crc32
from tiers._errors import (
    ComponentMissing,
)
from tiers._format_common import (
    ZEROS,
    Scheme,
    check,
)
from tiers._layout import KEY, VALUE, VALUE_SCALE, Component, PageLayout, PageOrder, ScaleScope
from transfer._errors import LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tiers._team import Team

MAGIC: Final = bytes.fromhex("894b56484f4c440a")
VERSION: Final = 3
HEADER_BYTES: Final = 4096
"""Bytes of the header; sections start at multiples of it."""
CRC_AT: Final = HEADER_BYTES - 4
SECTIONS_AT: Final = 192
SECTION_BYTES: Final = 64
FIXED: Final = "<8sHHIQBBBB6I3B"
IDENTITY: Final = "<32s32s16s"
SECTION: Final = "<4BIQQ8s6I8s"

KEY_DTYPES: Final = {1: "bfloat16", 2: "float16", 3: "float32", 4: "float64"}
VALUE_DTYPES: Final = {0: None, 16: "float8_e4m3fn", 17: "float8_e5m2", 18: "float8_e4m3fnuz"}
_DTYPE_IDS: Final = {
    name: number for known in (KEY_DTYPES, VALUE_DTYPES) for number, name in known.items()
}
SCOPES: Final = {
    0: None,
    1: ScaleScope.TENSOR,
    2: ScaleScope.HEAD,
    3: ScaleScope.PAGE_HEAD,
    4: ScaleScope.TOKEN_HEAD,
}
SCHEMES: Final = {0: None, 1: Scheme.COMPUTED, 2: Scheme.PRODUCER_SCALED}
ORDERS: Final = {1: PageOrder.NHD, 2: PageOrder.HND}
COMPONENTS: Final = {1: KEY, 2: VALUE, 3: VALUE_SCALE}
COMPONENT_IDS: Final = {name: number for number, name in COMPONENTS.items()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose bytes a blob holds.

    Attributes:
        key: 32 bytes, digest of the block's key.
        provenance: 32 bytes, digest of what the bytes depend on beside the tokens.
        put: 16 bytes, the put that wrote them; components of different puts never pair.

    Raises:
        ValueError: another length.
    """

    key: bytes
    provenance: bytes
    put: bytes

    def __post_init__(self) -> None:
        lengths = (len(self.key), len(self.provenance), len(self.put))
        if lengths != (32, 32, 16):
            raise ValueError(f"identity: found {lengths} bytes, expected (32, 32, 16)")


@final
@dataclass(frozen=True, slots=True)
class Section:
    """Where a component lies in a blob.

    Attributes:
        part: the component: axes, shape, dtype, bytes.
        offset: first byte, a multiple of 4096.
        end: behind its padding, a multiple of 4096.
    """

    part: Component
    offset: int
    end: int


@final
@dataclass(frozen=True, slots=True)
class BlobPlan:
    """Everything about a version 3 blob except its bytes.

    Attributes:
        layout: the whole block's page layout, values in FP8.
        pages: pages of the block.
        scheme: where codes and scales come from; None in a layout without values.
        sections: the components that the blob holds, by name, in the order of the wire.
        nbytes: bytes of the blob, a multiple of 4096.
    """

    layout: PageLayout
    pages: int
    scheme: Scheme | None
    sections: tuple[Section, ...]
    nbytes: int

    def section(self, name: str) -> Section:
        """The section of a component.

        Raises:
            ComponentMissing: the blob does not hold it.
        """
        for found in self.sections:
            if found.part.name == name:
                return found
        names = [found.part.name for found in self.sections]
        raise ComponentMissing("section", found=names, expected=name)

    def view(self, blob: memoryview, name: str) -> memoryview:
        """The bytes of a component inside a blob, padding left out."""
        found = self.section(name)
        return blob[found.offset : found.offset + found.part.nbytes]

    def views(self, blob: memoryview) -> dict[str, memoryview]:
        """Every component's bytes inside a blob, by name."""
        return {found.part.name: self.view(blob, found.part.name) for found in self.sections}


def plan_v3(
    layout: PageLayout,
    *,
    pages: int = 1,
    names: Iterable[str] | None = None,
    scheme: Scheme = Scheme.COMPUTED,
) -> BlobPlan:
    """Plan a blob.

    Args:
        layout: the block's page layout; values, if any, in FP8 with scales.
        pages: pages of the block, at least 1.
        names: components to hold; all when None. Values and their scales go together.
        scheme: computed, or producer-scaled; not looked at in a layout without values.

    Raises:
        LayoutMismatch: no pages, values that are not FP8 with scales, a scheme or a choice of
            components that the format does not have.
    """
    wanted = None if names is None else frozenset(names)
    return plan_of(layout, pages, wanted, None if layout.value is None else scheme)


def encoded_size(layout: PageLayout, *, pages: int = 1, names: Iterable[str] | None = None) -> int:
    """Bytes of a version 3 blob, header and padding included; a multiple of 4096."""
    return plan_v3(layout, pages=pages, names=names).nbytes


@functools.lru_cache(maxsize=256)
def plan_of(
    layout: PageLayout, pages: int, names: frozenset[str] | None, scheme: Scheme | None
) -> BlobPlan:
    parts = layout.components(pages)
    known = {part.name for part in parts}
    wanted = known if names is None else names
    if layout.value is not None and layout.scope is None:
        raise LayoutMismatch(f"values: found {layout.value}, expected FP8 with a scale scope")
    if pages < 1 or not wanted or wanted - known or (VALUE in wanted) != (VALUE_SCALE in wanted):
        raise LayoutMismatch(
            f"blob: found {pages} pages of {sorted(wanted)}, expected 1 or more of {sorted(known)}, "
            "values with their scales"
        )
    if scheme not in SCHEMES.values():
        raise LayoutMismatch(f"scheme: found {scheme}, expected computed or producer_scaled")
    sections = []
    end = HEADER_BYTES
    for part in parts:
        if part.name in wanted:
            start, end = end, end + -(-part.nbytes // HEADER_BYTES) * HEADER_BYTES
            sections.append(Section(part, start, end))
    return BlobPlan(layout, pages, scheme, tuple(sections), end)


def seal_v3(plan: BlobPlan, blob: memoryview, identity: Identity, team: Team) -> None:
    """Finish a blob whose sections are in place: padding, checksums, header.

    Args:
        plan: what the sections are.
        blob: writable, exactly ``plan.nbytes`` long; the first 4096 bytes are overwritten.
        identity: whose bytes they are.
        team: threads for the checksums.

    Raises:
        LengthError: another length.
    """
    check("blob length", len(blob), plan.nbytes)
    crcs = []
    for section in plan.sections:
        used = section.offset + section.part.nbytes
        blob[used : section.end] = ZEROS[: section.end - used]
        crcs.append(crc32(blob[section.offset : used], team))
    blob[:HEADER_BYTES] = pack_header(plan, identity, crcs)


def pack_header(plan: BlobPlan, identity: Identity, crcs: list[int]) -> bytes:
    """The 4096 bytes of the header, from the checksums of the sections in their order."""
    layout = plan.layout
    head = bytearray(HEADER_BYTES)
    struct.pack_into(
        FIXED,
        head,
        0,
        MAGIC,
        VERSION,
        len(plan.sections),
        HEADER_BYTES,
        plan.nbytes,
        _number(SCHEMES, plan.scheme),
        _number(SCOPES, layout.scope),
        _number(ORDERS, layout.order),
        0,
        layout.layers,
        plan.pages,
        layout.page_size,
        layout.kv_heads,
        layout.head_dim,
        layout.value_width,
        _DTYPE_IDS[layout.key],
        _DTYPE_IDS[layout.value],
        _DTYPE_IDS["float32"] if layout.value else 0,
    )
    struct.pack_into(IDENTITY, head, 64, identity.key, identity.provenance, identity.put)
    for index, (section, crc) in enumerate(zip(plan.sections, crcs, strict=True)):
        pack_section(head, SECTIONS_AT + index * SECTION_BYTES, section, crc)
    struct.pack_into("<I", head, CRC_AT, plain_crc32(memoryview(head)[:CRC_AT]))
    return bytes(head)


def pack_section(head: bytearray, offset: int, section: Section, crc: int) -> None:
    part = section.part
    struct.pack_into(
        SECTION,
        head,
        offset,
        COMPONENT_IDS[part.name],
        _DTYPE_IDS[part.dtype],
        len(part.shape),
        0,
        crc,
        section.offset,
        part.nbytes,
        part.axes.encode(),
        *part.shape,
        *(0 for _ in range(6 - len(part.shape))),
        b"",
    )


def _number(table: Mapping[int, object], value: object) -> int:
    return next(number for number, known in table.items() if known == value)
