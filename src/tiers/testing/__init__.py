"""Conformance suites for parts that others write, and blobs to try readers on."""

from tiers.testing._blobs import (
    IDENTITY,
    sample_blob,
    sample_codecs,
    sample_page,
    sample_source,
)
from tiers.testing._codec import check_codec
from tiers.testing._tier import check_tier

__all__ = [
    "IDENTITY",
    "check_codec",
    "check_tier",
    "sample_blob",
    "sample_codecs",
    "sample_page",
    "sample_source",
]
