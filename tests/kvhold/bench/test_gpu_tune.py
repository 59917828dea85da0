"""Tuning picks what was fastest, and fits rates and costs."""

from typing import Any

import pytest
from tests.kvhold.bench.fake_gpu import stand_in

from kvhold.bench import gpu_rig, gpu_tune
from kvhold.bench.cuda_free import free_pools
from transfer import BlockLayout, Copy
from transfer.cuda import CopyTable, Way


class Machine:
    """Takes 50 us and a byte each nanosecond."""

    def __init__(self, rest: float) -> None:
        self.rest = rest

    def seconds(self, work: Copy) -> float:
        return self.rest + work.nbytes / 1e9


def test_a_rate_and_what_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, gpu_tune)
    monkeypatch.setattr(gpu_tune, "SMALL", 1 << 16)
    monkeypatch.setattr(gpu_tune, "SIZES", (1 << 16, 1 << 19))
    layout = BlockLayout.raw(1 << 16)
    pages, slots = free_pools(layout, 16)
    ends = pages.lease(16).handle, slots.lease(16).handle
    devices: Any = {Way.STAGED: Machine(5e-5), Way.DMA: Machine(1e-5)}
    rates = gpu_tune._rates(devices, ends, 1 << 16, outward=True, count=3)
    assert {rate.way: rate.rate for rate in rates} == pytest.approx(
        {Way.STAGED: 1e9, Way.DMA: 1e9}, rel=1e-6
    )
    rest, spreads = gpu_tune._besides(devices, ends, rates, count=3)
    assert [(r.way, r.nbytes) for r in rest] == [
        (way, size) for size in (1 << 16, 1 << 19) for way in (Way.STAGED, Way.DMA)
    ]
    assert [r.seconds for r in rest] == pytest.approx([5e-5, 1e-5] * 2, rel=1e-3)
    assert spreads == [0, 0, 0, 0]


def test_the_best_of_the_staged_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stand_in(monkeypatch, gpu_tune)
    monkeypatch.setattr(gpu_tune, "UNITS", (8, 16))
    monkeypatch.setattr(gpu_tune, "AREAS", (2, 4))
    found = gpu_tune.measure(True, settings)
    staged = [row for row in found["rows"] if row["way"] == "STAGED"]
    assert len(staged) == 4
    top = max(row["mean of the large ones"] for row in staged)
    (best,) = [row for row in staged if row["mean of the large ones"] == top]
    assert found["best"] == {name: best[name] for name in ("multiprocessors", "staging")}
    assert all(set(row["fractions"]) == set(staged[0]["fractions"]) for row in found["rows"])
    assert len(staged[0]["fractions"]) == 6


def test_the_table_can_be_planned_by(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stand_in(monkeypatch, gpu_tune)
    monkeypatch.setattr(gpu_tune, "SMALL", 1 << 23)
    monkeypatch.setattr(gpu_tune, "LARGE", 1 << 24)
    monkeypatch.setattr(gpu_rig, "fill", lambda _pool: None)
    found = CopyTable.parse(gpu_tune.table(True, settings)["table"])
    ways = {rate.way for rate in found.rates}
    assert {Way.DMA, Way.BATCH, Way.MAPPED} <= ways
    assert all(seconds > 0 for _, seconds in found.base)
    assert {rate.outward for rate in found.rates} == {True, False}
    assert {rest.way for rest in found.besides} == ways
    assert found.noise >= 0
