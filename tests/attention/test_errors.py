"""What the package refuses has one base, except a part that is not installed."""

import pytest

from attention import AttentionError, CacheError, MissingPart, PageTableError, Unsupported


@pytest.mark.parametrize("kind", [CacheError, PageTableError, Unsupported])
def test_refusals_are_value_errors_of_one_kind(kind: type[Exception]) -> None:
    assert issubclass(kind, AttentionError)
    assert issubclass(kind, ValueError)


def test_a_missing_part_is_an_import_error() -> None:
    assert issubclass(MissingPart, ImportError)
    assert not issubclass(MissingPart, AttentionError)
