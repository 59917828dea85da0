"""Copies done in the call itself must obey every rule that posted ones obey."""

import random
from contextlib import suppress

import pytest

from transfer import (
    BlockLayout,
    Copy,
    Engine,
    EngineClosed,
    HoldConflict,
    HostDevice,
    Launch,
    StaleBlock,
)
from transfer.testing import Gate, KeptStorage, PoisonedPool, broken_invariants

pytestmark = pytest.mark.anyio

LAYOUT = BlockLayout.raw(64)


def make_pool() -> PoisonedPool:
    return PoisonedPool(LAYOUT, 6, storage=KeptStorage(64, 6))


async def test_what_is_held_is_not_copied_in_the_call() -> None:
    pool, gate = make_pool(), Gate()
    async with Engine(HostDevice(threads=1)) as engine:
        with pool.lease(3) as blocks:
            for block in blocks:
                block.view(write=True)[:] = b"x" * 64
            gate.shut()
            busy = await engine.submit(Launch(gate.wait, reads=[blocks[0]], writes=[blocks[1]]))
            with pytest.raises(HoldConflict):
                await engine.copy(blocks[1], blocks[2])
            with pytest.raises(HoldConflict):
                await engine.copy(blocks[2], blocks[0])
            await engine.copy(blocks[0], blocks[2])
            gate.open()
            await busy.wait()
            assert bytes(blocks[2].view()) == b"x" * 64


async def test_stale_handles_and_closed_engines_are_refused() -> None:
    pool = make_pool()
    engine = Engine(HostDevice(threads=1))
    async with engine:
        lease = pool.lease(2)
        old = lease.handle
        lease.release()
        with pytest.raises(StaleBlock):
            await engine.copy(old[0], old[1])
        assert pool.damage() == []
    with pytest.raises(EngineClosed), pool.lease(2) as pair:
        await engine.copy(pair[0], pair[1])


@pytest.mark.may_block
async def test_instant_and_posted_copies_mixed(seed: int) -> None:
    pool = make_pool()
    chance = random.Random(seed)
    async with Engine(HostDevice(threads=2)) as engine:
        with pool.lease(5) as blocks:
            content = {block.id: bytes([block.id]) * 64 for block in blocks}
            for block in blocks:
                block.view(write=True)[:] = content[block.id]
            for _ in range(300):
                src, dst = chance.sample(list(blocks), 2)
                with suppress(HoldConflict):
                    if chance.random() < 0.5:
                        await engine.copy(src, dst)
                    else:
                        op = await engine.submit(Copy(src, dst))
                        if chance.random() < 0.7:
                            await op.wait()
                    content[dst.id] = content[src.id]
            await engine.drain()
            for block in blocks:
                assert bytes(block.view()) == content[block.id]
            assert broken_invariants(engine._lanes, [pool]) == []
        moved = engine.statistics().devices["host"]
        assert moved.completed == moved.submitted
        assert moved.bytes_moved == moved.completed * 64
    assert pool.damage() == []
