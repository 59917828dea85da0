"""What a type checker sees of leases, engines and threads; what runs agrees with it.

`assert_type` fails in mypy when the inferred type differs, and does nothing at run time.
"""

from typing import assert_type

import anyio
import pytest

from transfer import (
    Block,
    BlockLayout,
    Blocks,
    Copy,
    Engine,
    EngineThread,
    HostDevice,
    HostPool,
    Launch,
    Lease,
    Operation,
    State,
    Statistics,
)

LAYOUT = BlockLayout.raw(4096)


def test_lease_of_one_and_of_many() -> None:
    with HostPool(LAYOUT, 4) as pool:
        assert_type(pool, HostPool)
        one = pool.lease()
        assert_type(one, Lease[Block])
        assert_type(one.handle, Block)
        many = pool.lease(2)
        assert_type(many, Lease[Blocks])
        assert_type(many.handle, Blocks)
        assert_type(many.handle[0], Block)
        assert_type(many.handle[:1], Blocks)
        with one as block, many as blocks:
            assert_type(block, Block)
            assert_type(blocks, Blocks)
            kinds = [type(block), type(blocks), type(blocks[0]), type(blocks[:1])]
        assert kinds == [Block, Blocks, Block, Blocks]


@pytest.mark.anyio
async def test_engine_verbs() -> None:
    with HostPool(LAYOUT, 2) as pool:
        async with Engine(HostDevice(threads=1)) as engine:
            assert_type(engine, Engine)
            lease = await pool.wait_lease(2)
            assert_type(lease, Lease[Blocks])
            a, b = lease.handle
            assert_type(a, Block)
            op = await engine.submit(Copy(a, b))
            assert_type(op, Operation)
            assert_type(op.state, State)
            await op.wait()
            assert_type(engine.submit_nowait(Launch(lambda: None)), Operation)
            assert_type(engine.holders(), list[Operation])
            assert_type(engine.statistics(), Statistics)
            lease.release()
        assert isinstance(op, Operation)


def test_thread_verbs() -> None:
    async def drive(number: int) -> str:
        await anyio.lowlevel.checkpoint()
        return str(number)

    with HostPool(LAYOUT, 4) as pool, EngineThread(Engine(HostDevice(threads=1))) as thread:
        assert_type(thread, EngineThread)
        one = thread.lease(pool)
        assert_type(one, Lease[Block])
        many = thread.lease(pool, 2)
        assert_type(many, Lease[Blocks])
        op = thread.submit_nowait(Launch(lambda: None, writes=[one, many]))
        assert_type(op, Operation)
        thread.wait(op)
        assert_type(thread.poll([op]), list[Operation])
        assert_type(thread.holders(one), list[Operation])
        assert_type(thread.call(len, "four"), int)
        assert_type(thread.run(drive, 4), str)
        assert thread.run(drive, 4) == "4"
        thread.release(one)
        thread.release(many)
