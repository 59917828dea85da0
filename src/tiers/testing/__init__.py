"""Conformance suites for parts that others write: run them on your own codec or tier."""

from tiers.testing._codec import check_codec

__all__ = ["check_codec"]
