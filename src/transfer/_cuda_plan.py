"""Which way a copy takes: measured rates, a cost for each way, and the cheapest of them."""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from pathlib import Path


class Way(StrEnum):
    """How bytes cross between pages and slots."""

    DMA = "one driver copy for each piece"
    BATCH = "one driver call for many pieces"
    STAGED = "kernels through staging, then DMA"
    MAPPED = "a kernel on page-locked memory itself"
    KERNEL = "a kernel inside the GPU"


@final
@dataclass(frozen=True, slots=True)
class Rate:
    """One measured line.

    Attributes:
        way: how.
        outward: from the GPU to the host.
        fragment: bytes of each piece that the way moves by itself.
        rate: bytes per second over many pieces.
    """

    way: Way
    outward: bool
    fragment: int
    rate: float


@final
@dataclass(frozen=True, slots=True)
class Besides:
    """What a copy of some size takes longer than its bytes at the way's rate.

    Attributes:
        way: how.
        outward: from the GPU to the host.
        nbytes: bytes in all.
        seconds: the rest.
    """

    way: Way
    outward: bool
    nbytes: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class CopyTable:
    """What was measured on one kind of machine.

    Attributes:
        origin: where and when.
        rates: lines, any order.
        base: seconds that a way costs before the first byte and behind the last, by way.
        besides: the same by direction and size, where it was measured.
        noise: how far apart two measurements of the same were, as a part of them.
    """

    origin: str
    rates: tuple[Rate, ...]
    base: tuple[tuple[Way, float], ...]
    besides: tuple[Besides, ...] = ()
    noise: float = 0.0
    _lines: dict[tuple[Way, bool], list[tuple[int, float]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _rest: dict[tuple[Way, bool], list[tuple[int, float]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for rate in sorted(self.rates, key=lambda r: r.fragment):
            lines = self._lines.setdefault((rate.way, rate.outward), [])
            lines.append((rate.fragment, rate.rate))
        for rest in sorted(self.besides, key=lambda r: r.nbytes):
            found = self._rest.setdefault((rest.way, rest.outward), [])
            found.append((rest.nbytes, rest.seconds))

    def rest(self, way: Way, nbytes: int, *, outward: bool) -> float:
        """What a copy of so many bytes takes besides; interpolated between measured sizes."""
        lines = self._rest.get((way, outward))
        if not lines:
            return dict(self.base).get(way, 0.0)
        index = bisect.bisect_left(lines, (nbytes, 0.0))
        if index == 0:
            return lines[0][1]
        if index == len(lines):
            return lines[-1][1]
        (low, before), (high, after) = lines[index - 1], lines[index]
        share = (nbytes - low) / (high - low)
        return before * (1 - share) + after * share

    def seconds(self, way: Way, nbytes: int, fragment: float, *, outward: bool) -> float:
        """Time for `nbytes` in pieces of `fragment` bytes; infinite for a way not in the table.

        Between two measured sizes the time of one piece is interpolated, as pieces of different
        sizes differ by a constant and a rate.
        """
        lines = self._lines.get((way, outward))
        if not lines:
            return math.inf
        size = max(fragment, 1.0)
        index = bisect.bisect_left(lines, (size, 0.0))
        if index == 0:
            each = lines[0][0] / lines[0][1]
        elif index == len(lines):
            each = size / lines[-1][1]
        else:
            (low, slow), (high, fast) = lines[index - 1], lines[index]
            share = (size - low) / (high - low)
            each = (low / slow) * (1 - share) + (high / fast) * share
        return self.rest(way, nbytes, outward=outward) + nbytes / size * each

    def dump(self) -> str:
        """The table as JSON."""
        lines = {
            "origin": self.origin,
            "rates": [asdict(rate) for rate in self.rates],
            "base": self.base,
            "besides": [asdict(rest) for rest in self.besides],
            "noise": self.noise,
        }
        return json.dumps(lines, indent=1)

    @classmethod
    def parse(cls, text: str) -> CopyTable:
        """A table from what `dump` gave."""
        raw = json.loads(text)
        rates = tuple(
            Rate(Way(r["way"]), r["outward"], r["fragment"], r["rate"]) for r in raw["rates"]
        )
        besides = tuple(
            Besides(Way(r["way"]), r["outward"], r["nbytes"], r["seconds"])
            for r in raw.get("besides", ())
        )
        base = tuple((Way(w), s) for w, s in raw["base"])
        return cls(raw["origin"], rates, base, besides, float(raw.get("noise", 0.0)))

    @classmethod
    def read(cls, path: Path) -> CopyTable:
        """A table from a file."""
        return cls.parse(path.read_text(encoding="utf-8"))


def _lines(way: Way, direction: str, rates: dict[int, float]) -> tuple[Rate, ...]:
    outward = direction == "out"
    return tuple(Rate(way, outward, size << 10, gb * 1e9) for size, gb in rates.items())


H200: Final = CopyTable(
    "H200, PCIe 5 x16, driver 580",
    (
        *_lines(
            Way.DMA, "out", {4: 1.2, 16: 6, 32: 9.6, 64: 18.7, 256: 37.5, 2048: 51.4, 8192: 54.5}
        ),
        *_lines(Way.DMA, "in", {4: 1.5, 16: 5.4, 32: 9.9, 64: 17.5, 256: 34.4, 2048: 51, 8192: 54}),
        *_lines(Way.BATCH, "out", {4: 3.7, 8: 8.1, 16: 24.9, 28: 44, 64: 51, 2048: 54, 8192: 55}),
        *_lines(Way.BATCH, "in", {4: 2.1, 8: 3.5, 24: 8.1, 28: 41.7, 64: 51, 2048: 54, 8192: 55}),
        *_lines(
            Way.STAGED, "out", {4: 4.2, 16: 22.5, 28: 38.8, 64: 42, 256: 52, 2048: 55, 8192: 55}
        ),
        *_lines(
            Way.STAGED, "in", {4: 3, 8: 4.1, 24: 7.5, 28: 37, 64: 45, 256: 53, 2048: 55, 8192: 55}
        ),
        *_lines(Way.MAPPED, "out", {1: 20, 4: 50.4, 16: 52.4}),
        *_lines(Way.MAPPED, "in", {1: 15, 4: 49.5, 32: 51.3}),
    ),
    ((Way.DMA, 10e-6), (Way.BATCH, 200e-6), (Way.STAGED, 85e-6), (Way.MAPPED, 65e-6)),
)
"""The machine that kvhold was measured on; see docs/benchmarks/gpu-h200.json. Staged pieces are those
on the host's side. What a way costs besides is what a copy of 12 MiB takes longer than its rate."""

GENTLE: Final = 1.1
"""A copy through staging may cost so much more: a kernel that reaches over the link itself slows
what computes beside it by 13 to 172 %, staging by 2 to 3 % (same file)."""

LEAST: Final = 1.03
"""A way is given up for another one only where that is cheaper by so much, or by the table's noise."""


class Plan(NamedTuple):
    """A decision.

    Attributes:
        way: the way that is taken.
        seconds: what the table says it takes.
        others: what it says of the ways that were not taken.
    """

    way: Way
    seconds: float
    others: dict[Way, float]


def choose(
    table: CopyTable,
    *,
    outward: bool,
    nbytes: int,
    page_fragment: float,
    host_fragment: float,
    ways: tuple[Way, ...],
) -> Plan:
    """Pick the cheapest of the ways that are possible, staging being worth `GENTLE` to the rest.

    Two ways that cost about the same are told apart by noise; the one that `H200` names is taken
    then, so that a table measured in a bad minute changes nothing that it is not sure of.

    Args:
        table: measured rates.
        outward: from the GPU to the host.
        nbytes: bytes that cross.
        page_fragment: mean bytes of a run on the pages' side.
        host_fragment: mean bytes of a piece on the host's side.
        ways: what is possible.
    """
    costs = {
        way: table.seconds(
            way, nbytes, host_fragment if way is Way.STAGED else page_fragment, outward=outward
        )
        for way in ways
    }
    best = min(costs, key=lambda way: costs[way])
    if table is not H200 and len(costs) > 1:
        usual = choose(
            H200,
            outward=outward,
            nbytes=nbytes,
            page_fragment=page_fragment,
            host_fragment=host_fragment,
            ways=ways,
        ).way
        if costs[usual] <= costs[best] * max(LEAST, 1 + table.noise):
            best = usual
    if best is Way.MAPPED and costs.get(Way.STAGED, math.inf) <= GENTLE * costs[best]:
        best = Way.STAGED
    return Plan(best, costs.pop(best), costs)
