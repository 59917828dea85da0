"""Which ways a copy may take on a started device, and which of them it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, final
from weakref import WeakKeyDictionary

from transfer._cuda_plan import CopyTable, Plan, Way, choose
from transfer._cuda_steps import portion
from transfer._staging import CopyPipeline, CopyTables, Pipeline

if TYPE_CHECKING:
    from transfer._cuda_running import Running
    from transfer._memory import Pool
    from transfer._work import Copy

    Known: TypeAlias = tuple[CopyTables, tuple[Way, ...]]

PLANS: Final = 4096
"""Decisions that are remembered."""


@final
class Choice:
    """Plans by a table of rates; what can be worked out once is remembered.

    Args:
        table: measured rates.
        ways: the ways that may be chosen.
    """

    def __init__(self, table: CopyTable, ways: tuple[Way, ...]) -> None:
        self.table = table
        self.ways = ways
        self._tables: WeakKeyDictionary[
            Pool, WeakKeyDictionary[Pool, dict[tuple[str, ...] | None, Known]]
        ] = WeakKeyDictionary()
        self._plans: dict[tuple[object, ...], Plan] = {}

    def plan(self, pipe: Pipeline, ways: tuple[Way, ...]) -> Plan:
        """The cheapest of some ways."""
        key = (pipe.outward, pipe.nbytes, pipe.page_fragment, pipe.host_fragment, ways)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[key] = choose(
                self.table,
                outward=pipe.outward,
                nbytes=pipe.nbytes,
                page_fragment=pipe.page_fragment,
                host_fragment=pipe.host_fragment,
                ways=ways,
            )
        return plan

    def of_pipeline(self, pipe: Pipeline, running: Running) -> tuple[Way, ...]:
        """The ways that a pipeline may take; none when it does not fit the device."""
        lane = running.lane(outward=pipe.outward)
        ways = []
        if portion(pipe, lane) >= 1:
            if pipe.step <= lane.area:
                ways.append(Way.STAGED)
            if pipe.direct and running.mapped:
                ways.append(Way.MAPPED)
        allowed = tuple(way for way in ways if way in self.ways)
        return allowed or tuple(ways)

    def of_copy(self, work: Copy, running: Running) -> tuple[CopyPipeline, tuple[Way, ...]]:
        """A copy as a pipeline, and the ways it may take; all but its ids is worked out once."""
        others = self._tables.get(work.src.pool)
        if others is None:
            others = self._tables[work.src.pool] = WeakKeyDictionary()
        known = others.get(work.dst.pool)
        if known is None:
            known = others[work.dst.pool] = {}
        movers = running.kernels.movers
        found = known.get(work.names)
        if found is not None:
            tables, ways = found
            return CopyPipeline(tables, work.src, work.dst, movers), ways
        tables = CopyTables(work.src.pool, work.dst.pool, work.runs)
        pipe = CopyPipeline(tables, work.src, work.dst, movers)
        ways = self._ways_of(pipe, tables, running)
        known[work.names] = (tables, ways)
        return pipe, ways

    def _ways_of(self, pipe: CopyPipeline, tables: CopyTables, running: Running) -> tuple[Way, ...]:
        if not tables.has_host:
            fits = portion(pipe, running.inside) >= 1
            return (Way.KERNEL,) if fits else (Way.BATCH,)
        ways = tuple(way for way in (Way.DMA, Way.BATCH) if way in self.ways)
        kernels = tuple(way for way in self.of_pipeline(pipe, running) if way in self.ways)
        return (*ways, *kernels) or (Way.BATCH,)
