"""Errors of the tiers; each class says what is wrong, each message what was found and expected."""

from __future__ import annotations

from transfer._errors import TransferError


class TierError(TransferError):
    """Base of everything that a tier, a codec or a wire format can report."""


class CapacityExceeded(TierError):
    """More bytes than a buffer, a tier or a queue has room for: nothing was written."""


class NonFiniteValue(TierError):
    """Values hold NaN or infinities and the caller asked to have them refused.

    Raised before anything is written.

    Attributes:
        nan: NaN elements.
        infinite: infinite elements.
    """

    def __init__(self, *, nan: int, infinite: int) -> None:
        super().__init__(f"values: found {nan} NaN and {infinite} infinite, expected none")
        self.nan = nan
        self.infinite = infinite


class AmplitudeError(TierError):
    """Values too small, or too large, for FP8 codes with a scale of one.

    Attributes:
        error: relative RMS error that unit-scale codes would have.
        limit: the largest error allowed.
    """

    def __init__(self, *, error: float, limit: float) -> None:
        super().__init__(
            f"unit-scale codes: found a relative RMS error of {error:.4g}, "
            f"expected at most {limit:.4g}; use computed scales"
        )
        self.error = error
        self.limit = limit


class FormatError(TierError):
    """Bytes that are not a blob, or not the blob asked for. Nothing was written.

    Attributes:
        field: what was looked at.
        found: what it holds.
        expected: what it should hold.
    """

    def __init__(self, field: str, *, found: object, expected: object) -> None:
        super().__init__(f"{field}: found {_short(found)}, expected {_short(expected)}")
        self.field = field
        self.found = found
        self.expected = expected

    @property
    def cause(self) -> str:
        """Name under which refusals of this kind are counted."""
        return type(self).__name__


class LengthError(FormatError):
    """Too short, too long, or a length that disagrees with another one."""


class VersionError(FormatError):
    """Another magic, version or header length."""


class UnknownId(FormatError):
    """A number or name that stands for nothing in this format."""


class ShapeError(FormatError):
    """A rank, size, axis order or section place that disagrees with the geometry."""


class ReservedError(FormatError):
    """Bytes that have to be zero are not."""


class ScaleError(FormatError):
    """A scale that is not finite and positive, or missing."""


class DtypeMismatch(FormatError):
    """Another element type than the one asked for: bytes are never reinterpreted."""


class SchemeMismatch(FormatError):
    """Computed scales where codes of the producer are asked for, or the reverse."""


class ComponentMissing(FormatError):
    """The blob does not hold a component that is asked for, or holds one that is not."""


class ProvenanceMismatch(FormatError):
    """Another key, put, model, tokenizer or layout than the one asked for."""


class ChecksumMismatch(FormatError):
    """Header or section bytes do not have the checksum that the blob states."""


def _short(value: object) -> str:
    """A value as text of bounded length; byte strings in hexadecimal."""
    if isinstance(value, bytes | bytearray | memoryview):
        text = bytes(value[:40]).hex()
        return f"{text}…" if len(value) > 40 else text
    text = str(value)
    return f"{text[:117]}…" if len(text) > 118 else text
