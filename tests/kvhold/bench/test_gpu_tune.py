"""Tuning picks what was fastest, and fits rates and costs."""

import pytest
from tests.kvhold.bench.fake_gpu import stand_in

from kvhold.bench import gpu_rig, gpu_tune
from transfer import Copy
from transfer.cuda import CopyTable, Way


def test_a_rate_and_what_is_left_over() -> None:
    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    part, whole = Sized(1000), Sized(9000)

    def seconds(work: Copy) -> float:
        return 5e-6 + work.nbytes / 1e9

    rate, rest = gpu_tune._fit(part, whole, seconds, 3)  # type: ignore[arg-type]
    assert rate == pytest.approx(1e9)
    assert rest == pytest.approx(5e-6)


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
