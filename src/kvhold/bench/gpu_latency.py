"""From the end of a copy to the coroutine, and what copying costs a model that computes."""

from __future__ import annotations

import functools
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio

from kvhold.bench.gpu_rig import (
    MIB,
    Bare,
    Settings,
    gigabytes,
    median,
    page_layout,
    page_pools,
    scattered,
)
from kvhold.bench.pairs import percentile
from transfer import BlockLayout, Copy, Engine, Extent
from transfer.cuda import CudaDevice, DevicePool, Pace, PinnedPool, Way


def latency(short: bool, settings: Settings) -> dict[str, Any]:
    """4 MiB and 4 KiB from the GPU to a coroutine, on each loop, spinning and blocking."""
    count = 300 if short else 600
    rows = []
    for nbytes in (4 * MIB, 4096):
        layout = BlockLayout((Extent("bytes", (nbytes,), "uint8"),), (nbytes,))
        gpu, host = DevicePool(layout, 1), PinnedPool(layout, 1)
        work = Copy(gpu.lease().handle, host.lease().handle)
        bare = Bare(nbytes)
        for loop in LOOPS:
            for spin, mode in ((float("inf"), "spin"), (200e-6, "spin 200 us"), (0.0, "block")):
                limit = [bare.seconds(nbytes, outward=True) for _ in range(count)]
                run = functools.partial(_wait_for, settings, work, spin, count)
                options = {} if loop == "trio" else {"use_uvloop": loop == "uvloop"}
                backend = "trio" if loop == "trio" else "asyncio"
                row = anyio.run(run, backend=backend, backend_options=options)
                row |= {"nbytes": nbytes, "loop": loop, "mode": mode, "bare": median(limit) * 1e6}
                row["above_bare"] = row["call"] - row["bare"]
                row["completion_above_bare"] = row["posted"] - row["bare"]
                rows.append(row)
        bare.close()
        host.close()
    lines = [
        f"{r['nbytes']:8} B {r['loop']:8} {r['mode']:11} bare {r['bare']:6.1f} us, call "
        f"+{r['above_bare']:6.1f} (p99 {r['p99']:6.1f}), from posting "
        f"{r['completion_above_bare']:+6.1f}; loop {r['loop_cpu']:5.1f} us/op, process "
        f"{r['process_cpu']:6.1f} us/op, idle switches above an empty loop {r['idle']}"
        for r in rows
    ]
    return {"rows": rows, "lines": lines}


async def _wait_for(settings: Settings, work: Copy, spin: float, count: int) -> dict[str, Any]:
    call, posted = [], []
    alone = await _idle_switches()
    async with Engine(settings.device(spin=spin)) as engine:
        for _ in range(50):
            await engine.run(work, after=())
        loop_cpu, process_cpu = time.thread_time(), time.process_time()
        for _ in range(count):
            began = time.perf_counter()
            op = await engine.submit(work, after=())
            there = time.perf_counter()
            await op.wait()
            done = time.perf_counter()
            call.append((done - began) * 1e6)
            posted.append((done - there) * 1e6)
        loop_cpu, process_cpu = time.thread_time() - loop_cpu, time.process_time() - process_cpu
        await anyio.sleep(0.1)
        idle = await _idle_switches() - alone
    return {
        "call": median(call),
        "p99": percentile(call, 99),
        "posted": median(posted),
        "loop_cpu": loop_cpu / count * 1e6,
        "process_cpu": process_cpu / count * 1e6,
        "idle": idle,
    }


async def _idle_switches() -> int:
    """Switches while nothing is asked for; the loop's own timer and the reading are among them."""
    before = switches()
    await anyio.sleep(0.3)
    return switches() - before


