"""Attention over paged key/value blocks: the blocks are held until the kernel is done.

Importing this needs torch; Triton and FlashInfer are looked for when a backend is asked for.
"""

from attention._backend import Backend, Planned, Room, Wanted
from attention._choice import Backends
from attention._errors import AttentionError, CacheError, MissingPart, PageTableError, Unsupported
from attention._pages import PageTable
from attention._plan import Plan, PlanState
from attention._scales import ScaleOrigin, ValueScales
from attention._view import LayerView
from attention.cache import PagedKVCache
from attention.decode import PagedDecoder, PagedPrefill

__all__ = [
    "AttentionError",
    "Backend",
    "Backends",
    "CacheError",
    "LayerView",
    "MissingPart",
    "PageTable",
    "PageTableError",
    "PagedDecoder",
    "PagedKVCache",
    "PagedPrefill",
    "Plan",
    "PlanState",
    "Planned",
    "Room",
    "ScaleOrigin",
    "Unsupported",
    "ValueScales",
    "Wanted",
]
