"""The engine against bare threads doing the same work, and its own overheads.

Every comparison runs both ways in turn in one process (see `kvhold.bench.pairs`).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

from kvhold.bench.pairs import Pair, compare, percentile
from transfer import (
    BlockLayout,
    Blocks,
    Copy,
    Engine,
    FileDevice,
    FileRead,
    FileWrite,
    HostDevice,
    HostPool,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

LARGE: Final = 4 << 20
SMALL: Final = 4096
COUNT: Final = 64
CORES: Final = 2
BACKENDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


def touched(pool: HostPool) -> Blocks:
    """All blocks of a pool, every page of them written once."""
    blocks = pool.lease(pool.blocks).handle
    for number, block in enumerate(blocks):
        ctypes.memset(pool.address(0, block.id), number % 251 + 1, block.nbytes)
    return blocks


def on(backend: str, function: Callable[[], Awaitable[float]]) -> float:
    """Run an async measurement on a loop of its own."""
    name, options = BACKENDS[backend]
    return anyio.run(function, backend=name, backend_options=options)


def _addresses(blocks: Blocks) -> list[int]:
    return [int(a) for a in blocks.pool.addresses(0, blocks.ids)]


class Large:
    """(a) 64 copies of 4 MiB: bare threads, one batch, 64 operations."""

    def __init__(self) -> None:
        layout = BlockLayout.raw(LARGE)
        self._pools = [HostPool(layout, COUNT, name=name) for name in ("source", "target")]
        self._src, self._dst = (touched(pool) for pool in self._pools)
        self._bare = ThreadPoolExecutor(CORES)
        self._pairs = list(zip(_addresses(self._dst), _addresses(self._src), strict=True))

    def bare(self) -> float:
        """Threads that share the list of copies."""
        start = time.perf_counter()
        futures = [self._bare.submit(ctypes.memmove, d, s, LARGE) for d, s in self._pairs]
        wait(futures)
        return time.perf_counter() - start

    def batch(self) -> float:
        """One operation."""

        async def main() -> float:
            async with Engine(HostDevice(threads=CORES)) as engine:
                await engine.copy(self._src[:2], self._dst[:2])
                start = time.perf_counter()
                await engine.copy(self._src, self._dst)
                return time.perf_counter() - start

        return on("uvloop", main)

    def single(self) -> float:
        """An operation for each block."""

        async def main() -> float:
            async with Engine(HostDevice(threads=CORES)) as engine:
                await engine.copy(self._src[:2], self._dst[:2])
                start = time.perf_counter()
                ops = [
                    engine.submit_nowait(Copy(s, d))
                    for s, d in zip(self._src, self._dst, strict=True)
                ]
                for op in ops:
                    await op.wait()
                return time.perf_counter() - start

        return on("uvloop", main)


def large(rounds: int) -> list[Pair]:
    """(a)."""
    work = Large()
    gigabytes = COUNT * LARGE / 1e9
    return [
        compare(
            f"{COUNT} x 4 MiB copies, one batch, against bare threads",
            work.batch,
            work.bare,
            amount=gigabytes,
            unit="GB/s",
            target=0.95,
            rounds=rounds,
        ),
        compare(
            f"{COUNT} x 4 MiB copies, {COUNT} operations, against bare threads",
            work.single,
            work.bare,
            amount=gigabytes,
            unit="GB/s",
            target=0.85,
            rounds=rounds,
        ),
    ]


class Small:
    """(b) 4 KiB copies, 64 in flight, against the loop's own way to use a thread."""

    each = 40

    def __init__(self, backend: str) -> None:
        self.backend = backend
        layout = BlockLayout.raw(SMALL)
        self._src, self._dst = (touched(HostPool(layout, COUNT)) for _ in range(2))

    def ours(self) -> float:
        """Through the engine."""

        async def main() -> float:
            async with Engine(HostDevice(threads=CORES)) as engine:

                async def many(number: int) -> None:
                    src, dst = self._src[number], self._dst[number]
                    for _ in range(self.each):
                        await engine.copy(src, dst)

                return await self._timed(many)

        return on(self.backend, main)

    def theirs(self) -> float:
        """Through `asyncio.to_thread` or `trio.to_thread.run_sync`."""
        src, dst = _addresses(self._src), _addresses(self._dst)

        async def main() -> float:
            hop: Callable[..., Awaitable[object]] = asyncio.to_thread
            if self.backend == "trio":
                import trio  # noqa: PLC0415 - only measured where it is installed

                hop = trio.to_thread.run_sync

            async def many(number: int) -> None:
                for _ in range(self.each):
                    await hop(ctypes.memmove, dst[number], src[number], SMALL)

            return await self._timed(many)

        return on(self.backend, main)

    @staticmethod
    async def _timed(many: Callable[[int], Coroutine[Any, Any, None]]) -> float:
        start = time.perf_counter()
        async with anyio.create_task_group() as group:
            for number in range(COUNT):
                group.start_soon(many, number)
        return time.perf_counter() - start


def small(rounds: int) -> list[Pair]:
    """(b)."""
    return [
        compare(
            f"4 KiB copies, {COUNT} in flight, {backend}, against its to_thread",
            (work := Small(backend)).ours,
            work.theirs,
            amount=COUNT * Small.each,
            unit="ops/s",
            target=target,
            rounds=rounds,
        )
        for backend, target in (("asyncio", 2.0), ("uvloop", 1.5), ("trio", 5.0))
    ]


