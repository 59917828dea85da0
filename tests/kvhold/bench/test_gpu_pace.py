"""Settings are tried side by side, each proven to carry bytes first."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kvhold.bench.fake_gpu import LAYOUT, stand_in

from kvhold.bench import gpu_pace
from transfer.cuda import Pace


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = stand_in(monkeypatch, gpu_pace)
    trials = {"default": Pace(), "two movers": Pace(movers=2), "ahead": Pace(ahead=1 << 20)}
    monkeypatch.setattr(gpu_pace, "TRIALS", trials)
    return made


def test_every_setting_is_measured(settings: Any) -> None:
    found = gpu_pace.measure(True, settings)
    names = [row["pace"] for row in found["rows"]]
    assert names == ["default", "two movers", "ahead"]
    for row in found["rows"]:
        assert len(row["fractions"]) == 7
        assert all(value > 0 for value in row["fractions"].values())
        assert row["problem"] == ""
    assert Pace(**found["best"]) in gpu_pace.TRIALS.values()
    assert len(found["lines"]) == 4


def test_the_drivers_own_calls_are_tried_beside_the_setting_at_hand(settings: Any) -> None:
    chosen = replace(settings, pace=Pace(movers=2))
    found = gpu_pace.bare(True, chosen)
    paces = [(row["pace"], row["bare"], row["movers"]) for row in found["rows"]]
    assert paces == [("default", False, 2), ("bare", True, 2)]


def test_a_setting_that_damages_bytes_is_never_taken(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = gpu_pace.carries

    def carries(one: Any, near: Any, far: Any) -> bool:
        right = true(one, near, far)
        assert right
        return bool(one.device._pace.movers == 1)

    monkeypatch.setattr(gpu_pace, "carries", carries)
    found = gpu_pace.measure(True, settings)
    (bad,) = [row for row in found["rows"] if row["problem"]]
    assert bad["pace"] == "two movers"
    assert bad["fractions"] == {}
    assert found["best"]["movers"] == 1


def test_bytes_that_do_not_come_back_are_seen(settings: Any) -> None:
    from kvhold.bench.gpu_rig import direct, page_pools, scattered

    gpu, host = page_pools(LAYOUT, 8, 4)
    near, far = scattered(gpu, 8), host.lease(4).handle
    with direct(settings) as one:
        assert gpu_pace.carries(one, near, far)
        near[4].tensor("key", 0, write=True).view(torch.int16).add_(1)
        one.seconds = lambda *_: 0.0  # type: ignore[method-assign]
        assert not gpu_pace.carries(one, near, far)


@pytest.mark.parametrize(("other", "taken"), [(0.95, "default"), (1.005, "default"), (1.02, "new")])
def test_the_default_stays_unless_another_is_surely_better(other: float, taken: str) -> None:
    def row(name: str, value: float, problem: str = "") -> dict[str, Any]:
        return {"pace": name, "fractions": {"a": value, "b": value}, "problem": problem}

    rows = [row("default", 1.0), row("new", other), row("broken", 9.0, "damage")]
    assert gpu_pace.choose(rows)["pace"] == taken
    with pytest.raises(RuntimeError, match="no setting carries bytes"):
        gpu_pace.choose(rows[2:])
