"""Many operations: memory stays flat, the loop stays responsive, an idle engine never wakes."""

import gc
import itertools
import subprocess
import sys
import tracemalloc
from pathlib import Path

import anyio
import psutil
import pytest
from tests.transfer.gates import LAYOUT, HandDevice, gates, hand_launch

from transfer import Block, Copy, Engine, HostDevice, HostPool, Launch
from transfer._reaper import REAP_AT_ONCE

SOURCE = Path(__file__).parent.parent.parent / "src"


async def churn(engine: Engine, pool: HostPool, rounds: int) -> None:
    """Operations of every end, over blocks that are ever newly leased."""
    for number in range(rounds):
        with pool.lease() as a, pool.lease() as b:
            op = engine.submit_nowait(Copy(a, b))
            behind = engine.submit_nowait(Launch(lambda: None, reads=[b]), after=op)
            if number % 3 == 0:
                behind.cancel()
            if number % 5 == 0:
                with anyio.move_on_after(0):
                    await behind.wait()
            await op.wait()
        if number % 16 == 0:
            await engine.drain()
    await engine.drain()


async def flat(rounds: int, *, warm: int) -> None:
    """Measure after a warm-up; the same again must add nothing."""
    with HostPool(LAYOUT, 64) as pool:
        async with Engine(HostDevice(threads=2)) as engine:
            await churn(engine, pool, warm)
            gc.collect()
            objects = len(gc.get_objects())
            resident = psutil.Process().memory_info().rss
            tracemalloc.start()
            before = tracemalloc.take_snapshot()
            await churn(engine, pool, min(warm, rounds))
            gc.collect()
            after = tracemalloc.take_snapshot()
            tracemalloc.stop()
            await churn(engine, pool, rounds)
            gc.collect()
            grown = sum(
                found.size_diff
                for found in after.compare_to(before, "filename")
                if str(SOURCE) in found.traceback[0].filename
            )
            assert grown < 20_000
            assert len(gc.get_objects()) - objects < 500
            assert psutil.Process().memory_info().rss - resident < 16 << 20
            done = engine.statistics().devices["host"]
            assert done.completed + done.cancelled == done.submitted
            assert done.submitted == 2 * (warm + min(warm, rounds) + rounds)


@pytest.mark.anyio
async def test_memory_is_flat_over_twenty_thousand_operations() -> None:
    # case 80, the short profile; over all three loops
    await flat(2_300, warm=500)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.anyio
async def test_memory_is_flat_over_two_hundred_thousand_operations() -> None:
    # case 80
    await flat(99_000, warm=1_000)


@pytest.mark.anyio
async def test_small_handles_keep_no_large_parents() -> None:
    # case 80 - held memory is in proportion to the handles
    with HostPool(LAYOUT, 1000) as pool:
        async with Engine(HostDevice(threads=1)) as engine:
            lease = pool.lease(1000)
            await engine.run(Launch(lambda: None, writes=[lease]))
            gc.collect()
            tracemalloc.start()
            start = tracemalloc.get_traced_memory()[0]
            kept: list[Block] = [lease.handle[i] for i in range(1000)]
            used = tracemalloc.get_traced_memory()[0] - start
            tracemalloc.stop()
            assert len(kept) == 1000
            assert used < 1000 * 200
            lease.release()


@pytest.mark.anyio
async def test_many_completions_make_one_wake_up() -> None:
    device = HandDevice()
    async with Engine(device) as engine:
        wakes = 0
        wake = device.completions.wake
        assert wake is not None

        def counted() -> None:
            nonlocal wakes
            wakes += 1
            wake()

        device.completions.wake = counted
        ops = [engine.submit_nowait(hand_launch()) for _ in range(100)]
        for number in range(100):
            device.signal(number)
        assert wakes == 1
        await ops[-1].wait()
        assert all(op.settled for op in ops)
        assert wakes == 1


@pytest.mark.anyio
async def test_the_loop_gets_its_turn_among_thousands() -> None:
    device = HandDevice()
    async with Engine(device, in_flight_max=10_000) as engine:
        for _ in range(50 * REAP_AT_ONCE):
            engine.submit_nowait(hand_launch())
        for number in range(50 * REAP_AT_ONCE):
            device.signal(number)
        seen = []
        while engine.statistics().devices["hand"].in_flight:
            seen.append(engine.statistics().devices["hand"].completed)
            await anyio.lowlevel.checkpoint()
        steps = [later - earlier for earlier, later in itertools.pairwise(seen)]
        # Trio shuffles: a callback may run at the end of one turn and at the start of the next.
        assert max(steps) <= 2 * REAP_AT_ONCE
        assert len(seen) >= 50


@pytest.mark.anyio
async def test_a_busy_device_does_not_starve_another() -> None:
    busy, quiet = HandDevice("hand"), HandDevice("quiet")
    quiet.routes = frozenset({(Launch, "quiet")})
    async with Engine(busy, quiet, in_flight_max=10_000) as engine:
        for _ in range(20 * REAP_AT_ONCE):
            engine.submit_nowait(hand_launch())
        other = engine.submit_nowait(Launch(lambda: None, on="quiet"))
        for number in range(20 * REAP_AT_ONCE):
            busy.signal(number)
        quiet.signal(0)
        await other.wait()
        assert engine.statistics().devices["hand"].in_flight > 0


@pytest.mark.anyio
async def test_thousands_in_flight_at_once() -> None:
    with HostPool(LAYOUT, 4000) as pool, gates(2) as (first, second):
        async with Engine(HostDevice(threads=2)) as engine:
            engine.submit_nowait(Launch(first))
            engine.submit_nowait(Launch(second))
            with pool.lease(4000) as blocks:
                ops = [
                    engine.submit_nowait(Launch(lambda: None, writes=[block])) for block in blocks
                ]
                assert pool.counts().held == 4000
                for _ in range(50):
                    await anyio.lowlevel.checkpoint()
                first.open()
                second.open()
                for op in ops:
                    await op.wait()
            assert pool.counts().free == 4000


IDLE = """
import sys, threading, time
import anyio
from transfer import *

def switches():
    import pathlib
    found = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                found[task.name] = int(line.split()[1])
    return found

def measure():
    # The engine's own threads and the loop's: everyone but this one, which has to sleep.
    own = str(threading.get_native_id())
    time.sleep(0.2)
    before = switches()
    time.sleep(float(sys.argv[2]))
    after = switches()
    print({name: after[name] - before[name] for name in after if name != own})

async def main():
    with HostPool(BlockLayout.raw(4096), 4) as pool:
        async with Engine(HostDevice(threads=2, inline_bytes_max=0), FileDevice(threads=2)) as engine:
            for _ in range(100):
                with pool.lease() as a, pool.lease() as b:
                    await engine.copy(a, b)
            await anyio.to_thread.run_sync(measure)

anyio.run(main, **{
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}[sys.argv[1]])
"""


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_an_idle_engine_never_wakes(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IDLE, backend, "0.5"],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    counts: dict[str, int] = eval(done.stdout)  # noqa: S307 - our own child's dictionary
    assert len(counts) >= 5
    assert set(counts.values()) == {0}, counts
