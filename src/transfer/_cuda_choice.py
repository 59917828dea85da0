"""Which ways a copy may take on a started device, and which of them it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final
from weakref import WeakKeyDictionary

from transfer._cuda_lane import FEW
from transfer._cuda_plan import CopyTable, Plan, Way, choose
from transfer._cuda_steps import portion
from transfer._handle import Block
from transfer._staging import CopyPipeline, CopyTables, Pipeline

if TYPE_CHECKING:
    from transfer._cuda_running import Running
    from transfer._memory import Pool
    from transfer._work import Copy

    Known: TypeAlias = tuple[CopyTables, tuple[Way, ...]]

PLANS: Final = 4096
"""Decisions that are remembered."""


class Few(NamedTuple):
    """The byte runs of a block, between two pools, where there are few.

    Attributes:
        outward: from the GPU to the host.
        runs: destination address in block 0 and stride, source address and stride, bytes.
    """

    outward: bool
    runs: tuple[tuple[int, int, int, int, int], ...]

    def pieces(self, work: Copy) -> list[tuple[int, int, int]]:
        """Destination, source and bytes of every run of a copy."""
        src, dst = work.src, work.dst
        if isinstance(src, Block) and isinstance(dst, Block):
            pairs = [(src.id, dst.id)]
        else:
            pairs = list(zip(map(int, src.ids), map(int, dst.ids), strict=True))
        return [
            (to + there * to_step, at + here * step, nbytes)
            for here, there in pairs
            for to, to_step, at, step, nbytes in self.runs
        ]


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
        self._few: WeakKeyDictionary[
            Pool, WeakKeyDictionary[Pool, dict[tuple[str, ...] | None, Few | None]]
        ] = WeakKeyDictionary()

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

    def few(self, work: Copy) -> Few | None:
        """What a copy of at most `FEW` runs is made of; None for others, which need a plan.

        A driver copy of each run is then cheaper than anything that launches a kernel.
        """
        others = self._few.get(work.src.pool)
        if others is None:
            others = self._few[work.src.pool] = WeakKeyDictionary()
        known = others.get(work.dst.pool)
        if known is None:
            known = others[work.dst.pool] = {}
        if work.names not in known:
            known[work.names] = self._few_of(work)
        found = known[work.names]
        return found if found is not None and len(work.src) * len(found.runs) <= FEW else None

    def _few_of(self, work: Copy) -> Few | None:
        kinds = (work.src.pool.kind, work.dst.pool.kind)
        rows = work.runs.rows
        if Way.DMA not in self.ways or "host" not in kinds or not 0 < len(rows) <= FEW:
            return None
        from_, to = work.src.pool.storage.planes, work.dst.pool.storage.planes
        return Few(
            kinds[1] == "host",
            tuple(
                (
                    to[there].address + end,
                    to[there].stride,
                    from_[here].address + start,
                    from_[here].stride,
                    nbytes,
                )
                for here, start, there, end, nbytes in rows
            ),
        )

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
