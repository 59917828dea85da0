"""An owner: what it does wrong on purpose must be refused, and what it does right must end."""

import asyncio
from pathlib import Path

from kvhold.campaigns._owner import Owner
from kvhold.campaigns._schedule import Schedule
from kvhold.campaigns._world import World


def test_an_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    world = World(Schedule(21), tmp_path)
    owner = Owner(world, "a")

    async def main() -> None:
        world.engine.start()
        task = asyncio.ensure_future(owner.live(12))
        while not task.done():
            world.turn()
            await asyncio.sleep(0)
            world.check()
        await task
        for _ in range(20):
            world.finish()
            await asyncio.sleep(0)
        await world.engine.aclose()

    asyncio.run(main())
    assert world.violations == []
    assert len(owner.records) >= 12
    assert owner.cells == []
    assert world.pages.counts().free == world.pages.blocks


def test_errors_of_a_caller_that_pass_are_reported(tmp_path: Path) -> None:
    world = World(Schedule(22), tmp_path)
    owner = Owner(world, "a")

    async def main() -> None:
        world.engine.start()
        while len(owner.cells) < 1:
            await owner.lease()
        wrong = owner.requests.onto(owner.cells[0].block, [])
        owner._must_raise(wrong, KeyError)
        for _ in range(20):
            world.finish()
            await asyncio.sleep(0)
        await world.engine.aclose()

    asyncio.run(main())
    assert [kind for kind, _ in world.violations] == ["outcome"]
