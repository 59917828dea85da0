"""Many tasks on one store: puts, fetches, evictions, removals and cancellations at the same time.

Every page's bytes follow from its key, so that a fetched page is right or wrong by itself; pages are
poisoned as soon as a call gives them back. At the end the books agree with the files.
"""

import random
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from tests.tiers.store_kit import (
    PROVENANCE,
    Calls,
    Rig,
    fill,
    keys_of,
    poison,
    rig,
    until,
    wrong_pages,
)

from tiers import Keys, Lru, Placement, PutFailed, S3Fifo
from transfer import EngineClosed, PoolExhausted

pytestmark = pytest.mark.anyio

TASKS, STEPS, PAGES = 6, 25, 4
TENANTS = ("", "small", "none")
QUOTAS = {"small": 4 * 16384, "none": 100}  # the last has not room for one page


class Actor:
    """One task."""

    def __init__(self, it: Rig, seed: int) -> None:
        self.it = it
        self.random = random.Random(seed)
        self.fetched = 0

    def keys(self) -> Keys:
        (tenant,) = self.random.choices(TENANTS, [6, 2, 1])
        provenance = replace(PROVENANCE, tenant=tenant)
        extra = self.random.choice([b"", b"", b"", b"a"])
        pages, start = self.random.randint(1, PAGES), self.random.randrange(2)
        return keys_of(pages, start=start, provenance=provenance, extra=extra)

    async def run(self) -> None:
        verbs = [self.put, self.fetch, self.hold, self.drop, self.verify]
        for _ in range(STEPS):
            (verb,) = self.random.choices(verbs, [6, 6, 3, 1, 1])
            delay = self.random.choice([None, None, None, 0, 0.0005, 0.002])
            try:
                if delay is None:
                    await verb()
                else:
                    with anyio.move_on_after(delay):
                        await verb()
            except (PutFailed, PoolExhausted):
                await anyio.lowlevel.checkpoint()

    async def put(self) -> None:
        keys = self.keys()
        with self.it.lease(len(keys)) as pages:
            fill(pages, keys)
            ticket = await self.it.store.put(keys, pages)
            poison(pages)
        if self.random.random() < 0.3:
            await ticket.resident()

    async def fetch(self) -> None:
        keys = self.keys()
        with self.it.store.lookup(keys) as hit:
            await self.take(hit, keys)

    async def take(self, hit: object, keys: Keys) -> None:
        with self.it.lease(PAGES) as pages:
            poison(pages)
            count = await self.it.store.fetch(hit, into=pages)  # type: ignore[arg-type]
            assert wrong_pages(pages, keys, count) == []
            self.fetched += count

    async def hold(self) -> None:
        """Keep a hit while others put, evict and remove; then use it."""
        keys = self.keys()
        with self.it.store.lookup(keys) as hit:
            for _ in range(self.random.randrange(6)):
                await anyio.lowlevel.checkpoint()
            if self.random.random() < 0.3:
                self.it.store.remove(keys)
            if self.random.random() < 0.3:
                await self.put()  # inside a hit: refused rather than waiting for itself
            await self.take(hit, keys)

    async def drop(self) -> None:
        if self.random.random() < 0.5:
            self.it.store.evict(self.random.randint(1, 6))
        else:
            self.it.store.remove(self.keys())
        await anyio.lowlevel.checkpoint()

    async def verify(self) -> None:
        report = await self.it.store.verify()
        assert dict(report.damaged) == {}


async def play(root: Path, seed: int, *, close: bool) -> int:
    """Run the tasks; with `close`, the store is closed in the middle of them."""
    draw = random.Random(seed)
    placement = draw.choice(list(Placement))
    room = 16384 * draw.choice([1, 6, 20, 60])
    async with rig(
        root,
        placement=placement,
        pages=TASKS * 2 * PAGES,
        blocks=draw.choice([1, 6, 20, 60]),
        quota=room,
        calls=Calls(),
        quotas=QUOTAS,
        policy=draw.choice([Lru, S3Fifo]),
        write_behind_bytes=draw.choice([1, 1 << 20]),
        read_bytes=draw.choice([1, 1 << 20]),
        backpressure=draw.choice(["wait", "refuse"]),
        admission=draw.choice([1, 1, 2]),
    ) as it:
        actors = [Actor(it, seed * 100 + number) for number in range(TASKS)]

        async def act(actor: Actor) -> None:
            try:
                await actor.run()
            except EngineClosed:
                assert close

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for actor in actors:
                    tasks.start_soon(act, actor)
                if close:
                    await until(
                        lambda: sum(actor.fetched for actor in actors) > 3 or draw.random() < 0.01
                    )
                    await it.store.aclose()
            assert not it.store._core.hits
            if close:
                assert not it.store._core.busy
                assert it.engine.holders() == []
        return sum(actor.fetched for actor in actors)


@pytest.mark.parametrize("close", [False, True])
async def test_tasks_get_right_pages_and_leave_nothing(tmp_path: Path, *, close: bool) -> None:
    fetched = [await play(tmp_path / str(seed), seed, close=close) for seed in (5, 7, 8, 9, 11)]
    assert sum(fetched) > (10 if close else 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_tasks_for_long(tmp_path: Path, seed: int) -> None:
    for number in range(seed, seed + 150):
        await play(tmp_path / str(number), number, close=bool(number % 2))
