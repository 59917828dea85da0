"""Conformance suites for parts that others write, and blobs to try readers on."""

from tiers.testing._blobs import (
    IDENTITY,
    sample_blob,
    sample_codecs,
    sample_page,
    sample_source,
)
from tiers.testing._codec import check_codec

__all__ = [
    "IDENTITY",
    "check_codec",
    "sample_blob",
    "sample_codecs",
    "sample_page",
    "sample_source",
]
