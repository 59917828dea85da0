"""One engine and several loops, threads and processes; nothing is tied to a loop that is gone."""

import asyncio
import concurrent.futures
import functools
import gc
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.transfer.gates import (
    LAYOUT,
    PATIENCE,
    HandDevice,
    gates,
    hand_launch,
    host_engine,
    in_thread,
    turns,
)

from transfer import (
    Engine,
    EngineClosed,
    FileDevice,
    ForkDetected,
    HostDevice,
    HostPool,
    Launch,
    State,
    WrongThread,
)

BACKENDS = pytest.mark.parametrize(
    "backend",
    [
        pytest.param({"backend": "asyncio"}, id="asyncio"),
        pytest.param({"backend": "asyncio", "backend_options": {"use_uvloop": True}}, id="uvloop"),
        pytest.param({"backend": "trio"}, id="trio"),
    ],
)
Backend = dict[str, Any]


@pytest.mark.anyio
async def test_nobody_needs_to_keep_an_operation() -> None:
    # case 69 - all references are dropped, and the collector runs
    with HostPool(LAYOUT, 32) as pool, gates(1) as (gate,):
        async with host_engine() as engine:
            fate = []
            for _ in range(16):
                work = functools.partial(gate)
                fate.append(weakref.ref(work))
                with pool.lease() as block:
                    await engine.submit(Launch(work, writes=[block]))
                del work
            gc.collect()
            assert None not in [ref() for ref in fate]
            gate.open()
            while engine.statistics().devices["host"].in_flight:
                gc.collect()
                await turns(1)
            assert engine.statistics().devices["host"].completed == 16
            assert pool.counts().free == 32
            await turns()
            gc.collect()
            assert [ref() for ref in fate] == [None] * 16


@pytest.mark.anyio
async def test_dropped_waiters_are_forgotten() -> None:
    # case 69
    device = HandDevice()
    async with Engine(device) as engine:
        op = engine.submit_nowait(hand_launch())
        for _ in range(20):
            with anyio.move_on_after(0):
                await op.wait()
        assert op.watchers == ()
        device.signal()


@BACKENDS
def test_made_without_a_loop_and_run_twice(backend: Backend) -> None:
    # case 71
    pool = HostPool(LAYOUT, 2)
    engine = host_engine()

    async def main() -> int:
        async with engine:
            with pool.lease() as a, pool.lease() as b:
                await engine.copy(a, b)
            with await pool.wait_lease(2) as both:
                await engine.run(Launch(lambda: None, writes=[both]))
        return engine.statistics().devices["host"].completed

    assert [anyio.run(main, **backend) for _ in range(3)] == [2, 4, 6]
    pool.close()


def test_from_one_kind_of_loop_to_another() -> None:
    # case 71
    engine = host_engine()

    async def main() -> None:
        async with engine:
            await engine.run(Launch(lambda: None))

    anyio.run(main)
    anyio.run(main, backend="trio")
    anyio.run(main, backend_options={"use_uvloop": True})
    assert engine.statistics().devices["host"].completed == 3


@BACKENDS
def test_loops_in_two_threads_at_once(backend: Backend) -> None:
    # case 71
    barrier = threading.Barrier(2)
    problems: list[BaseException] = []

    async def main() -> None:
        with HostPool(LAYOUT, 2) as pool, pool.lease() as a, pool.lease() as b:
            async with host_engine() as engine:
                await in_thread(lambda: barrier.wait(PATIENCE) >= 0)
                for _ in range(50):
                    await engine.copy(a, b)

    def run() -> None:
        try:
            anyio.run(main, **backend)
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert problems == []


@BACKENDS
def test_the_loop_of_a_started_engine_is_gone(backend: Backend) -> None:
    # case 71 - a dead loop, then another; one clear error at first use
    engine = host_engine()

    async def leave() -> None:
        engine.start()

    async def use() -> None:
        with pytest.raises(WrongThread, match=r"loop that is gone; use EngineThread .* close_sync"):
            engine.submit_nowait(Launch(lambda: None))
        with pytest.raises(WrongThread):
            await engine.aclose()
        with pytest.raises(EngineClosed, match="already started"):
            engine.start()

    anyio.run(leave, **backend)
    anyio.run(use, **backend)
    engine.close_sync()

    async def again() -> None:
        async with engine:
            await engine.run(Launch(lambda: None))

    anyio.run(again, **backend)


