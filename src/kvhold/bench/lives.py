"""(d) Whole lives in the ledger alone: prepare, submit, complete, settle, with two holds."""

from __future__ import annotations

import gc
import random
import time
from typing import TYPE_CHECKING, cast

from kvhold.bench.pairs import percentile
from transfer import BlockLayout, Copy, Engine, HostDevice, HostPool
from transfer._fence import Completion, CompletionQueue, Fence
from transfer._lane import Lane
from transfer._ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer._device import Device
    from transfer._operation import Driver
    from transfer._work import Work


class NullDevice:
    """Takes everything and does nothing: what is left is the ledger."""

    name = "null"
    completions = CompletionQueue()

    def __init__(self) -> None:
        self.fences: list[Fence] = []

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Remember a fence."""
        del work, waits
        fence = Fence()
        self.fences.append(fence)
        return fence


def microseconds(in_flight: int, *, shuffled: bool, lives: int) -> float:
    """Median over ten runs of µs per life with `in_flight` operations in flight.

    Args:
        in_flight: operations in flight at any time.
        shuffled: complete in random order, else first in, first out.
        lives: how many lives a run has.
    """
    # What the program has made so far is not the ledger's: as a server would, take it out of what
    # the garbage collector walks.
    gc.collect()
    gc.freeze()
    device = NullDevice()
    lane = Lane(cast("Device", device))
    ledger = Ledger(cast("Driver", Engine(HostDevice())))
    pools = [HostPool(BlockLayout.raw(64), in_flight) for _ in range(2)]
    src, dst = (pool.lease(in_flight).handle for pool in pools)
    works = [Copy(s, d) for s, d in zip(src, dst, strict=True)]
    for work in works:
        ledger.start(ledger.prepare(work, lane))
    current = device.fences[:]
    order = random.Random(1)
    found = []
    for _ in range(10):
        places = (
            [order.randrange(in_flight) for _ in range(lives)]
            if shuffled
            else [number % in_flight for number in range(lives)]
        )
        device.fences.clear()
        gc.collect()
        start = time.perf_counter()
        for place in places:
            ledger.complete(Completion(current[place]))
            ledger.start(ledger.prepare(works[place], lane))
            current[place] = device.fences[-1]
        found.append((time.perf_counter() - start) / lives * 1e6)
    return percentile(found, 50)


def table() -> dict[str, float]:
    """µs per life by number in flight and order of completion."""
    return {
        f"{'random' if shuffled else 'first in, first out'}, {n:,} in flight (µs)": microseconds(
            n, shuffled=shuffled, lives=20_000
        )
        for shuffled in (False, True)
        for n in (100, 10_000, 100_000)
    }
