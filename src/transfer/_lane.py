"""What the ledger knows of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from transfer._device import InstantDevice
from transfer._state import SETTLED, State

if TYPE_CHECKING:
    from collections.abc import Hashable

    from transfer._device import Device
    from transfer._errors import DevicePoisoned
    from transfer._handle import Handle
    from transfer._operation import Operation
    from transfer._work import Route


@dataclass(frozen=True, slots=True)
class Marker:
    """A place in a stream that others wait for; touches nothing."""

    nbytes: int = 0
    reads: tuple[Handle, ...] = ()
    writes: tuple[Handle, ...] = ()
    route: Route = ()


@final
class Lane:
    """What the ledger knows of one device.

    Attributes:
        device: the device.
        instant: the same, if it can do small work at once.
        live: operations that are prepared, in flight or abandoned.
        admitted: how many of them count for admission.
        nbytes: their bytes.
        lost: quarantined operations and the bytes of their blocks.
        poisoned: why no new work is accepted, if so.
        streams: unsettled operations that each stream is known to be behind.
        ended: how many operations reached each settled state.
        losses: how many operations were ever lost.
        moved: bytes of completed operations.
    """

    __slots__ = (
        "admitted",
        "device",
        "ended",
        "instant",
        "live",
        "losses",
        "lost",
        "moved",
        "nbytes",
        "poisoned",
        "streams",
        "submitted",
    )

    def __init__(self, device: Device) -> None:
        self.device = device
        self.instant = device if isinstance(device, InstantDevice) else None
        self.live: dict[Operation, None] = {}
        self.admitted = 0
        self.nbytes = 0
        self.lost: dict[Operation, int] = {}
        self.poisoned: DevicePoisoned | None = None
        self.streams: dict[Hashable, list[Operation]] = {}
        self.ended = dict.fromkeys(SETTLED, 0)
        self.losses = 0
        self.moved = 0
        self.submitted = 0

    def leave(self, op: Operation) -> bool:
        """Take an operation out of the live ones; whether it was one of them."""
        if op not in self.live:
            return False
        del self.live[op]
        if not isinstance(op.work, Marker):
            self.admitted -= 1
            self.nbytes -= op.nbytes
        return True

    def end(self, op: Operation) -> None:
        """Count an operation that has settled."""
        if isinstance(op.work, Marker):
            return
        self.ended[op.state] += 1
        if op.state is State.COMPLETED:
            self.moved += op.nbytes

    def covered(self, key: Hashable | None) -> list[Operation]:
        """Unsettled operations that a stream is known to be behind."""
        if key is None or key not in self.streams:
            return []
        left = [op for op in self.streams[key] if op.state not in SETTLED]
        if left:
            self.streams[key] = left
        else:
            del self.streams[key]
        return left

    def cover(self, key: Hashable, op: Operation) -> None:
        """Record that a stream is behind `op` from now on."""
        self.streams[key] = [*self.covered(key), op]
