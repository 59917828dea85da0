"""What to evict and what to admit: pure bookkeeping, no clock, no I/O.

A policy knows records, not bytes. Reading a record costs one store of a number (`used`), so that a
lookup of thousands of pages stays cheap; order is worked out when something has to go.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from itertools import count
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    MakePolicy = Callable[[], "Policy"]


class Record(Protocol):
    """What a policy looks at.

    Attributes:
        digest: names the page.
        depth: pages before it in its sequence; of pages used at the same time the deepest goes
            first, since it is of no use without those before it.
        used: number of the lookup that last read it.
        nbytes: what it counts for.
        tenant: whose it is.
    """

    digest: bytes
    depth: int
    used: int
    nbytes: int
    tenant: str


class Policy(Protocol):
    """Orders records by how little they are worth."""

    def __len__(self) -> int:
        """Records known."""
        ...

    def add(self, record: Record) -> None:
        """A record became resident."""
        ...

    def drop(self, record: Record) -> None:
        """A record is gone; legal for one that is not known."""
        ...

    def victims(self, may: Callable[[Record], bool]) -> Iterator[Record]:
        """Records in the order in which they should go, those that `may` allows; may be left early.

        A record that is yielded is still known: `drop` it when it goes.
        """
        ...


@final
class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Record]] = []
        self._known: dict[Record, int] = {}
        self._serial = count()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, record: Record) -> None:
        """See `Policy.add`."""
        serial = next(self._serial)
        self._known[record] = serial
        heapq.heappush(self._heap, (record.used, -record.depth, serial, record))

    def drop(self, record: Record) -> None:
        """See `Policy.drop`."""
        self._known.pop(record, None)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._known):
            self._heap = [item for item in self._heap if self._known.get(item[3]) == item[2]]
            heapq.heapify(self._heap)

    def victims(self, may: Callable[[Record], bool]) -> Iterator[Record]:
        """See `Policy.victims`. Entries of the heap are brought up to date as they come up."""
        passed: list[tuple[int, int, int, Record]] = []
        try:
            while self._heap:
                item = used, _, serial, record = heapq.heappop(self._heap)
                if self._known.get(record) != serial:
                    continue
                if record.used != used:
                    heapq.heappush(self._heap, (record.used, -record.depth, serial, record))
                    continue
                passed.append(item)
                if may(record):
                    yield record
        finally:
            for item in passed:
                if self._known.get(item[3]) == item[2]:
                    heapq.heappush(self._heap, item)


@final
class S3Fifo:
    """S3-FIFO: a small queue that most records leave unread, a main queue, and a memory of names.

    After Yang, Zhang, Qiu, Yue, Vinayak, "FIFO queues are all you need for cache eviction" (SOSP
    2023), with one bit for "read since last looked at". A scan of pages that are read once passes
    through the small queue and leaves the main queue alone.

    Args:
        small: share of the records that the small queue may have.
        ghosts: how many names to remember, per record known.
    """

    def __init__(self, *, small: float = 0.1, ghosts: float = 1.0) -> None:
        self._share = small
        self._ghost_share = ghosts
        self._small: deque[Record] = deque()
        self._main: deque[Record] = deque()
        self._seen: dict[Record, tuple[int, bool]] = {}
        self._in_small = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, record: Record) -> None:
        """See `Policy.add`. One whose name is remembered goes to the main queue at once."""
        is_small = record.digest not in self._ghosts
        self._ghosts.pop(record.digest, None)
        self._seen[record] = (record.used, is_small)
        self._in_small += is_small
        (self._small if is_small else self._main).append(record)

    def drop(self, record: Record) -> None:
        """See `Policy.drop`. Its place in a queue is cleared when it comes up."""
        _, is_small = self._seen.pop(record, (0, False))
        if is_small:
            self._in_small -= 1
            self._ghosts[record.digest] = None
            while len(self._ghosts) > max(16, self._ghost_share * len(self._seen)):
                self._ghosts.popitem(last=False)
        for queue in (self._small, self._main):
            if len(queue) > 64 and len(queue) > 4 * len(self._seen):
                live = [item for item in queue if item in self._seen]
                queue.clear()
                queue.extend(live)

    def victims(self, may: Callable[[Record], bool]) -> Iterator[Record]:
        """See `Policy.victims`."""
        refused: list[Record] = []
        try:
            # Twice round each queue: the first time may find every record read.
            for _ in range(2 * (len(self._small) + len(self._main)) + 2):
                record = self._next()
                if record is None:
                    return
                refused.append(record)
                if may(record):
                    yield record
        finally:
            for record in reversed(refused):
                if record in self._seen:
                    is_small = self._seen[record][1]
                    (self._small if is_small else self._main).appendleft(record)

    def _next(self) -> Record | None:
        """Take the next candidate out of its queue; read records move on instead."""
        while self._small or self._main:
            from_small = bool(self._small) and (
                not self._main or self._in_small > self._share * len(self._seen)
            )
            record = (self._small if from_small else self._main).popleft()
            if record not in self._seen:
                continue
            used, is_small = self._seen[record]
            if record.used == used:
                return record
            self._seen[record] = (record.used, False)
            self._in_small -= is_small
            self._main.append(record)
        return None


@final
class Shares:
    """Eviction among tenants: each has a policy of its own, and may have a quota in bytes.

    Args:
        make: makes a policy.
        quotas: bytes that a tenant may have; others have no bound of their own.

    Attributes:
        used: bytes of each tenant's records, from being reserved to being freed.
    """

    def __init__(self, make: MakePolicy, quotas: dict[str, int] | None = None) -> None:
        self._make = make
        self.quotas = dict(quotas or {})
        self.used: dict[str, int] = {}
        self._policies: dict[str, Policy] = {}

    def charge(self, tenant: str, nbytes: int) -> None:
        """Count bytes, or with a negative number no longer; never below zero.

        Raises:
            ValueError: more would be given back than was counted.
        """
        left = self.used.get(tenant, 0) + nbytes
        if left < 0:
            raise ValueError(f"tenant {tenant!r}: {nbytes} given back, {left - nbytes} counted")
        if left:
            self.used[tenant] = left
        else:
            self.used.pop(tenant, None)

    def over(self, tenant: str, nbytes: int) -> int:
        """Bytes by which `nbytes` more would be over the tenant's quota; 0 if they are not."""
        quota = self.quotas.get(tenant)
        return 0 if quota is None else max(0, self.used.get(tenant, 0) + nbytes - quota)

    def add(self, record: Record) -> None:
        """A record became resident."""
        policy = self._policies.get(record.tenant)
        if policy is None:
            policy = self._policies[record.tenant] = self._make()
        policy.add(record)

    def drop(self, record: Record) -> None:
        """A record is gone."""
        policy = self._policies.get(record.tenant)
        if policy is not None:
            policy.drop(record)
            if not len(policy):
                del self._policies[record.tenant]

    def victims(self, may: Callable[[Record], bool], tenant: str | None = None) -> Iterator[Record]:
        """Records in the order in which they should go: of one tenant, or of all.

        Of several tenants' candidates the one that was read longest ago goes first.
        """
        if tenant is not None:
            policy = self._policies.get(tenant)
            yield from policy.victims(may) if policy is not None else ()
            return
        heads: list[tuple[int, int, Record, Iterator[Record]]] = []
        sources = [policy.victims(may) for policy in self._policies.values()]
        for number, source in enumerate(sources):
            first = next(source, None)
            if first is not None:
                heapq.heappush(heads, (first.used, number, first, source))
        while heads:
            _, number, record, source = heapq.heappop(heads)
            yield record
            following = next(source, None)
            if following is not None:
                heapq.heappush(heads, (following.used, number, following, source))


@final
class Admission:
    """Admits a page at its n-th offer, so that what is asked for once is not stored.

    Args:
        touches: offers until a page is admitted; 1 admits at once.
        remember: how many names to keep.
    """

    def __init__(self, touches: int = 1, *, remember: int = 1 << 16) -> None:
        if touches < 1 or remember < 1:
            raise ValueError(f"admission: {touches} touches, {remember} names; expected 1 or more")
        self.touches = touches
        self._remember = remember
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def admit(self, digest: bytes) -> bool:
        """Count an offer; whether the page is to be stored now."""
        if self.touches == 1:
            return True
        offers = self._offers.pop(digest, 0) + 1
        if offers >= self.touches:
            return True
        self._offers[digest] = offers
        if len(self._offers) > self._remember:
            self._offers.popitem(last=False)
        return False
