"""What attention refuses, and how it says so. Everything here is raised before any kernel runs."""

from __future__ import annotations


class AttentionError(ValueError):
    """Base of what this package raises."""


class PageTableError(AttentionError):
    """A page table that no kernel may be given; the message names the request."""


class CacheError(AttentionError):
    """Tensors that cannot be this cache: shape, dtype, stride, device or layout."""


class Unsupported(AttentionError):
    """No kernel computes this combination here; the message names what to use in its place."""


class MissingPart(ImportError):
    """An optional part is not installed; the message names it and what was wanted from it."""
