"""What any tier has to do, as a suite that its author runs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tiers._errors import CapacityExceeded
from tiers._residency import Residency
from tiers._tier import Item
from transfer._errors import IllegalTransition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiers._layout import Component
    from tiers._tier import Slot, Tier
    from transfer._engine import Engine
    from transfer._handle import Block
    from transfer._memory import Pool
    from transfer._work import Work

POISON = 0xA5
MANY = 64


async def check_tier(
    tier: Tier,
    engine: Engine,
    pool: Pool,
    parts: Sequence[Component],
    *,
    nbytes: int,
    seed: int = 0,
) -> None:
    """Hold a tier against the contract of `Tier`.

    What was published is read back bit for bit, and is never changed by a later put of the same key,
    nor by a late report about an earlier one. Bytes are counted once, from being reserved to being
    freed, and never beyond the capacity. Every refusal is typed and changes nothing.

    Args:
        tier: what to test; it has room for at least three items and holds none.
        engine: runs its work.
        pool: two free blocks or more that an item is written from and read into.
        parts: the components of an item.
        nbytes: its actual bytes.
        seed: of the bytes.

    Raises:
        AssertionError: the contract is broken; says where.
    """
    suite = _Suite(tier, engine, pool, tuple(parts), nbytes, np.random.default_rng(seed))
    await suite.check_round_trip()
    await suite.check_puts_of_one_key()
    await suite.check_withdrawals()
    await suite.check_late_reports()
    await suite.check_capacity()


class _Suite:
    def __init__(  # noqa: PLR0917 - private, called once
        self,
        tier: Tier,
        engine: Engine,
        pool: Pool,
        parts: tuple[Component, ...],
        nbytes: int,
        rng: np.random.Generator,
    ) -> None:
        self.tier = tier
        self.engine = engine
        self.pool = pool
        self.parts = parts
        self.nbytes = nbytes
        self.rng = rng
        self.puts = 0
        assert tier.counts().charged == 0, "a tier to test holds nothing"

    def item(self, name: str) -> Item:
        self.puts += 1
        digest = hashlib.sha256(name.encode()).digest()
        return Item(digest, self.puts.to_bytes(16, "big"), self.parts, self.nbytes)

    @staticmethod
    def at(slot: Slot, expected: Residency) -> None:
        assert slot.residency is expected, f"a place is {slot.residency}, expected {expected}"

    async def put(self, name: str) -> tuple[Slot, bytes]:
        """Reserve, write and publish random bytes."""
        slot = self.tier.reserve(self.item(name))
        self.at(slot, Residency.FILLING)
        assert slot.charged >= self.nbytes, "a place counts for its bytes at least"
        with self.pool.lease() as source:
            data = self.rng.bytes(source.nbytes)
            source.view(write=True)[:] = data
            await self.engine.run(self.tier.write(slot, source))
            source.view(write=True)[:] = bytes([POISON]) * source.nbytes
        self.tier.publish(slot)
        self.at(slot, Residency.RESIDENT)
        return slot, data[: self.nbytes]

    async def expect(self, slot: Slot, data: bytes, why: str) -> None:
        with self.pool.lease() as into:
            into.view(write=True)[:] = bytes([POISON]) * into.nbytes
            await self.engine.run(self.tier.read(slot, into))
            assert self.payload(into) == self.payload_of(data), why

    def payload(self, block: Block) -> list[bytes]:
        return self.payload_of(bytes(block.view()))

    def payload_of(self, data: bytes) -> list[bytes]:
        """The bytes of the components, or all of them where the block is plain bytes."""
        names = {part.name for part in self.parts}
        extents = [e for e in self.pool.layout.extents if e.name in names]
        if not extents:
            return [data[: self.nbytes]]
        return [data[e.offset : e.offset + e.nbytes] for e in extents]

    async def free(self, ask: Callable[[Slot], Sequence[Work]], slot: Slot) -> None:
        before = self.tier.counts().charged
        works = ask(slot)
        assert self.tier.counts().charged == before, "bytes count until they are freed"
        for work in works:
            await self.engine.run(work)
        self.tier.freed(slot)
        self.at(slot, Residency.ABSENT)
        assert self.tier.counts().charged == before - slot.charged, "freed bytes count no longer"

    async def check_round_trip(self) -> None:
        one, first = await self.put("one")
        two, second = await self.put("two")
        await self.expect(one, first, "an item comes back bit for bit")
        await self.expect(two, second, "items do not share bytes")
        await self.expect(one, first, "reading changes nothing")
        counts = self.tier.counts()
        assert counts.resident == one.charged + two.charged, "resident bytes are counted"
        assert counts.filling == counts.freeing == 0, "each byte is counted once"
        await self.free(self.tier.evict, one)
        await self.expect(two, second, "evicting an item leaves the others alone")
        await self.free(self.tier.evict, two)

    async def check_puts_of_one_key(self) -> None:
        old, stale = await self.put("same")
        new, data = await self.put("same")
        await self.expect(old, stale, "an item is never changed by a later put of its key")
        await self.free(self.tier.evict, old)
        await self.expect(new, data, "a late eviction of an old put hits nothing of a newer one")
        await self.free(self.tier.evict, new)

    async def check_withdrawals(self) -> None:
        reserved = self.tier.reserve(self.item("reserved"))
        assert self.tier.counts().filling == reserved.charged, "reserved bytes are counted"
        await self.free(self.tier.withdraw, reserved)
        written = self.tier.reserve(self.item("written"))
        with self.pool.lease() as source:
            await self.engine.run(self.tier.write(written, source))
        await self.free(self.tier.withdraw, written)
        assert self.tier.counts().charged == 0, "withdrawals leave nothing behind"

    async def check_late_reports(self) -> None:
        slot, _ = await self.put("late")
        self.refused(self.tier.publish, slot, "published twice")
        self.refused(self.tier.withdraw, slot, "withdrawn after it was published")
        self.refused(self.tier.freed, slot, "freed while resident")
        await self.free(self.tier.evict, slot)
        for ask in (self.tier.publish, self.tier.withdraw, self.tier.evict, self.tier.freed):
            self.refused(ask, slot, "reported on after it was freed")

    def refused(self, ask: Callable[[Slot], object], slot: Slot, what: str) -> None:
        before, residency = self.tier.counts(), slot.residency
        try:
            ask(slot)
        except IllegalTransition:
            assert (self.tier.counts(), slot.residency) == (before, residency), (
                f"a place that is {what}: the refusal changed something"
            )
        else:
            raise AssertionError(f"a place that is {what} was not refused")

    async def check_capacity(self) -> None:
        fits = self.tier.fits(self.nbytes)
        slots = [self.tier.reserve(self.item(f"full {i}")) for i in range(min(fits, MANY))]
        capacity = self.tier.capacity
        if capacity is not None:
            assert self.tier.counts().charged <= capacity, "never more than the capacity"
        if fits <= MANY:
            before = self.tier.counts()
            assert self.tier.fits(self.nbytes) == 0, "a full tier has no room"
            try:
                self.tier.reserve(self.item("one too many"))
            except CapacityExceeded:
                assert self.tier.counts() == before, "a refusal changes nothing"
            else:
                raise AssertionError("a full tier took another item")
        for slot in slots:
            await self.free(self.tier.withdraw, slot)
        assert self.tier.fits(self.nbytes) == fits, "all room is back"
        assert self.tier.counts().charged == 0, "nothing is left"
