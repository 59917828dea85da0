"""From the end of a copy to the coroutine, and what copying costs a model that computes."""

from __future__ import annotations

import functools
import time
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
from transfer.cuda import CudaDevice, DevicePool, PinnedPool, Way


def latency(short: bool, settings: Settings) -> dict[str, Any]:
    """4 MiB and 4 KiB from the GPU to a coroutine, on each loop, spinning and blocking."""
    count = 300 if short else 600
    rows = []
    for nbytes in (4 * MIB, 4096):
        layout = BlockLayout((Extent("bytes", (nbytes,), "uint8"),), (nbytes,))
        gpu, host = DevicePool(layout, 1), PinnedPool(layout, 1)
        work = Copy(gpu.lease().handle, host.lease().handle)
        bare = Bare(nbytes)
        for loop in ("uvloop", "asyncio", "trio"):
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


def gemm(short: bool, settings: Settings) -> dict[str, Any]:
    """A BF16 matrix product alone and while pages leave at full rate."""
    layout = page_layout(32)
    gpu, host = page_pools(layout, 256, 128)
    pages, slots = scattered(gpu, 128), host.lease(128).handle
    rows = []
    for way in (Way.STAGED,) if short else (Way.STAGED, Way.MAPPED):
        for units in (settings.multiprocessors,) if short else (4, 8, 16, 32):
            for outward in (True, False):
                work = Copy(pages, slots) if outward else Copy(slots, pages)
                row = anyio.run(
                    _beside_gemm,
                    settings.device(spin=200e-6, ways=(way,), multiprocessors=units),
                    work,
                    10,
                    backend_options={"use_uvloop": True},
                )
                rows.append(
                    row
                    | {
                        "way": way.name,
                        "units": units,
                        "direction": "out" if outward else "in",
                        "slower": row["with"] / row["alone"] - 1,
                    }
                )
    host.close()
    lines = [
        f"{r['way']:7} {r['units']:3} units {r['direction']:3}: GEMM {r['alone']:.3f} ms alone, "
        f"{r['with']:.3f} beside {r['rate']:.1f} GB/s: {100 * r['slower']:+.2f} %"
        for r in rows
    ]
    return {"rows": rows, "lines": lines}


async def _beside_gemm(device: CudaDevice, work: Copy, turns: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - only where there is a GPU

    left = torch.randn((8192, 8192), device="cuda:0", dtype=torch.bfloat16)
    right = torch.randn((8192, 8192), device="cuda:0", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    many = 30
    alone, beside, rates = [], [], []

    def products() -> tuple[Any, Any]:
        with torch.cuda.stream(stream):
            ends = (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            ends[0].record()
            for _ in range(many):
                torch.mm(left, right, out=out)
            ends[1].record()
        return ends

    async with Engine(device) as engine:
        await engine.run(work, after=())
        products()[1].synchronize()
        for _ in range(turns):
            first, last = products()
            last.synchronize()
            alone.append(first.elapsed_time(last) / many)
            ops = [await engine.submit(work, after=())]
            began = time.perf_counter()
            first, last = products()
            moved = 0
            while not last.query():
                follow = await engine.submit(work, after=ops[-1])
                await ops[-1].wait()
                moved += work.nbytes
                ops = [follow]
            rates.append(gigabytes(moved, time.perf_counter() - began))
            beside.append(first.elapsed_time(last) / many)
            await ops[-1].wait()
    return {"alone": median(alone), "with": median(beside), "rate": median(rates)}
