"""What the measurements on a GPU share: pools, a device without an engine, and a plain copy."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import msgspec
import numpy as np

from transfer import BlockLayout, Blocks, Copy, Extent
from transfer._cuda_driver import CudaDriver
from transfer._cuda_watch import CudaFence
from transfer.cuda import H200, CopyTable, CudaDevice, DevicePool, Pace, PinnedPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transfer import Launch, Pool

MIB = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """How devices are made: by default, or as this run has found best.

    Attributes:
        multiprocessors, staging, table, pace: as for `CudaDevice`.
    """

    multiprocessors: int = 8
    staging: int = 32 * MIB
    table: CopyTable = H200
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def of(cls, folder: Path) -> Settings:
        """What the parts `tune`, `pace`, `bare`, `table` left in a folder, else the defaults."""
        best: dict[str, int] = {}
        pace = Pace()
        tune, table = folder / "tune.json", folder / "table.json"
        if tune.exists():
            best = dict(msgspec.json.decode(tune.read_bytes())["best"])
        found = H200
        if table.exists():
            found = CopyTable.parse(str(msgspec.json.decode(table.read_bytes())["table"]))
        for chosen in (folder / "pace.json", folder / "bare.json"):
            if chosen.exists():
                pace = Pace(**msgspec.json.decode(chosen.read_bytes())["best"])
        return cls(table=found, pace=pace, **best)

    def device(self, **options: Any) -> CudaDevice:
        """A device; `options` win."""
        own: dict[str, Any] = {
            "multiprocessors": self.multiprocessors,
            "staging": self.staging,
            "table": self.table,
            "pace": self.pace,
        }
        return CudaDevice(0, **{**own, **options})


SHAPE = (16, 8, 128)
"""A page: 16 tokens, 8 heads, 128 elements."""


def page_layout(layers: int) -> BlockLayout:
    """BF16 keys and values of some layers, as a slot holds them."""
    return BlockLayout.packed(
        [
            Extent(name, SHAPE, "bfloat16", layer=layer)
            for name in ("key", "value")
            for layer in range(layers)
        ]
    )


def scattered(pool: Pool, count: int, seed: int = 0) -> Blocks:
    """Blocks of a fresh pool in random order, drawn from all of it."""
    handle = pool.lease(pool.blocks).handle
    order = np.random.default_rng(seed).permutation(pool.blocks)[:count]
    return Blocks(pool, handle.ids[order], handle.generations[order])


def fill(pool: DevicePool) -> None:
    """Random bytes: zeros can be faster than data."""
    import torch  # noqa: PLC0415 - only where there is a GPU

    for extent in pool.layout.extents:
        whole = pool.cache(extent.name, extent.layer)
        (whole.view(torch.int16) if extent.itemsize == 2 else whole.view(torch.uint8)).random_()
    torch.cuda.synchronize()


@final
class Bare:
    """The driver alone: one contiguous copy each way, as the limit to compare with."""

    def __init__(self, nbytes: int) -> None:
        self.driver = CudaDriver(0)
        self.driver.open()
        with self.driver.scope():
            self.device = self.driver.allocate(nbytes)
            self.host = self.driver.allocate_host(nbytes)
            self.streams = (self.driver.stream(), self.driver.stream())
            self.events = tuple(self.driver.event(blocking=False) for _ in range(2))

    def post(self, nbytes: int, *, outward: bool) -> Any:
        """Queue a copy and the event behind it."""
        which = 0 if outward else 1
        dst, src = (self.host, self.device) if outward else (self.device, self.host)
        self.driver.copy(dst, src, nbytes, self.streams[which])
        self.driver.record(self.events[which], self.streams[which])
        return self.events[which]

    def seconds(self, nbytes: int, *, outward: bool) -> float:
        """A copy from call to the end of cuEventSynchronize."""
        with self.driver.scope():
            began = time.perf_counter()
            self.driver.sync(self.post(nbytes, outward=outward))
            return time.perf_counter() - began

    def both(self, nbytes: int) -> float:
        """Copies both ways at once."""
        with self.driver.scope():
            began = time.perf_counter()
            ends = [self.post(nbytes, outward=True), self.post(nbytes, outward=False)]
            for end in ends:
                self.driver.sync(end)
            return time.perf_counter() - began

    def close(self) -> None:
        """Give the memory back."""
        with self.driver.scope():
            self.driver.free(self.device)
            self.driver.free_host(self.host)
        self.driver.shut()


@final
class Direct:
    """A device driven by hand, without engine and loop: what the copies themselves take.

    Attributes:
        posting: seconds that the calls took which posted the copies, one for each `seconds`.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.posting: list[float] = []
        device.start()
        assert device._running is not None  # noqa: S101 - just started
        self.driver = device._running.driver

    def post(self, work: Copy | Launch) -> CudaFence:
        """Enqueue; the fence."""
        fence = self.device.enqueue(work, ())
        assert isinstance(fence, CudaFence)  # noqa: S101 - a CUDA device makes no others
        return fence

    def wait(self, fence: CudaFence) -> None:
        """Wait for the end, in the driver once the event is recorded."""
        while fence.event is None:
            time.sleep(0)
        with self.driver.scope():
            self.driver.sync(fence.event)

    def seconds(self, *work: Copy | Launch) -> float:
        """From the call to the end of all of it."""
        began = time.perf_counter()
        fences = [self.post(item) for item in work]
        posted = time.perf_counter()
        for fence in fences:
            self.wait(fence)
        took = time.perf_counter() - began
        self.posting.append(posted - began)
        self.settle()
        return took

    def settle(self) -> None:
        """Let the device's threads see the ends, so that its events go back into use."""
        running = self.device._running
        assert running is not None  # noqa: S101 - started
        while not running.signals.quiet:
            time.sleep(0)
        self.device.completions.items.clear()

    def close(self) -> None:
        """Stop the device."""
        self.device.close()


@contextmanager
def direct(settings: Settings, **options: Any) -> Iterator[Direct]:
    """A device driven by hand, closed at the end."""
    made = Direct(settings.device(spin=float("inf"), **options))
    try:
        yield made
    finally:
        made.close()


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def rounds(count: int, *ways: Callable[[], float]) -> list[float]:
    """Medians of interleaved rounds, after two that are not counted."""
    return [median(found) for found in samples(count, *ways)]


def samples(count: int, *ways: Callable[[], float]) -> list[list[float]]:
    """Each way's figures of interleaved rounds, after two that are not counted."""
    times: list[list[float]] = [[] for _ in ways]
    for number in range(count + 2):
        for way, found in zip(ways, times, strict=True):
            took = way()
            if number >= 2:
                found.append(took)
    return times


def page_pools(layout: BlockLayout, pages: int, slots: int) -> tuple[DevicePool, PinnedPool]:
    """Pages with random bytes, and slots."""
    gpu = DevicePool(layout, pages)
    fill(gpu)
    return gpu, PinnedPool(layout, slots)


def gigabytes(nbytes: float, seconds: float) -> float:
    """10^9 bytes per second."""
    return nbytes / seconds / 1e9
