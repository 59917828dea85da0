"""Deadlines on a clock that jumps: a late copy never touches what somebody else has by then."""

import random

import anyio
import pytest
import trio
import trio.testing

from transfer import BlockLayout, Engine
from transfer.testing import PoisonedPool, SimDevice

LAYOUT = BlockLayout.raw(16)


async def owner(number: int, engine: Engine, pool: PoisonedPool, late: list[int]) -> None:
    """Copy between own blocks again and again, giving up early and giving the blocks back."""
    chance = random.Random(number)
    for turn in range(12):
        lease = await pool.wait_lease(2)
        with lease as pair:
            data = bytes([number * 16 + turn]) * 16
            pair[0].view(write=True)[:] = data
            pair[1].view(write=True)[:] = bytes(16)
            with anyio.move_on_after(chance.uniform(0.5, 30)) as scope:
                await engine.copy(pair[0], pair[1])
                assert bytes(pair[1].view()) == data
            late.append(scope.cancelled_caught)


@pytest.mark.parametrize("seed", range(5))
def test_late_copies_damage_nothing(seed: int) -> None:
    late: list[int] = []

    async def main() -> None:
        device = SimDevice(kind="host", seed=seed, chunk=(1, 1))
        pool = PoisonedPool(LAYOUT, 7)
        async with trio.open_nursery() as stepping:
            stepping.start_soon(lambda: device.run(tick=0.25))
            async with Engine(device, drain_deadline=1e6) as engine, trio.open_nursery() as owners:
                for number in range(4):
                    owners.start_soon(owner, number, engine, pool, late)
            assert pool.damage() == []
            assert pool.counts().free == 7
            assert pool.reuses > 50
            stepping.cancel_scope.cancel()

    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(main, clock=clock)
    assert len(late) == 48
    assert 5 < sum(late) < 48


def test_the_same_seed_takes_the_same_time() -> None:
    async def main() -> float:
        device = SimDevice(kind="host", seed=4, chunk=(1, 3))
        pool = PoisonedPool(LAYOUT, 5)
        late: list[int] = []
        begun = trio.current_time()
        async with trio.open_nursery() as stepping:
            stepping.start_soon(lambda: device.run(tick=1.0))
            async with Engine(device, drain_deadline=1e6) as engine:
                await owner(1, engine, pool, late)
            stepping.cancel_scope.cancel()
        return trio.current_time() - begun

    times = [trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) for _ in range(2)]
    assert times[0] == times[1] > 10
