"""The life of one put of one key as a table. The table is the program.

Every put of a key has an id of its own and runs through this table once; a later put of the same key
is another row of records. So a late event of an old put can neither complete nor remove a newer one.
An absent cell raises `IllegalTransition` and changes nothing.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from transfer._errors import IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Mapping


class Residency(enum.Enum):
    """Where the bytes of one put are, and with it who may read them."""

    ABSENT = "absent"
    """Nothing is reserved: before the put, or after its last byte was freed."""
    FILLING = "filling"
    """Bytes are reserved and on their way; nobody may read."""
    RESIDENT = "resident"
    """Every component was published: readable, and evictable while nobody leases it."""
    DOOMED = "doomed"
    """Unwanted, but something still writes or reads: a miss at once, freed when that has ended."""
    EVICTING = "evicting"
    """Nothing touches it any more; its bytes are being freed and still count."""

    __hash__ = object.__hash__


class Change(enum.Enum):
    """What can happen to a put."""

    RESERVE = "reserve"
    """Every tier has set bytes aside."""
    PUBLISH = "publish"
    """The last component was published."""
    FAIL = "fail"
    """A component could not be written, or proved damaged."""
    REMOVE = "remove"
    """Somebody wants it gone."""
    EVICT = "evict"
    """Its room is wanted; only sent while no lease and no read is on it."""
    QUIET = "quiet"
    """The last write, read and lease have ended."""
    FREED = "freed"
    """Every tier has its bytes back."""

    __hash__ = object.__hash__


CHANGES: Final[Mapping[Residency, Mapping[Change, Residency]]] = MappingProxyType(
    {
        Residency.ABSENT: MappingProxyType(
            {
                Change.RESERVE: Residency.FILLING,
                Change.REMOVE: Residency.ABSENT,
            }
        ),
        Residency.FILLING: MappingProxyType(
            {
                Change.PUBLISH: Residency.RESIDENT,
                Change.FAIL: Residency.DOOMED,
                Change.REMOVE: Residency.DOOMED,
            }
        ),
        Residency.RESIDENT: MappingProxyType(
            {
                Change.EVICT: Residency.EVICTING,
                Change.FAIL: Residency.DOOMED,
                Change.REMOVE: Residency.DOOMED,
            }
        ),
        Residency.DOOMED: MappingProxyType(
            {
                Change.FAIL: Residency.DOOMED,
                Change.REMOVE: Residency.DOOMED,
                Change.QUIET: Residency.EVICTING,
            }
        ),
        Residency.EVICTING: MappingProxyType(
            {
                Change.REMOVE: Residency.EVICTING,
                Change.FREED: Residency.ABSENT,
            }
        ),
    }
)
"""``CHANGES[residency][change]`` is what follows; an absent cell is illegal."""


def change(residency: Residency, event: Change) -> Residency:
    """Return what `event` makes of `residency`.

    Raises:
        IllegalTransition: the table has no such cell.
    """
    row = CHANGES[residency]
    if event not in row:
        raise IllegalTransition(
            f"{event.name} in {residency.name}: expected one of "
            f"{', '.join(e.name for e in Change if e in row)}"
        )
    return row[event]
