"""Requests: what is drawn is ordered behind everything that touches its blocks."""

import asyncio
from pathlib import Path

from kvhold.campaigns._model import ancestors
from kvhold.campaigns._owner import Owner
from kvhold.campaigns._schedule import Schedule
from kvhold.campaigns._world import World


def test_every_request_is_ordered_behind_what_it_must(tmp_path: Path) -> None:
    kinds: set[str] = set()

    async def main(seed: int) -> None:
        world = World(Schedule(seed), tmp_path)
        owner = Owner(world, "a")
        world.engine.start()
        for _ in range(2):
            await owner.lease()
        for _ in range(20):
            chosen = owner.requests.choose(owner.cells)
            if chosen is None:
                continue
            record, work, after = chosen
            busy = {r for c in record.writes for r in c.pending()}
            busy |= {r for c in record.reads for r in c.pending() if c in r.writes}
            assert busy <= set(ancestors(record.after))
            kinds.add(type(work).__name__ + str(len(record.reads)))
            task = asyncio.ensure_future(owner._submit(record, work, after))
            while not task.done():
                world.turn()
                await asyncio.sleep(0)
        for _ in range(20):
            world.finish()
            await asyncio.sleep(0)
        await world.engine.aclose()
        assert world.violations == []

    for seed in range(6):
        asyncio.run(main(seed))
    assert kinds >= {"Copy1", "Copy2", "Launch1"}
