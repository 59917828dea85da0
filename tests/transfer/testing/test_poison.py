"""PoisonedPool: early reuse and late writes show as damage."""

import pytest

from transfer import BlockLayout, Copy, Engine, Extent
from transfer.testing import (
    POISON,
    KeptStorage,
    PoisonDamaged,
    PoisonedPool,
    SimDevice,
    peek,
    poke,
)

pytestmark = pytest.mark.anyio

LAYOUT = BlockLayout.raw(32)
TWO_PLANES = BlockLayout((Extent("a", (8,), "uint8"), Extent("b", (4,), "int16", plane=1)), (8, 8))


def test_free_blocks_carry_the_pattern() -> None:
    pool = PoisonedPool(TWO_PLANES, 3)
    lease = pool.lease()
    for plane in range(2):
        assert peek(lease.handle, plane=plane) == (POISON * 2)[:8]
        poke(lease.handle, b"12345678", plane=plane)
    block = lease.handle
    lease.release()
    assert peek(block, plane=1) == (POISON * 2)[:8]
    assert pool.damage() == []


@pytest.mark.parametrize("count", [None, 1, 2])
def test_a_write_into_a_free_block_is_seen(count: int | None) -> None:
    pool = PoisonedPool(LAYOUT, 2)
    lease = pool.lease(2)
    block = lease.handle[1]
    lease.release()
    poke(block, b"!")
    (damage,) = pool.damage()
    assert (damage.block, damage.offset, damage.found[:1]) == (block.id, 0, b"!")
    with pytest.raises(PoisonDamaged) as caught:
        take_all(pool, count)
    assert caught.value.damage == [damage]


def take_all(pool: PoisonedPool, count: int | None) -> None:
    while True:
        pool.lease() if count is None else pool.lease(count)


def test_reuse_is_counted() -> None:
    pool = PoisonedPool(LAYOUT, 2)
    for _ in range(3):
        with pool.lease(2):
            pass
    assert pool.reuses == 4


async def test_a_held_block_is_poisoned_when_the_hold_ends() -> None:
    device = SimDevice(kind="host")
    pool = PoisonedPool(LAYOUT, 2, storage=KeptStorage(32, 2))
    async with Engine(device) as engine:
        source, target = pool.lease(), pool.lease()
        poke(source.handle, b"x" * 32)
        block = target.handle
        op = await engine.submit(Copy(source, target))
        target.release()
        source.release()
        assert not peek(block).startswith(POISON[:2] * 2)
        assert pool.counts().free == 0
        device.run_until_idle()
        assert peek(block) == b"x" * 32
        await op.wait()
        assert peek(block)[:5] == POISON
        assert pool.damage() == []
