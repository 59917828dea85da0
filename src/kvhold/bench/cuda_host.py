"""What a CUDA device costs the host: microseconds of an operation by phase, on a driver that is free.

Everything here runs without a GPU. What the driver's own calls, launches of kernels and the GPU take
comes on top, so the number of commands is told beside the times.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np

from kvhold.bench.cuda_free import free_device, free_pools
from kvhold.bench.gpu_rig import page_layout
from kvhold.bench.pairs import percentile
from transfer import BlockLayout, Copy, Engine, Extent
from transfer._loop import current_loop
from transfer.cuda import Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvhold.bench.cuda_free import FreeDriver
    from transfer._cuda_watch import Mark
    from transfer._work import Work
    from transfer.cuda import CudaDevice

MIB: Final = 1 << 20
LOOPS: Final = ("uvloop", "asyncio", "trio")
PHASES: Final = ("check", "prepare", "post", "signal", "reap")
DEPTH: Final = 64
COLD_BYTES: Final = 8 * MIB
"""Bytes that are read between two cold calls, so that caches have something else in them."""


def one_page() -> Copy:
    """4 MiB in one run: the smallest thing that is worth a copy of its own."""
    layout = BlockLayout((Extent("bytes", (4 * MIB,), "uint8"),), (4 * MIB,))
    pages, slots = free_pools(layout, 1)
    return Copy(pages.lease().handle, slots.lease().handle)


def _run(loop: str, call: Callable[..., Any], *args: object) -> Any:
    options = {} if loop == "trio" else {"use_uvloop": loop == "uvloop"}
    backend = "trio" if loop == "trio" else "asyncio"
    return anyio.run(call, *args, backend=backend, backend_options=options)


def phases(count: int) -> dict[str, float]:
    """Median microseconds of each phase of a 4 MiB copy, all on one thread.

    check: all that a call looks at. prepare: holds. post: plan, driver calls, event. signal: what
    the watching thread does when the event is done. reap: holds end, the operation settles.
    """
    found: dict[str, float] = _run("uvloop", _phases, one_page(), count)
    return found


async def _phases(work: Work, count: int) -> dict[str, float]:
    device, _ = free_device(spin=float("inf"))
    times = np.zeros((count, len(PHASES) + 1))
    async with Engine(device) as engine:
        running: Any = device._running
        watch = running.out.watch
        marks: list[Mark] = []
        running.out.watch = SimpleNamespace(put=marks.append)
        ledger, reaper = engine._ledger, engine._reaper
        for row in times:
            row[0] = time.perf_counter()
            lane, preds = engine._begin(work, ())
            row[1] = time.perf_counter()
            op = ledger.prepare(work, lane, preds)
            row[2] = time.perf_counter()
            ledger.start(op)
            row[3] = time.perf_counter()
            marks.pop().reached()
            row[4] = time.perf_counter()
            reaper.reap()
            row[5] = time.perf_counter()
            assert op.settled  # noqa: S101 - else nothing was measured
        running.out.watch = watch
    each = np.median(np.diff(times, axis=1), axis=0) * 1e6
    return dict(zip(PHASES, map(float, each), strict=True))


def loops(count: int) -> dict[str, dict[str, float]]:
    """Microseconds of a 4 MiB copy from call to coroutine on each loop, thread and wake-up included.

    call: wall-clock time. loop: CPU time of the loop's thread. process: of all threads. deep: the
    loop's with `DEPTH` copies in flight, where one wake-up tells of many. hop: the loop's CPU time of
    handing a thread something and being woken by it, which is the least that any completion takes
    that a thread sees.
    """
    work = one_page()
    pages, slots = free_pools(BlockLayout.raw(4096), DEPTH)
    ends = pages.lease(DEPTH).handle, slots.lease(DEPTH).handle
    works = [Copy(page, slot) for page, slot in zip(*ends, strict=True)]
    return {
        loop: {
            **_run(loop, _whole, work, count),
            "deep": _run(loop, _deep, works, max(3, count // DEPTH)),
            "hop": _run(loop, _hop, count),
        }
        for loop in LOOPS
    }


async def _deep(works: list[Copy], rounds: int) -> float:
    device, _ = free_device(spin=float("inf"))
    took = []
    async with Engine(device) as engine:
        for _ in range(rounds):
            began = time.thread_time()
            ops = [await engine.submit(work, after=()) for work in works]
            for op in ops:
                await op.wait()
            took.append((time.thread_time() - began) / len(works))
    return percentile(took, 50) * 1e6


async def _hop(count: int) -> float:
    loop = current_loop()
    asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def serve() -> None:
        while (call := asked.get()) is not None:
            loop.post(call)

    thread = Thread(target=serve, name="hop")
    thread.start()
    began = time.thread_time()
    for _ in range(count):
        event = anyio.Event()
        asked.put(event.set)
        await event.wait()
    took = time.thread_time() - began
    asked.put(None)
    thread.join()
    return took / count * 1e6


async def _whole(work: Work, count: int) -> dict[str, float]:
    device, _ = free_device(spin=float("inf"))
    calls, cpu, process = [], [], []
    part = max(1, count // 20)
    async with Engine(device) as engine:
        for _ in range(20):
            on_loop, on_all = time.thread_time(), time.process_time()
            for _ in range(part):
                began = time.perf_counter()
                op = await engine.submit(work, after=())
                await op.wait()
                calls.append(time.perf_counter() - began)
            cpu.append((time.thread_time() - on_loop) / part)
            process.append((time.process_time() - on_all) / part)
    return {
        "call": percentile(calls, 50) * 1e6,
        "loop": percentile(cpu, 50) * 1e6,
        "process": percentile(process, 50) * 1e6,
    }


def posting(count: int) -> list[dict[str, Any]]:
    """Microseconds until the first byte could move and until all is posted, by size and way.

    Pages have 16 tokens, 8 heads, 128 elements, 32 layers, and lie scattered. Cold: something else
    was in the caches before.
    """
    pages, slots = free_pools(page_layout(32), 64)
    near, far = pages.lease(64).handle, slots.lease(64).handle
    order = np.random.default_rng(0).permutation(64)
    near = type(near)(pages, near.ids[order], near.generations[order])
    rows = []
    for blocks in (3, 6, 48, 64):
        for way in (Way.STAGED, Way.MAPPED, Way.BATCH):
            for outward in (True, False):
                ends = (near[:blocks], far[:blocks])
                work = Copy(*(ends if outward else ends[::-1]))
                device, driver = free_device(spin=float("inf"), ways=(way,))
                rows.append(
                    {
                        "MiB": work.nbytes // MIB,
                        "way": way.name,
                        "direction": "out" if outward else "in",
                        **_posting(device, driver, work, count),
                    }
                )
    return rows


def _posting(device: CudaDevice, driver: FreeDriver, work: Copy, count: int) -> dict[str, float]:
    device.start()
    running: Any = device._running
    other = np.ones(COLD_BYTES, dtype=np.uint8)
    found: dict[str, float] = {}
    for name, turns in (("hot", count), ("cold", max(3, count // 10))):
        first, all_of_it = [], []
        for _ in range(turns):
            if name == "cold":
                other += 1
            driver.reset()
            began = time.perf_counter()
            device.enqueue(work, ())
            all_of_it.append(time.perf_counter() - began)
            first.append(driver.first - began)
            while not running.signals.quiet:
                time.sleep(0)
            device.completions.items.clear()
        found[f"first_{name}"] = percentile(first, 50) * 1e6
        found[f"posted_{name}"] = percentile(all_of_it, 50) * 1e6
    found["commands"] = driver.calls
    device.close()
    return found


def figures(count: int = 10_000) -> dict[str, float]:
    """All of it, by name."""
    found = {f"4 MiB, {name} (us)": value for name, value in phases(count).items()}
    for loop, row in loops(count).items():
        found |= {f"4 MiB on {loop}, {name} (us)": value for name, value in row.items()}
    for row in posting(max(10, count // 40)):
        name = f"{row['MiB']} MiB {row['way']} {row['direction']}"
        found[f"{name}, commands"] = row["commands"]
        for what in ("first_hot", "posted_hot", "first_cold", "posted_cold"):
            found[f"{name}, {what.replace('_', ' ')} (us)"] = row[what]
    return found
