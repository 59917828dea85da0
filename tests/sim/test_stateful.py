"""Hypothesis drives ledger, SimDevice, faults and poisoned pools; a model knows every byte."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvhold.campaigns._model import Cell, Model, Record, Version
from transfer import BlockLayout, Copy, Operation, StaleBlock, TransferError
from transfer._lane import Lane
from transfer._ledger import Ledger
from transfer._state import State
from transfer.testing import (
    Fault,
    FaultPlan,
    FaultyDevice,
    PoisonedPool,
    SimDevice,
    broken_invariants,
    peek,
)

SIZE = 6
RATES = {
    Fault.REFUSE: 0.05,
    Fault.DELAY: 0.1,
    Fault.WITHHOLD: 0.1,
    Fault.TWICE: 0.15,
    Fault.ERROR: 0.05,
    Fault.LOSE: 0.05,
    Fault.LATE: 0.1,
    Fault.FENCED: 0.05,
    Fault.INTERRUPT: 0.03,
}


class _Driver:
    """Nobody waits here."""

    def cancel(self, op: Operation) -> None: ...
    async def wait(self, op: Operation) -> None: ...
    async def wait_posted(self, op: Operation) -> None: ...
    def order_before(self, op: Operation, stream: object) -> None: ...
    def finish(self, op: Operation, stream: object | None) -> None: ...


class Machine(RuleBasedStateMachine):
    """Owners, a ledger, a device and its completions, in any order."""

    @initialize(seed=st.integers(0, 2**32), waits=st.booleans())
    def begin(self, seed: int, waits: bool) -> None:
        self.sim = SimDevice(kind="host", seed=seed, chunk=(1, 2))
        self.device = FaultyDevice(self.sim, FaultPlan(seed, rates=RATES), watch=self.struck)
        self.sim._started = True
        self.pool = PoisonedPool(BlockLayout.raw(SIZE), 5)
        self.wrong: list[tuple[str, str]] = []
        self.model = Model(lambda kind, what: self.wrong.append((kind, what)), lambda _a, _b: True)
        self.lane = Lane(self.device)
        self.ledger = Ledger(_Driver(), trace=self.model)
        self.cells: list[Cell] = []
        self.stale: list[Any] = []
        self.works: dict[int, tuple[Copy, Record]] = {}
        self.count = 0

    def struck(self, fault: Fault, work: Any) -> None:
        record = self.works[id(work)][1]
        record.disturbed = True
        record.faulted = fault is Fault.ERROR

    @precondition(lambda self: self.pool.book.free)
    @rule(fill=st.binary(min_size=SIZE, max_size=SIZE))
    def lease(self, fill: bytes) -> None:
        lease = self.pool.lease()
        cell = Cell(lease.handle, lease)
        cell.block.view(write=True)[:] = fill
        cell.version = Version(fill)
        self.cells.append(cell)

    @precondition(lambda self: self.cells)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cell = data.draw(st.sampled_from(self.cells))
        self.cells.remove(cell)
        assert cell.lease is not None
        cell.lease.release()
        self.stale.append(cell.block)

    @precondition(lambda self: len(self.cells) > 1)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        usable = [c for c in self.cells if all(r.op is not None for r in c.pending())]
        sources = [c for c in usable if c.promising]
        if not sources or len(usable) < 2:
            return
        src = data.draw(st.sampled_from(sources))
        dst = data.draw(st.sampled_from([c for c in usable if c is not src]))
        after = {r: None for r in src.pending() if src in r.writes}
        after |= dict.fromkeys(dst.pending())
        self.count += 1
        record = Record(str(self.count), [src], [dst], lambda r, _o: [*r], [*after], "host")
        work = Copy(src.block, dst.block)
        self.works[id(work)] = (work, record)
        self.model.add(record)
        before = [r.op for r in after if r.op is not None]
        record.op = self.ledger.prepare(work, self.lane, before, name=record.name)
        try:
            self.ledger.start(record.op)
        except (TransferError, KeyboardInterrupt):
            assert record.lost or record.settled
            if record.state is State.FAILED:
                self.model.refuse(record)
        self.patiently(self.ledger.advance)

    @precondition(lambda self: self.stale and self.cells)
    @rule(data=st.data())
    def name_a_stale_block(self, data: st.DataObject) -> None:
        stale = data.draw(st.sampled_from(self.stale))
        targets = [c.block for c in self.cells if not c.pending() and c.block.id != stale.id]
        if targets:
            try:
                self.ledger.prepare(Copy(stale, targets[0]), self.lane, (), name="stale")
            except StaleBlock:
                return
            raise AssertionError("a stale handle was taken")

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        _, record = data.draw(st.sampled_from(list(self.works.values())))
        if record.op is not None:
            record.cancelled = True
            op = record.op
            self.patiently(lambda: self.ledger.cancel(op))

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        self.sim.step(count)

    @rule(count=st.integers(1, 3))
    def release_faults(self, count: int) -> None:
        self.device.release(count)

    @rule()
    def reap(self) -> None:
        queue = self.device.completions
        queue.open()
        while queue.items:
            done = queue.items[0]
            self.patiently(lambda done=done: self.ledger.complete(done))
            queue.items.popleft()

    def patiently(self, act: Any) -> None:
        try:
            act()
        except KeyboardInterrupt:
            self.patiently(act)

    @invariant()
    def books_and_bytes_are_right(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert broken_invariants([self.lane], [self.pool]) == []
        assert self.pool.damage() == []
        assert self.wrong == []
        for cell in self.cells:
            if cell.checkable:
                assert peek(cell.block) == cell.content

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for _ in range(30):
            self.device.release()
            self.sim.run_until_idle()
            self.reap()
        self.books_and_bytes_are_right()
        for _, record in self.works.values():
            assert record.settled or record.state is State.QUARANTINED
        for cell in self.cells:
            assert cell.lease is not None
            cell.lease.release()
        counts = self.pool.counts()
        assert counts.free + counts.quarantined == self.pool.blocks


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