@pytest.mark.anyio
async def test_a_foreign_thread_is_refused() -> None:
    with HostPool(LAYOUT, 2) as pool, gates(1) as (gate,):
        lease = pool.lease()
        async with host_engine() as engine:
            op = engine.submit_nowait(Launch(gate, writes=[lease]))
            calls: list[Callable[[], object]] = [
                lambda: engine.submit_nowait(Launch(gate)),
                op.cancel,
                lambda: op.order_before("stream"),
                op.finish,
                pool.lease,
                lease.release,
                lambda: anyio.run(op.wait),
                lambda: anyio.run(op.wait_posted),
                lambda: anyio.run(engine.drain),
                lambda: anyio.run(engine.aclose),
                lambda: anyio.run(engine.submit, Launch(gate)),
            ]
            for call in calls:
                with pytest.raises(WrongThread, match=r"belongs to .*thread"):
                    await anyio.to_thread.run_sync(call)
            assert op.state is State.IN_FLIGHT
            gate.open()
            await op.wait()
            # What has ended may be asked by anyone.
            await anyio.to_thread.run_sync(lambda: anyio.run(op.wait))
        lease.release()


def test_use_outside_of_any_loop() -> None:
    engine = host_engine()
    with pytest.raises(EngineClosed, match="not started"):
        engine.submit_nowait(Launch(lambda: None))
    with pytest.raises(RuntimeError):
        engine.start()
    engine.close_sync()
    assert engine.statistics().devices["host"].submitted == 0


# Thread pools


@pytest.mark.asyncio
async def test_the_default_executor_is_neither_used_nor_needed() -> None:
    # case 74 - each of the two is blocked in turn
    loop = asyncio.get_running_loop()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    blocked, release = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        assert release.wait(PATIENCE)

    names: list[str] = []
    with gates(3) as (first, second, third):
        async with Engine(HostDevice(threads=1), FileDevice(threads=1)) as engine:
            stuck = loop.run_in_executor(None, block)
            await asyncio.wait_for(
                engine.run(Launch(lambda: names.append(thread_name()))), PATIENCE
            )
            release.set()
            await stuck
            for gate in (first, second, third):
                engine.submit_nowait(Launch(gate))
            assert await loop.run_in_executor(None, lambda: 42) == 42
            first.open()
            second.open()
            third.open()
        # Leaving the engine shuts nobody else's pool down.
        assert await loop.run_in_executor(None, lambda: 43) == 43
    assert names == ["kvhold-host-0"]
    assert len(pool._threads) == 1


def thread_name() -> str:
    return threading.current_thread().name


@pytest.mark.anyio
async def test_threads_are_named_bounded_and_gone() -> None:
    others = set(threading.enumerate())

    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in others and "kvhold-" in t.name]

    async with Engine(HostDevice(threads=2), FileDevice(threads=3)) as engine:
        ours = threads()
        names = ["kvhold-files-0", "kvhold-files-1", "kvhold-files-2", "kvhold-host-0"]
        assert sorted(t.name for t in ours) == [*names, "kvhold-host-1"]
        assert all(t.daemon for t in ours)
        for _ in range(100):
            engine.submit_nowait(Launch(lambda: None))
        assert len(threads()) == 5
    assert not threads()


# Processes


def in_fork(function: Callable[[], str]) -> str:
    """Run `function` in a forked child and return what it says."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(PATIENCE))  # a child that hangs dies, and the parent is told
        try:
            os.write(writer, function().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ForkDetected as error:
        return str(error)
    return "not refused"


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
async def test_fork_after_start_is_detected() -> None:
    # case 82
    with HostPool(LAYOUT, 2) as pool, pool.lease() as a, pool.lease() as b:
        async with host_engine() as engine:
            await engine.copy(a, b)

            def drive(call: Callable[[], Any]) -> str:
                def step() -> None:
                    call().send(None)

                return refused(step)

            def child() -> str:
                said = [
                    refused(lambda: engine.submit_nowait(Launch(lambda: None))),
                    refused(engine.start),
                    refused(engine.close_sync),
                    drive(engine.aclose),
                    drive(engine.drain),
                    drive(lambda: engine.copy(a, b)),
                ]
                return "|".join(said)

            said = in_fork(child).split("|")
            words = f"engine was started in process {os.getpid()}, this is "
            assert all(text.startswith(words) and "spawn" in text for text in said), said
            await engine.copy(a, b)  # the parent is as it was


def copy_in_child(backend: str) -> str:
    async def main() -> str:
        with HostPool(LAYOUT, 2) as pool, pool.lease() as a, pool.lease() as b:
            a.view(write=True)[:4] = b"mine"
            async with host_engine() as engine:
                await engine.copy(a, b)
            return bytes(b.view()[:4]).decode()

    return anyio.run(main, backend=backend)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_fork_before_start_works() -> None:
    # case 82
    engine = host_engine()

    def child() -> str:
        async def main() -> str:
            async with engine:
                await engine.run(Launch(lambda: None))
            return str(engine.statistics().devices["host"].completed)

        return anyio.run(main)

    assert in_fork(child) == "1"
    assert child() == "1"


def test_a_spawned_child_uses_its_own() -> None:
    # case 82
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as children:
        assert children.submit(copy_in_child, "asyncio").result(PATIENCE) == "mine"
