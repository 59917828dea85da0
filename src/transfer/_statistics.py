"""Frozen snapshots of what an engine has done and is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfer._lane import Marker
from transfer._state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transfer._lane import Lane
    from transfer._ledger import Ledger


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """One device; counts are since the engine was made, the rest is now.

    Attributes:
        submitted: operations that took holds.
        completed: operations that completed.
        failed: operations that failed, lost ones that were proven quiet included.
        cancelled: operations that were cancelled.
        losses: operations that were ever lost.
        bytes_moved: bytes of completed operations.
        prepared: operations that wait for predecessors.
        in_flight: operations that the device has, abandoned ones included.
        abandoned: operations that the device has and nobody wants.
        in_flight_bytes: bytes of prepared and in-flight operations.
        quarantined: operations whose end cannot be learnt.
        quarantined_bytes: bytes of their blocks.
        poisoned: why no new work is accepted, or None.
    """

    submitted: int
    completed: int
    failed: int
    cancelled: int
    losses: int
    bytes_moved: int
    prepared: int
    in_flight: int
    abandoned: int
    in_flight_bytes: int
    quarantined: int
    quarantined_bytes: int
    poisoned: str | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """One engine.

    Attributes:
        devices: by device name.
        stray_completions: completions that matched no operation, or one that had ended.
        trace_errors: calls of the trace hook that raised.
        double_releases: second releases of leases of the pools in use.
    """

    devices: Mapping[str, DeviceStatistics]
    stray_completions: int
    trace_errors: int
    double_releases: int


def _lane(lane: Lane) -> DeviceStatistics:
    states = [op.state for op in lane.live if not isinstance(op.work, Marker)]
    prepared = states.count(State.PREPARED)
    return DeviceStatistics(
        submitted=lane.submitted,
        completed=lane.ended[State.COMPLETED],
        failed=lane.ended[State.FAILED],
        cancelled=lane.ended[State.CANCELLED],
        losses=lane.losses,
        bytes_moved=lane.moved,
        prepared=prepared,
        in_flight=len(states) - prepared,
        abandoned=states.count(State.ABANDONED),
        in_flight_bytes=lane.nbytes,
        quarantined=len(lane.lost),
        quarantined_bytes=sum(lane.lost.values()),
        poisoned=None if lane.poisoned is None else str(lane.poisoned),
    )


def observe(ledger: Ledger, lanes: Iterable[Lane]) -> Statistics:
    """Take a snapshot."""
    return Statistics(
        devices={lane.device.name: _lane(lane) for lane in lanes},
        stray_completions=ledger.stray_completions,
        trace_errors=0 if ledger.tracer is None else ledger.tracer.errors,
        double_releases=sum(pool.double_releases for pool in ledger.pools),
    )
