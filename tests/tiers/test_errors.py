import inspect

import pytest

from tiers import _errors
from tiers._errors import (
    AmplitudeError,
    CapacityExceeded,
    ChecksumMismatch,
    FormatError,
    LengthError,
    NonFiniteValue,
    TierError,
)
from transfer._errors import TransferError


def test_every_error_is_a_transfer_error() -> None:
    found = [
        known
        for _, known in inspect.getmembers(_errors, inspect.isclass)
        if issubclass(known, Exception) and known is not TransferError
    ]
    assert len(found) > 10
    assert all(issubclass(known, TierError) for known in found)
    assert issubclass(TierError, TransferError)
    assert not issubclass(CapacityExceeded, FormatError)


def test_a_format_error_names_field_found_and_expected() -> None:
    error = LengthError("blob length", found=3, expected=4096)
    assert str(error) == "blob length: found 3, expected 4096"
    assert (error.field, error.found, error.expected) == ("blob length", 3, 4096)
    assert error.cause == "LengthError"


def test_a_message_stays_short_whatever_was_found() -> None:
    error = ChecksumMismatch("x", found=bytes(10_000), expected="y" * 10_000)
    assert len(str(error)) < 300
    assert "…" in str(error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NonFiniteValue(nan=2, infinite=3), "2 NaN and 3 infinite"),
        (AmplitudeError(error=0.19, limit=0.03), "0.19"),
    ],
)
def test_other_errors_say_what_was_found(error: TierError, words: str) -> None:
    assert words in str(error)
    assert "expected" in str(error)
