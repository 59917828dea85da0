"""Pairs: ratios come pair by pair, and the noise between equals is reported beside them."""

from __future__ import annotations

from itertools import cycle

import pytest
from rich.console import Console

from kvhold.bench import pairs


def test_the_ratio_is_the_median_over_rounds_of_both_of_ours() -> None:
    ours = cycle([1.0, 3.0])  # A and A' of each round: 1 and 3 seconds, 2 on average
    found = pairs.compare("x", lambda: next(ours), lambda: 4.0, amount=8, unit="GB/s", rounds=5)
    assert found.ratio == 2.0
    assert found.theirs == 2.0
    assert found.ours == 4.0
    assert found.spread == (3.0, 3.0)
    assert found.rounds == 5


def test_the_first_round_is_not_counted() -> None:
    calls = iter([100.0, 100.0] + [1.0] * 100)
    found = pairs.compare("x", lambda: next(calls), lambda: 1.0, amount=1, unit="n/s", rounds=3)
    assert found.ratio == 1.0


@pytest.mark.parametrize(("ratio", "met"), [(0.94, False), (0.95, True)])
def test_a_target_is_met_or_not(ratio: float, met: bool) -> None:
    pair = pairs.Pair("x", 1, 1, "GB/s", ratio, (1, 1), 0.95, 3)
    assert pair.met is met
    assert pairs.plain([pair])[0]["met"] is met
    console = Console(width=160)
    with console.capture() as shown:
        console.print(pairs.table_of("title", [pair]))
    assert ("✓" in shown.get()) is met


def test_percentiles_take_the_nearest_rank() -> None:
    assert pairs.percentile([5, 1, 3], 50) == 3
    assert pairs.percentile([5, 1, 3], 0) == 1
    assert pairs.percentile([5, 1, 3], 100) == 5


def test_conditions_name_the_machine() -> None:
    found = pairs.conditions()
    assert found["cores"] >= 1
    assert type(found["torch"]) is str
    assert {"date", "python", "kernel", "processor"} <= found.keys()
