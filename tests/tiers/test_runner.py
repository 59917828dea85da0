"""Ends of operations: each told once, on the loop, in no task."""

import threading

import anyio
import pytest
from tests.tiers.store_kit import until

from tiers._runner import ENDS_AT_ONCE, Runner
from transfer import Engine, HostDevice, Launch, Operation, WouldBlock

pytestmark = pytest.mark.anyio


def nothing() -> None:
    pass


async def test_every_end_is_told_once() -> None:
    ended: list[Operation] = []
    idle: list[int] = []
    async with Engine(HostDevice(threads=2)) as engine:
        runner = Runner(engine, lambda: idle.append(len(ended)))
        runner.bind()
        ops = [runner.submit(Launch(nothing), ended.append) for _ in range(2 * ENDS_AT_ONCE + 3)]
        await until(lambda: len(ended) == len(ops))
        assert set(ended) == set(ops)
        assert runner.live == runner.stuck == 0
        assert 0 < len(idle) < len(ops)
        assert idle[-1] == len(ops)


async def test_an_operation_that_has_ended_is_told_as_well() -> None:
    ended: list[Operation] = []
    async with Engine(HostDevice(threads=1)) as engine:
        runner = Runner(engine, nothing)
        assert runner.now == 0
        runner.bind()
        op = await engine.submit(Launch(nothing))
        await op.wait()
        runner.watch(op, ended.append)
        assert ended == []  # never inside the call
        await until(lambda: ended)
        assert ended == [op]


async def test_a_loss_is_told_and_then_the_proof() -> None:
    from tests.sim.test_store_sweeps import Flaky

    told: list[bool] = []
    device = Flaky("lose", 1)
    async with Engine(device) as engine:
        runner = Runner(engine, nothing)
        runner.bind()
        with pytest.raises(Exception, match="lost as told"):
            runner.submit(Launch(nothing), lambda op: told.append(op.settled))
        (op,) = [lost for lane in engine._lanes for lost in lane.lost]
        runner.watch(op, lambda op: told.append(op.settled))
        await until(lambda: told)
        assert (told, runner.live, runner.stuck) == ([False], 0, 1)
        device.prove()
        await until(lambda: len(told) == 2)
        assert (told, runner.live, runner.stuck) == ([False, True], 0, 0)


async def test_room_that_others_take_is_waited_for() -> None:
    idle: list[int] = []
    gate = anyio.Event()
    async with Engine(HostDevice(threads=1), in_flight_max=1) as engine:
        runner = Runner(engine, lambda: idle.append(1))
        runner.bind()
        from transfer import BlockLayout, External, HostPool

        with HostPool(BlockLayout.raw(64), 1) as pool, pool.lease() as block:
            other = await engine.submit(External(writes=[block]))
            with pytest.raises(WouldBlock):
                runner.submit(Launch(nothing), lambda _: None)
            runner.wait_room()
            assert idle == []
            other.finish()
            await until(lambda: idle)
            runner.submit(Launch(nothing), lambda _: gate.set())
            with anyio.fail_after(20):
                await gate.wait()


async def test_room_that_work_without_blocks_takes_is_waited_for() -> None:
    # Nobody holds a block: the room that this work gives back has to be noticed all the same.
    idle: list[int] = []
    async with Engine(HostDevice(threads=2), in_flight_max=2) as engine:
        runner = Runner(engine, lambda: idle.append(1))
        runner.bind()
        gates = [threading.Event(), threading.Event()]
        for gate in gates:
            await engine.submit(Launch(gate.wait))
        for _ in range(3):
            with pytest.raises(WouldBlock):
                runner.submit(Launch(nothing), lambda _: None)
            runner.wait_room()
        assert idle == []
        gates[1].set()  # the later one, while the earlier one goes on
        await until(lambda: idle)
        ended: list[int] = []
        runner.submit(Launch(nothing), lambda _: ended.append(1))
        await until(lambda: ended)
        assert len(idle) == 2  # once for the room, once for its own end
        gates[0].set()


async def test_room_that_is_there_already_is_looked_at_again() -> None:
    idle: list[int] = []
    async with Engine(HostDevice(threads=1)) as engine:
        runner = Runner(engine, lambda: idle.append(1))
        runner.bind()
        runner.wait_room()
        await until(lambda: idle)
