"""What the wire formats share: checks that name what was found, and the words of their headers."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from tiers._errors import FormatError, LengthError, ReservedError, ScaleError

if TYPE_CHECKING:
    from collections.abc import Container

ZEROS: Final = bytes(4096)


class Scheme(StrEnum):
    """Where codes and scales come from. Each is a key space of its own."""

    COMPUTED = "computed"
    PRODUCER_SCALED = "producer_scaled"
    RAW_UNIT = "raw_unit"

    @property
    def key_space(self) -> bytes:
        """What goes into a key, so that a reader of one scheme never finds entries of another."""
        return b"kvhold:" + self.value.encode()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Strings:
    """What blobs of version 1 and 2 say about their origin; empty means not stated."""

    model_id: str = ""
    model_revision_hash: str = ""
    tokenizer_hash: str = ""
    rope_config_hash: str = ""
    attention_backend: str = ""
    kv_layout: str = ""

    def items(self) -> list[tuple[str, str]]:
        """Names and values in the order of the wire."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


NO_STRINGS: Final = Strings()


def check(
    field: str, found: object, expected: object, error: type[FormatError] = LengthError
) -> None:
    """Refuse anything but `expected`."""
    if found != expected:
        raise error(field, found=found, expected=expected)


def check_one_of(
    field: str, found: object, known: Container[Any], words: str, error: type[FormatError]
) -> None:
    """Refuse what is not in `known`."""
    if found not in known:
        raise error(field, found=found, expected=words)


def unpack(form: str, data: memoryview, offset: int, field: str) -> tuple[Any, ...]:
    """Read a struct, or say that the bytes end before it does."""
    end = offset + struct.calcsize(form)
    if end > len(data):
        raise LengthError(field, found=f"{len(data)} bytes", expected=f"at least {end}")
    return struct.unpack_from(form, data, offset)


def check_zero(field: str, data: memoryview) -> None:
    """Refuse a byte that is not zero, without taking memory for long ranges."""
    for start in range(0, len(data), len(ZEROS)):
        part = data[start : start + len(ZEROS)]
        if part != ZEROS[: len(part)]:
            at = next(i for i, byte in enumerate(part) if byte)
            raise ReservedError(f"{field}, byte {start + at}", found=part[at], expected=0)


def check_scales(field: str, data: memoryview) -> None:
    """Refuse a scale that is not finite and positive; memory is bounded by a fixed chunk."""
    scales = np.frombuffer(data, dtype="<f4")
    for start in range(0, len(scales), 65536):
        part = scales[start : start + 65536]
        good = np.isfinite(part) & (part > 0)
        if not good.all():
            at = int(np.argmin(good))
            raise ScaleError(
                f"{field} {start + at}", found=float(part[at]), expected="finite and above 0"
            )


def as_bytes(data: object) -> memoryview:
    """Any contiguous buffer as unsigned bytes, without a copy."""
    view = memoryview(data)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
