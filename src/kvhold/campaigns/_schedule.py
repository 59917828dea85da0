"""One schedule: what it is, as code to paste, and how it is run."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvhold.campaigns._owner import Owner
from kvhold.campaigns._world import World
from transfer import CompletionLost, PoolBusy, State
from transfer.testing import Fault, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvhold.campaigns._model import Record
    from transfer import Pool

_QUOTA: Final = 8  # operations that each of three owners begins at least
_STUCK: Final = 400  # turns in which nothing could happen
_STUCK_REAL: Final = 20_000  # the same with threads, in waits of a quarter of a millisecond


@dataclass(frozen=True)
class Schedule:
    """What decides a run: with sim devices, everything; with real ones, all but the threads' pace.

    Attributes:
        seed: of every choice.
        plan: the devices' faults.
        calls: the faults of system calls.
        real: real worker threads, memory and files behind gates, instead of simulated ones.
        naive: the control engine instead of the real one.
        deep: also compare the engine's books after every step.
    """

    seed: int
    plan: FaultPlan = field(default_factory=FaultPlan)
    calls: FaultPlan = field(default_factory=FaultPlan)
    real: bool = False
    naive: bool = False
    deep: bool = True

    @staticmethod
    def drawn(seed: int, *, real: bool = False, naive: bool = False, deep: bool = True) -> Schedule:
        """The schedule of a seed, with faults of its own."""
        rates = {
            Fault.REFUSE: 0.03,
            Fault.PARTIAL: 0.1,
            Fault.DELAY: 0.15 if real else 0.06,
            Fault.WITHHOLD: 0.08,
            Fault.TWICE: 0.08,
            Fault.ERROR: 0.03,
            Fault.LOSE: 0.02,
            Fault.LATE: 0.03,
            Fault.FENCED: 0.02,
            Fault.UNFENCED: 0.01,
            Fault.INTERRUPT: 0.01,
            Fault.INTERRUPT_EARLY: 0.005,
            Fault.POISON: 0.002,
        }
        calls = {
            Fault.SHORT: 0.15,
            Fault.EINTR: 0.1,
            Fault.NOTHING: 0.02,
            Fault.ENOSPC: 0.02,
            Fault.EIO: 0.02,
        }
        return Schedule(
            seed,
            FaultPlan(seed, rates=rates),
            FaultPlan(seed, rates=calls if real else {}),
            real=real,
            naive=naive,
            deep=deep,
        )

    def limited_to(self, faults: frozenset[Fault]) -> Schedule:
        """The same with fewer kinds of faults, each as likely as before."""

        def kept(plan: FaultPlan) -> FaultPlan:
            rates = {fault: rate for fault, rate in plan.rates.items() if fault in faults}
            return FaultPlan(plan.seed, rates=rates, at=plan.at)

        return replace(self, plan=kept(self.plan), calls=kept(self.calls))


@dataclass
class Outcome:
    """What came of a schedule.

    Attributes:
        schedule: what was run.
        operations: how many were begun.
        reuses: leases of blocks that had been leased before.
        steps: how often all bytes were checked.
        injected: how often each fault struck.
        violations: (kind, what) of everything that was wrong; empty is right.
        trace: checksum over every transition in order.
    """

    schedule: Schedule
    operations: int = 0
    reuses: int = 0
    steps: int = 0
    injected: Counter[Fault] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    trace: int = 0


def run(schedule: Schedule, folder: Path, loop: asyncio.AbstractEventLoop) -> Outcome:
    """Run a schedule to its end, or to the first violation.

    Args:
        schedule: what to run.
        folder: an empty folder for its files.
        loop: an asyncio loop that does not run.
    """
    world = World(schedule, folder)
    loop.set_exception_handler(lambda _loop, context: _crashed(world, context))
    owners = [Owner(world, name) for name in "abc"]
    main = loop.create_task(_Run(world, owners).main())
    struck = 0
    while not main.done():
        # An interrupt that strikes in a callback of the loop leaves it; whoever embeds the engine
        # then runs the loop on to its end, and so do we.
        try:
            loop.run_until_complete(main)
        except KeyboardInterrupt:
            struck += 1
            if struck > world.injected[Fault.INTERRUPT] + world.injected[Fault.INTERRUPT_EARLY]:
                raise  # somebody's own
    world.leave()
    return Outcome(
        schedule,
        world.operations,
        world.reuses,
        world.checks,
        world.injected,
        world.violations,
        zlib.crc32(repr(world.model.steps).encode()),
    )


def _crashed(world: World, context: dict[str, object]) -> None:
    world.report("crash", f"{context.get('message')}: {context.get('exception')!r}")


class _Run:
    """The course of one schedule."""

    def __init__(self, world: World, owners: list[Owner]) -> None:
        self.world = world
        self.owners = owners
        self._closing = 0

    async def main(self) -> None:
        """Let owners act, devices move and faults strike; then close, and take stock."""
        world = self.world
        world.engine.start()
        for owner, block_id in zip(self.owners, range(world.foreign.blocks), strict=True):
            owner.own(world.foreign.block(block_id))
        tasks = [asyncio.ensure_future(owner.live(_QUOTA)) for owner in self.owners]
        if not await self._drive(tasks, world.turn):
            return
        closing = asyncio.ensure_future(world.engine.aclose())
        if world.deadline == 0:
            await asyncio.wait((closing,))
            world.check()
            self._close(world.slots)
            self._close(world.pages)
        if not await self._drive([closing], self._last_turns, allow=self._may_raise()):
            return
        if world.deadline and not world.schedule.naive:
            self._drained()
        await self._drive([asyncio.ensure_future(self._settle())], world.finish)
        world.check()
        self._stock()

    def _last_turns(self) -> bool:
        """While the engine closes: devices go on as before, and in the end to their end."""
        self._closing += 1
        if self._closing < 4:
            return True
        return self.world.turn() or (self._closing > 30 and self.world.finish())

    def _may_raise(self) -> tuple[type[BaseException], ...]:
        """What closing may raise: what was lost at its deadline, an interrupt that struck it."""
        lost = (CompletionLost,) if self.world.deadline == 0 else ()
        struck = self.world.injected[Fault.INTERRUPT] + self.world.injected[Fault.INTERRUPT_EARLY]
        return (*lost, KeyboardInterrupt) if struck else lost

    async def _settle(self) -> None:
        """Let every device end, and the engine take the late proofs."""
        world = self.world
        # Twice: the first look of a closed engine is what lets a withheld proof be released.
        for _ in range(2):
            await self._run_dry()
            with suppress(CompletionLost, KeyboardInterrupt):
                world.engine.close_sync(0.0)

    async def _run_dry(self) -> None:
        world = self.world
        pause = 0.0002 if world.schedule.real else 0
        while world.finish() or world.workers():  # noqa: ASYNC110 - devices turn in between
            await asyncio.sleep(pause)

    async def _drive(
        self,
        tasks: Sequence[asyncio.Future[None]],
        turn: Callable[[], bool],
        *,
        allow: tuple[type[BaseException], ...] = (),
    ) -> bool:
        """Turn the devices and look at every byte until the tasks have ended; False to give up."""
        world = self.world
        quiet = 0
        limit = _STUCK_REAL if world.schedule.real else _STUCK
        while not all(task.done() for task in tasks):
            quiet = 0 if turn() else quiet + 1
            await asyncio.sleep(0.00025 if world.schedule.real and quiet > 20 else 0)
            world.check()
            if quiet > limit:
                world.report("stuck", self._who_waits())
            if world.violations:
                await self._abort(tasks)
                return False
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, allow):
                world.report("crash", f"a task raised {error!r}")
        return not world.violations

    def _who_waits(self) -> str:
        left = [
            r.op for r in self.world.model.records.values() if r.op is not None and not r.settled
        ]
        return f"nothing can happen any more, and these have not ended: {left}"

    async def _abort(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        """Leave a schedule that has failed; what it has in flight is its own."""
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1)
        self.world.gate.open()

    # Taking stock

    def _drained(self) -> None:
        """Closing has waited for everything whose end could be learnt."""
        for record in self.world.model.records.values():
            if not record.settled and record.state is not State.QUARANTINED:
                self.world.report("outcome", f"the engine closed before {record.name} had ended")

    def _close(self, pool: Pool) -> None:
        """Close a pool; right is `PoolBusy` exactly while something holds blocks."""
        busy = any(
            not r.settled and any(c.block.pool is pool for c in (*r.reads, *r.writes))
            for r in self.world.model.records.values()
        )
        try:
            pool.close()
        except PoolBusy:
            if busy:
                return
            self.world.report("outcome", f"{pool!r} is busy and nothing holds it")

    def _stock(self) -> None:
        world = self.world
        if world.schedule.naive:
            return
        for record in world.model.failures:
            excused = world.poisoned or (record.device == "files" and world.calls.injected)
            if not excused and not world.model.justified(record):
                error = None if record.op is None else record.op.error
                world.report("outcome", f"{record.name} failed without a reason: {error!r}")
        for record in world.model.records.values():
            if not record.settled and not self._may_stay(record):
                world.report("stuck", f"{record.name} never ended: {record.op!r}")
        for pool in world.pools:
            counts = pool.counts()
            expected = world.expected_quarantine()[pool]
            if counts.held or (counts.quarantined != expected and not world.poisoned):
                world.report(
                    "counts", f"{counts} of {pool.name} at the end, {expected} are beyond proof"
                )
            self._close(pool)

    def _may_stay(self, record: Record) -> bool:
        """Whether an operation may be left without an end: only if no proof of it can ever come."""
        world = self.world
        return record.state is State.QUARANTINED and (
            record in world.unprovable or world.poisoned or world.deadline == 0
        )
