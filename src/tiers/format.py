"""Wire formats of encoded K/V blocks: versions 1 and 2 as other systems write them, 3 our own.

`blob_version` tells them apart. Each is opened with what the reader asks for, and refused with a
subclass of `FormatError` that names the field, what was found and what was expected. A blob is trusted
in this order: lengths and numbers, scales, checksum; destinations are touched after that.
"""

from __future__ import annotations

import hashlib

from tiers import _format_v1, _format_v3
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
from tiers._format_v1 import V1Blob, V1Header, V1Scope, open_v1, seal_v1
from tiers._format_v3 import (
    HEADER_BYTES,
    BlobPlan,
    Identity,
    Section,
    encoded_size,
    pack_header,
    plan_v3,
    seal_v3,
)
from tiers._format_v3_read import V3Header, parse_v3

__all__ = [
    "HEADER_BYTES",
    "BlobPlan",
    "ChecksumMismatch",
    "ComponentMissing",
    "DtypeMismatch",
    "FormatError",
    "Identity",
    "LengthError",
    "ProvenanceMismatch",
    "ReservedError",
    "ScaleError",
    "Scheme",
    "SchemeMismatch",
    "Section",
    "ShapeError",
    "Strings",
    "UnknownId",
    "V1Blob",
    "V1Header",
    "V1Scope",
    "V3Header",
    "VersionError",
    "as_bytes",
    "blob_version",
    "encoded_size",
    "key_in_space",
    "open_v1",
    "pack_header",
    "parse_v3",
    "plan_v3",
    "seal_v1",
    "seal_v3",
]


def blob_version(data: memoryview) -> int:
    """Version of a blob by its magic and version word: 1, 2 or 3.

    Raises:
        LengthError: fewer than 10 bytes.
        VersionError: none of the three.
    """
    if len(data) < 10:
        raise LengthError("blob length", found=len(data), expected="at least 10")
    magic, version = bytes(data[:8]), int.from_bytes(data[8:10], "little")
    if magic not in {_format_v1.MAGIC, _format_v3.MAGIC}:
        raise VersionError("magic", found=magic, expected="that of version 1, 2 or 3")
    if version not in ({1, 2} if magic == _format_v1.MAGIC else {3}):
        raise VersionError("version", found=version, expected="the magic's")
    return version


def key_in_space(digest: bytes, scheme: Scheme) -> bytes:
    """A key's digest moved into the key space of a scheme, 32 bytes.

    Entries of one scheme are never found by a reader of another: the digests differ.
    """
    return hashlib.sha256(scheme.key_space + b"\0" + digest).digest()