def switches() -> int:
    """Times that any thread of this process gave up its core by itself: a wake-up each."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "status").read_text(encoding="ascii")
        except OSError:
            continue
        total += sum(
            int(line.split()[1])
            for line in text.splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )
    return total


LOOPS = tuple(loop for loop in ("uvloop", "asyncio", "trio") if find_spec(loop) is not None)
"""Those that are installed."""
GPU = "cuda:0"
SIDE = 8192
MANY = 30
"""Rows of a matrix, and products of a round."""
GEMM_TRIALS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("STAGED", {"ways": (Way.STAGED,), "pace": Pace()}),
    ("STAGED, 16 units", {"ways": (Way.STAGED,), "pace": Pace(), "multiprocessors": 16}),
    ("STAGED, urgent", {"ways": (Way.STAGED,), "pace": Pace(urgent=True)}),
    (
        "STAGED, urgent, chunks of 32 MiB",
        {"ways": (Way.STAGED,), "pace": Pace(urgent=True, ramp=32 * MIB)},
    ),
    (
        "STAGED, urgent, chunks of 96 MiB",
        {"ways": (Way.STAGED,), "pace": Pace(urgent=True, ramp=96 * MIB), "staging": 96 * MIB},
    ),
    ("BATCH", {"ways": (Way.BATCH,), "pace": Pace()}),
    ("BATCH, bare", {"ways": (Way.BATCH,), "pace": Pace(bare=True)}),
    ("MAPPED", {"ways": (Way.MAPPED,), "pace": Pace()}),
)
"""What is tried beside a matrix product. A product may fill the GPU for as long as it takes, and a kernel
then waits for its end: few large chunks and urgent streams are against that, and a batch of driver
copies needs no multiprocessor at all."""


def gemm(short: bool, settings: Settings) -> dict[str, Any]:
    """A BF16 matrix product alone and while pages leave at full rate."""
    layout = page_layout(32)
    gpu, host = page_pools(layout, 512, 256)
    pages, slots = scattered(gpu, 256), host.lease(256).handle
    rows = []
    for name, options in GEMM_TRIALS:
        for outward in (True, False):
            ends = (pages, slots) if outward else (slots, pages)
            works = [Copy(ends[0][at : at + 128], ends[1][at : at + 128]) for at in (0, 128)]
            row = anyio.run(
                _beside_gemm,
                settings.device(spin=200e-6, **options),
                works,
                4 if short else 8,
                backend_options={"use_uvloop": True},
            )
            rows.append(
                row
                | {
                    "trial": name,
                    "direction": "out" if outward else "in",
                    "slower": row["with"] / row["alone"] - 1,
                }
            )
    host.close()
    lines = [
        f"{r['trial']:33} {r['direction']:3}: GEMM {r['alone']:.3f} ms alone, "
        f"{r['with']:.3f} beside {r['rate']:.1f} GB/s: {100 * r['slower']:+.2f} %"
        for r in rows
    ]
    return {"rows": rows, "lines": lines}


async def _beside_gemm(device: CudaDevice, works: list[Copy], turns: int) -> dict[str, Any]:
    """Two copies of different pages are in flight, each behind the last one of the same pages."""
    import torch  # noqa: PLC0415 - only where there is a GPU

    shape = (SIDE, SIDE)
    left = torch.randn(shape, device=GPU, dtype=torch.bfloat16)
    right = torch.randn(shape, device=GPU, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    alone, beside, rates = [], [], []

    def products() -> tuple[Any, Any]:
        with torch.cuda.stream(stream):
            ends = (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            ends[0].record()
            for _ in range(MANY):
                torch.mm(left, right, out=out)
            ends[1].record()
        return ends

    async with Engine(device) as engine:
        for work in works:
            await engine.run(work, after=())
        products()[1].synchronize()
        for _ in range(turns):
            first, last = products()
            last.synchronize()
            alone.append(first.elapsed_time(last) / MANY)
            ops = deque([await engine.submit(work, after=()) for work in works])
            began = time.perf_counter()
            first, last = products()
            moved = 0
            while not last.query():
                oldest = ops.popleft()
                await oldest.wait()
                moved += oldest.nbytes
                ops.append(await engine.submit(oldest.work, after=()))
            rates.append(gigabytes(moved, time.perf_counter() - began))
            beside.append(first.elapsed_time(last) / MANY)
            for op in ops:
                await op.wait()
    return {"alone": median(alone), "with": median(beside), "rate": median(rates)}
