"""What a tier is: a place for encoded components, that says which I/O is to be done and does none.

A tier counts bytes and hands out places. Whoever uses it runs the work that it returns on an engine and
reports what became of it. A place is for one component set of one put, is written once, and goes
through the table of `tiers._residency`: a late report about an old place is refused, never applied to
a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from tiers._errors import CapacityExceeded, TierError
from tiers._residency import Change, Residency, change
from transfer._errors import IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers._layout import Component
    from transfer._handle import Block
    from transfer._work import Work

PUT_BYTES: Final = 16
KEY_BYTES: Final = 32


class TierBusy(TierError):
    """Another writer has the directory, and one of the two did not open it shared."""


@final
@dataclass(frozen=True, slots=True)
class Item:
    """What a tier is asked to keep: some components of one put of one page, as one piece.

    Attributes:
        key: 32 bytes, digest of the page's key.
        put: 16 bytes, the put's id; the components of a put share it.
        parts: the components, each with its layout.
        nbytes: actual bytes of the piece, header and padding included.

    Raises:
        ValueError: a digest or id of another length, no components, or no bytes.
    """

    key: bytes
    put: bytes
    parts: tuple[Component, ...]
    nbytes: int

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.put) != PUT_BYTES:
            raise ValueError(f"item: found {len(self.key)} and {len(self.put)} bytes of key and id")
        if not self.parts or self.nbytes < 1:
            raise ValueError(f"item: found {self.nbytes} bytes of {self.parts}, expected some")


class Slot:
    """A place in a tier, for one item.

    Attributes:
        item: what it is for.
        charged: bytes that it counts for, at least the item's.
        residency: how far it has come.
    """

    __slots__ = ("charged", "item", "residency")

    def __init__(self, item: Item, charged: int) -> None:
        self.item = item
        self.charged = charged
        self.residency = change(Residency.ABSENT, Change.RESERVE)

    def __repr__(self) -> str:
        return f"<place of {self.charged} bytes, {self.residency.value}>"

    def apply(self, *events: Change) -> None:
        """Let the table decide, for each event in turn.

        Raises:
            IllegalTransition: a report about a place that is past it.
        """
        after = self.residency
        for event in events:
            after = change(after, event)
        self.residency = after


class TierCounts(NamedTuple):
    """Bytes of a tier by what they are for; each byte is counted once.

    Attributes:
        filling: reserved and not yet readable.
        resident: readable.
        freeing: unwanted and not yet given back.
        other: in the directory, and not this tier's to give back.
    """

    filling: int
    resident: int
    freeing: int
    other: int = 0

    @property
    def charged(self) -> int:
        """All of them."""
        return sum(self)


class Tier(Protocol):
    """Where components live. Every method returns at once and touches no bytes.

    Attributes:
        name: for messages and statistics.
        capacity: bytes that it may have, None for no bound.
    """

    name: str
    capacity: int | None

    def fits(self, nbytes: int) -> int:
        """How many items of `nbytes` bytes could be reserved now."""
        ...

    def reserve(self, item: Item) -> Slot:
        """Set room aside.

        Raises:
            CapacityExceeded: there is none; nothing changed.
        """
        ...

    def write(self, slot: Slot, source: Block) -> Work:
        """The work that brings an item's bytes, which lie at the front of `source`, to its place."""
        ...

    def publish(self, slot: Slot) -> None:
        """The write has completed: the item may be read."""
        ...

    def read(self, slot: Slot, into: Block) -> Work:
        """The work that brings a resident item's bytes to the front of `into`."""
        ...

    def withdraw(self, slot: Slot) -> Sequence[Work]:
        """An item that was never published is not wanted; nothing writes it any more.

        Returns:
            What has to be done until its bytes are free; then call `freed`.
        """
        ...

    def evict(self, slot: Slot) -> Sequence[Work]:
        """A resident item has to go; nothing reads it any more. Returns as `withdraw` does."""
        ...

    def freed(self, slot: Slot) -> None:
        """What `withdraw` or `evict` asked for is done: the bytes count no longer."""
        ...

    def counts(self) -> TierCounts:
        """Bytes by what they are for."""
        ...


@final
class Account:
    """Bytes of a tier by residency; the one place where they are added and taken.

    Args:
        name: of the tier, for messages.
        capacity: bytes that may be charged, None for no bound.
    """

    def __init__(self, name: str, capacity: int | None) -> None:
        self.name = name
        self.capacity = capacity
        self.other = 0
        self._bytes = dict.fromkeys(Residency, 0)

    @property
    def charged(self) -> int:
        """Bytes that count towards the capacity."""
        return sum(self._bytes.values()) + self.other

    def room(self) -> int | None:
        """Bytes that are left, None for no bound."""
        return None if self.capacity is None else max(0, self.capacity - self.charged)

    def check(self, nbytes: int) -> None:
        """Refuse what is over the capacity.

        Raises:
            CapacityExceeded: says how much there is.
        """
        room = self.room()
        if room is not None and nbytes > room:
            raise CapacityExceeded(
                f"{self.name}: {nbytes} bytes wanted, {room} of {self.capacity} left"
            )

    def begin(self, slot: Slot) -> None:
        """Count a new place."""
        self._bytes[slot.residency] += slot.charged

    def apply(self, slot: Slot, *events: Change) -> None:
        """Move a place along the table, and its bytes with it."""
        before = slot.residency
        slot.apply(*events)
        self._bytes[before] -= slot.charged
        if slot.residency is not Residency.ABSENT:
            self._bytes[slot.residency] += slot.charged

    def withdraw(self, slot: Slot) -> None:
        """Move a place that was never published towards being freed.

        Raises:
            IllegalTransition: it is past that.
        """
        if slot.residency is not Residency.FILLING:
            raise IllegalTransition(f"{slot!r} is withdrawn: expected one that is filling")
        self.apply(slot, Change.FAIL, Change.QUIET)

    def counts(self) -> TierCounts:
        """See `Tier.counts`."""
        by = self._bytes
        return TierCounts(
            by[Residency.FILLING],
            by[Residency.RESIDENT],
            by[Residency.DOOMED] + by[Residency.EVICTING],
            self.other,
        )
