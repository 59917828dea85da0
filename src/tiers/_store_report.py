"""What a store says about itself: a snapshot of its counts, and a check of every page it has."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tiers._residency import Residency
from tiers._store_fetch import Hit, Load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiers._flight import Flights
    from tiers._health import Health
    from tiers._store_core import Core
    from tiers._tier import TierCounts


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """One store; counts are since it was made, the rest is now.

    Attributes:
        pages: pages that are resident or on their way in.
        lookups: calls of `lookup`.
        hits: pages found by lookups, by the tier whose component completes them.
        misses: pages asked for and not found.
        offered: pages given to `put`.
        stored: pages that became resident.
        refused: pages that were not taken, by reason.
        failed: pages whose write failed.
        evicted: pages that gave way to others.
        dropped: resident pages that proved damaged or lost.
        faults: faults of files and checks, by name.
        put_waits: times that a put waited for room.
        joined_flights: reads that were shared.
        write_behind_bytes: bytes staged and not written.
        written_bytes: bytes of files written.
        read_bytes: bytes of files read.
        tiers: bytes of each tier by what they are for.
        tenants: bytes of each tenant.
        health: of writing to the last tier.
        read_health: of reading from it.
        temporaries_removed: unfinished files of dead writers.
        orphans_removed: value files of dead writers.
        stuck_removals: files that could not be removed so far.
        adopted: pages taken over from an earlier process.
    """

    pages: int
    lookups: int
    hits: Mapping[str, int]
    misses: int
    offered: int
    stored: int
    refused: Mapping[str, int]
    failed: int
    evicted: int
    dropped: int
    faults: Mapping[str, int]
    put_waits: int
    joined_flights: int
    write_behind_bytes: int
    written_bytes: int
    read_bytes: int
    tiers: Mapping[str, TierCounts]
    tenants: Mapping[str, int]
    health: Health
    read_health: Health
    temporaries_removed: int
    orphans_removed: int
    stuck_removals: int
    adopted: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a look at every resident page found.

    Attributes:
        checked: pages whose files were read and checked.
        damaged: pages that were not what they should be, by key in hexadecimal, with the reason.
    """

    checked: int
    damaged: Mapping[str, str]


def observe(core: Core) -> StoreStatistics:
    """Take a snapshot."""
    host, disk, counts = core.host, core.disk, core.counts
    last = core.monitor.tier
    tiers = {tier.name: tier.counts() for tier in (host, disk) if tier is not None}
    return StoreStatistics(
        pages=len(core.index),
        lookups=counts["lookups"],
        hits=_frozen({last: counts["hits"]}),
        misses=counts["misses"],
        offered=counts["offered"],
        stored=counts["stored"],
        refused=_frozen(core.refused),
        failed=counts["failed"],
        evicted=counts["evicted"],
        dropped=counts["dropped"],
        faults=_frozen(core.faults),
        put_waits=counts["put waits"],
        joined_flights=counts["joined flights"],
        write_behind_bytes=core.writes.queued_bytes,
        written_bytes=counts["bytes written"],
        read_bytes=counts["bytes read"],
        tiers=MappingProxyType(tiers),
        tenants=_frozen(core.shares.used),
        health=core.monitor.health(),
        read_health=core.reads.health(),
        temporaries_removed=disk.temporaries_removed if disk else 0,
        orphans_removed=disk.orphans_removed if disk else 0,
        stuck_removals=len(core.removals.stuck),
        adopted=counts["adopted"],
    )


async def verify(flights: Flights, progress: Callable[[int, int], None] | None) -> VerifyReport:
    """See `KVStore.verify`."""
    core = flights.core
    everything = list(core.index)
    damaged: dict[str, str] = {}
    checked = 0
    size = max(1, flights.stages.count)
    for start in range(0, len(everything), size):
        chunk = everything[start : start + size]
        resident = [entry for entry in chunk if entry.residency is Residency.RESIDENT]
        with Hit(core, resident, page_size=core.form.layout.page_size, whose=None) as hit:
            load = Load(flights, hit.entries, None)
            await load.run(())
        for number, error in load.faults.items():
            damaged[hit.entries[number].digest.hex()] = str(error)
        checked += len(hit.entries)
        if progress is not None:
            progress(start + len(chunk), len(everything))
    return VerifyReport(checked, MappingProxyType(damaged))


def _frozen(counts: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType({name: count for name, count in counts.items() if count})
