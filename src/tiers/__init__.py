"""Storage tiers: where blocks of a key/value cache live, and who may use them.

A page is encoded into typed components, which go to host memory and to files; a store finds pages by
what led to them and brings them back. Nothing is visible before all of it is there.
"""

from tiers._errors import (
    AmplitudeError,
    CapacityExceeded,
    ChecksumMismatch,
    ComponentMissing,
    DtypeMismatch,
    FormatError,
    LengthError,
    NonFiniteValue,
    ProvenanceMismatch,
    ReservedError,
    ScaleError,
    SchemeMismatch,
    ShapeError,
    TierError,
    UnknownId,
    VersionError,
)
from tiers._form import Placement
from tiers._health import Health
from tiers._key import BlockKey, Keys, Provenance
from tiers._layout import PageLayout, PageOrder, ScaleScope, StaticScales
from tiers._policy import Lru, S3Fifo
from tiers._store_fetch import Hit
from tiers._store_put import PutFailed, Ticket
from tiers._store_report import StoreStatistics, VerifyReport
from tiers._tier import Item, Slot, Tier, TierBusy, TierCounts
from tiers._views import CacheKind, CacheView, view_cache
from tiers.codec import ByteThroughCodec, Codec, K16V8Codec, V1Codec, V3Codec
from tiers.disk import DiskTier
from tiers.host import HostTier
from tiers.store import KVStore

__all__ = [
    "AmplitudeError",
    "BlockKey",
    "ByteThroughCodec",
    "CacheKind",
    "CacheView",
    "CapacityExceeded",
    "ChecksumMismatch",
    "Codec",
    "ComponentMissing",
    "DiskTier",
    "DtypeMismatch",
    "FormatError",
    "Health",
    "Hit",
    "HostTier",
    "Item",
    "K16V8Codec",
    "KVStore",
    "Keys",
    "LengthError",
    "Lru",
    "NonFiniteValue",
    "PageLayout",
    "PageOrder",
    "Placement",
    "Provenance",
    "ProvenanceMismatch",
    "PutFailed",
    "ReservedError",
    "S3Fifo",
    "ScaleError",
    "ScaleScope",
    "SchemeMismatch",
    "ShapeError",
    "Slot",
    "StaticScales",
    "StoreStatistics",
    "Ticket",
    "Tier",
    "TierBusy",
    "TierCounts",
    "TierError",
    "UnknownId",
    "V1Codec",
    "V3Codec",
    "VerifyReport",
    "VersionError",
    "view_cache",
]
