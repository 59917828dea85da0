"""What a schedule runs in: devices, pools, the engine, and the look at every byte after each step."""

from __future__ import annotations

import threading
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Final, final

from kvhold.campaigns._model import Cell, Model, Record
from transfer import BlockLayout, Engine, Extent, FileDevice, HostDevice, Pool
from transfer.testing import (
    POISON,
    Fault,
    FaultPlan,
    FaultyCalls,
    FaultyDevice,
    Gate,
    KeptStorage,
    NaiveEngine,
    PoisonedPool,
    SimDevice,
    SimPool,
    broken_invariants,
    memory_at,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvhold.campaigns._schedule import Schedule
    from transfer._device import Device
    from transfer._work import Work
    from transfer.testing import SimStream

HALF: Final = 12
"""Bytes of each of a block's two tensors."""

GPU: Final = "sim:0"
PAGES: Final = BlockLayout(
    (Extent("a", (HALF,), "uint8"), Extent("b", (HALF,), "uint8", plane=1)), (HALF, HALF)
)
"""A block of the pretend GPU: two planes, as of a paged cache."""
SLOTS: Final = BlockLayout.packed(
    (Extent("a", (HALF,), "uint8"), Extent("b", (HALF,), "uint8")), align=1
)
"""A block of host memory: the same tensors in one plane."""

BLOCKS: Final = 7
_NEVER_PROVEN: Final = frozenset({Fault.UNFENCED, Fault.INTERRUPT, Fault.INTERRUPT_EARLY})


@final
class World:
    """Everything of one schedule but its tasks.

    Args:
        schedule: what to run.
        folder: where files go, for a schedule on real devices.

    Attributes:
        violations: (kind, what) of everything that was wrong.
        cells: the cell of every leased block.
        operations: how many were begun.
    """

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule = schedule
        self.folder = folder
        self.random = Random(schedule.seed)
        self.violations: list[tuple[str, str]] = []
        self.cells: dict[tuple[Pool, int], Cell] = {}
        self.unprovable: set[Record] = set()
        self.works: dict[int, Record] = {}
        self.operations = 0
        self.checks = 0
        self.gate = Gate()
        self._devices()
        self._pools()
        self.model = Model(self.report, self._can_wait)
        self.deadline = 0.0 if self.random.random() < 0.25 else 3600.0
        limit = self.random.choice((3, 8, 4096))
        make = NaiveEngine if schedule.naive else Engine
        self.engine: Engine | NaiveEngine = make(
            *self.faulty, in_flight_max=limit, drain_deadline=self.deadline, trace=self.model
        )

    def _devices(self) -> None:
        seed, plan = self.schedule.seed, self.schedule.plan
        self.gpu = SimDevice(kind=GPU, seed=seed, chunk=(1, 8))
        peers = [self.gpu] if self.random.random() < 0.3 else []
        self.host_sim = SimDevice(kind="host", seed=seed + 1, chunk=(1, 8), peers=peers)
        self.peers = bool(peers) and not self.schedule.real
        self.sims = [self.gpu] if self.schedule.real else [self.gpu, self.host_sim]
        self.calls = FaultyCalls(self.schedule.calls, gate=self.gate)
        self.files = FileDevice(threads=1, calls=self.calls)
        host = HostDevice(threads=2, inline_bytes_max=self.random.choice((0, 1 << 14)))
        inner: list[Device] = (
            [self.gpu, host, self.files] if self.schedule.real else [self.gpu, self.host_sim]
        )
        self.faulty = [
            FaultyDevice(
                device,
                FaultPlan(plan.seed + number, rates=plan.rates, at=plan.at if not number else {}),
                watch=self._struck,
            )
            for number, device in enumerate(inner)
        ]

    def _pools(self) -> None:
        storage = KeptStorage(SLOTS.nbytes, BLOCKS) if self.schedule.real else None
        self.pages = PoisonedPool(PAGES, BLOCKS, kind=GPU, name="pages")
        self.slots = PoisonedPool(SLOTS, BLOCKS, storage=storage, name="slots")
        self.foreign = SimPool(PAGES, 3, kind=GPU, foreign=True, name="foreign")
        self.pools: list[Pool] = [self.pages, self.slots, self.foreign]
        self._views = {
            (pool, block_id): [
                (self._look(pool, plane, block_id), POISON * 5)
                for plane in range(len(pool.layout.plane_bytes))
            ]
            for pool in self.pools
            for block_id in range(pool.blocks)
        }

    @staticmethod
    def _look(pool: Pool, plane: int, block_id: int) -> memoryview:
        size = pool.layout.plane_bytes[plane]
        return memory_at(pool.storage, pool.address(plane, block_id), size)

    def _can_wait(self, device: str, earlier: str) -> bool:
        if device == earlier:
            return device == GPU or not self.schedule.real
        return self.peers and device == "host" and earlier == GPU

    def _struck(self, fault: Fault, work: Work) -> None:
        record = self.works.get(id(work))
        if record is None:
            return
        record.disturbed = True
        record.faulted = fault in (Fault.ERROR, Fault.PARTIAL)
        if fault in _NEVER_PROVEN:
            self.unprovable.add(record)

    # What went on

    @property
    def injected(self) -> Counter[Fault]:
        """How often each fault struck."""
        return sum((d.injected for d in self.faulty), Counter(self.calls.injected))

    @property
    def poisoned(self) -> bool:
        """Whether a device may refuse work by now."""
        return self.injected[Fault.POISON] > 0

    @property
    def reuses(self) -> int:
        """Leases of blocks that had been leased before."""
        return self.pages.reuses + self.slots.reuses

    def report(self, kind: str, what: str) -> None:
        """Note that something is wrong."""
        self.violations.append((kind, what))

    def pattern(self) -> bytes:
        """Bytes that no other write of this schedule has."""
        return self.random.randbytes(2 * HALF)

    def stream(self) -> SimStream:
        """A stream of the pretend GPU."""
        return self.gpu.stream()

    # The look

    def check(self) -> None:
        """Compare every block that has a defined content with it, and every free one with poison."""
        self.checks += 1
        for (pool, block_id), cell in self.cells.items():
            if cell.checkable and not self._equal(pool, block_id, cell.content or b""):
                found = [bytes(view) for view, _ in self._views[pool, block_id]]
                self.report("bytes", f"block {block_id} of {pool.name}: {found!r} is not its data")
        for pool in (self.pages, self.slots):
            for block_id in pool.book.free:
                for view, poison in self._views[pool, block_id]:
                    if view != poison[: len(view)]:
                        self.report("bytes", f"free block {block_id} of {pool.name} was written")
        unmapped = sum(device.touched_unmapped for device in self.sims)
        if unmapped:
            self.report("bytes", f"memory was touched after it was given back, {unmapped} times")
        if self.schedule.deep and isinstance(self.engine, Engine):
            rested = not self.engine._ledger._ready
            for broken in broken_invariants(self.engine._lanes, self.pools, rested=rested):
                self.report("books", broken)

    def _equal(self, pool: Pool, block_id: int, content: bytes) -> bool:
        at = 0
        for view, _ in self._views[pool, block_id]:
            if view != content[at : at + len(view)]:
                return False
            at += len(view)
        return True

    # The devices' turn

    def turn(self) -> bool:
        """Let a device do something, or a fault be released; whether anything happened."""
        random = self.random
        choice = random.random()
        if choice < 0.12:
            return bool(random.choice(self.faulty).release(1))
        if self.schedule.real and choice < 0.2:
            self.gate.shut() if random.random() < 0.5 else self.gate.open()
            return True
        return bool(random.choice(self.sims).step(random.randint(1, 4)))

    def finish(self) -> bool:
        """Release every fault and run every device dry; whether anything happened."""
        self.gate.open()
        released = sum(device.release() for device in self.faulty)
        return bool(released + sum(device.run_until_idle() for device in self.sims))

    def leave(self) -> None:
        """Stop what a violation left running; the books are past asking by then."""
        self.gate.open()
        engine = self.engine if isinstance(self.engine, Engine) else self.engine.engine
        engine._stop(engine._lanes)
        # What was lost may still be written, into this schedule's folder.
        for thread in self.workers():
            thread.join()

    def workers(self) -> list[threading.Thread]:
        """The worker threads of this schedule's devices that have not ended."""
        names = ("kvhold-host-", "kvhold-files-") if self.schedule.real else ()
        return [thread for thread in threading.enumerate() if thread.name.startswith(names)]

    def expected_quarantine(self) -> Counter[Pool]:
        """Blocks by pool that can never be proven quiet, faults being what they were."""
        blocks = {
            (cell.block.pool, cell.block.id)
            for record in self.unprovable
            for cell in (*record.reads, *record.writes)
        }
        return Counter(pool for pool, _ in blocks)