def batch_rate() -> float:
    """(b) Blocks per second of batches of 64 blocks of 4 KiB; the median of 15 runs."""
    layout = BlockLayout.raw(SMALL)
    src, dst = (touched(HostPool(layout, COUNT)) for _ in range(2))

    async def main() -> float:
        rates = []
        async with Engine(HostDevice(threads=CORES)) as engine:
            for _ in range(15):
                start = time.perf_counter()
                for _ in range(100):
                    await engine.copy(src, dst)
                rates.append(100 * COUNT / (time.perf_counter() - start))
        return percentile(rates, 50)

    return on("uvloop", main)


class Files:
    """(c) 64 files of 4 MiB, O_DIRECT: the engine against bare threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._serial = 0
        self.blocks = touched(HostPool(BlockLayout.raw(LARGE), COUNT))
        self._threads = FileDevice().threads
        self._bare = ThreadPoolExecutor(self._threads)
        self._views = [b.view(write=True) for b in self.blocks]
        self._names: list[Path] = []

    def fresh(self) -> list[Path]:
        """Names that were never used."""
        for name in self._names:
            name.unlink(missing_ok=True)
        self._serial += 1
        self._names = [self._folder / f"{self._serial}-{n}" for n in range(COUNT)]
        return self._names

    def bare_write(self) -> float:
        """Open, write, close in threads."""

        def one(name: Path, view: memoryview) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
            handle = os.open(name, flags, 0o600)
            os.pwrite(handle, view, 0)
            os.close(handle)

        names = self.fresh()
        start = time.perf_counter()
        wait([self._bare.submit(one, n, v) for n, v in zip(names, self._views, strict=True)])
        return time.perf_counter() - start

    def bare_read(self) -> float:
        """Open, read, close in threads."""

        def one(name: Path, view: memoryview) -> None:
            handle = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            os.preadv(handle, [view], 0)
            os.close(handle)

        start = time.perf_counter()
        wait([self._bare.submit(one, n, v) for n, v in zip(self._names, self._views, strict=True)])
        return time.perf_counter() - start

    def write(self) -> float:
        """Through the engine."""
        names = self.fresh()
        return self._run([FileWrite(n, b) for n, b in zip(names, self.blocks, strict=True)])

    def read(self) -> float:
        """Through the engine."""
        return self._run([FileRead(n, b) for n, b in zip(self._names, self.blocks, strict=True)])

    def _run(self, works: list[FileWrite] | list[FileRead]) -> float:
        async def main() -> float:
            async with Engine(FileDevice(threads=self._threads)) as engine:
                start = time.perf_counter()
                ops = [engine.submit_nowait(work) for work in works]
                for op in ops:
                    await op.wait()
                return time.perf_counter() - start

        return on("uvloop", main)


def files(rounds: int, folder: Path) -> list[Pair]:
    """(c)."""
    gigabytes = COUNT * LARGE / 1e9
    with TemporaryDirectory(dir=folder) as name:
        work = Files(Path(name))
        written = compare(
            f"{COUNT} x 4 MiB files written, O_DIRECT, against bare threads",
            work.write,
            work.bare_write,
            amount=gigabytes,
            unit="GB/s",
            target=0.95,
            rounds=rounds,
        )
        read = compare(
            f"{COUNT} x 4 MiB files read, O_DIRECT, against bare threads",
            work.read,
            work.bare_read,
            amount=gigabytes,
            unit="GB/s",
            target=0.95,
            rounds=rounds,
        )
    return [written, read]


async def _gaps(until: Callable[[], bool]) -> list[float]:
    """Times between turns of a task that always wants the next turn, in seconds."""
    found = []
    last = time.perf_counter()
    while not until():
        await asyncio.sleep(0)
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return found


def loop_gaps(runs: int = 7) -> dict[str, float]:
    """(e) The loop's p99 gap while 64 copies of 4 MiB run: engine, and bare threads."""
    work = Large()
    pooled: dict[str, list[float]] = {"engine": [], "threads": []}

    async def engine_run() -> list[float]:
        async with Engine(HostDevice(threads=CORES)) as engine:
            ops = [
                engine.submit_nowait(Copy(s, d)) for s, d in zip(work._src, work._dst, strict=True)
            ]
            return await _gaps(lambda: all(op.settled for op in ops))

    async def bare_run() -> list[float]:
        futures = [work._bare.submit(ctypes.memmove, d, s, LARGE) for d, s in work._pairs]
        return await _gaps(lambda: all(future.done() for future in futures))

    for _ in range(runs):
        pooled["engine"] += asyncio.run(engine_run())
        pooled["threads"] += asyncio.run(bare_run())
    p99 = {name: percentile(gaps, 99) for name, gaps in pooled.items()}
    return {
        "engine p99 (µs)": p99["engine"] * 1e6,
        "threads p99 (µs)": p99["threads"] * 1e6,
        "ratio": p99["engine"] / p99["threads"],
        "engine longest (ms)": max(pooled["engine"]) * 1e3,
        "threads longest (ms)": max(pooled["threads"]) * 1e3,
    }


IDLE = """
import anyio
from transfer import Engine, FileDevice, HostDevice
async def main():
    async with Engine(HostDevice(), FileDevice()):
        print("ready", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def idle_wakeups(seconds: float = 10.0) -> int:
    """(f) Context switches of all threads of a process with an idle engine."""
    with subprocess.Popen([sys.executable, "-c", IDLE], stdout=subprocess.PIPE) as child:  # noqa: S603 - this interpreter
        assert child.stdout is not None  # noqa: S101 - asked for above
        child.stdout.readline()
        gate = threading.Event()
        gate.wait(0.5)
        before = _switches(child.pid)
        gate.wait(seconds)
        after = _switches(child.pid)
        child.kill()
    return after - before


def _switches(pid: int) -> int:
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total
