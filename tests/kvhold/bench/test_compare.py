"""Comparing two runs: what moved, what is noise, and what was taken on another machine."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvhold.bench.compare import as_data, compare, differing, leaves, render

BEFORE = {
    "conditions": {"cores": 2, "torch": "2.13.0"},
    "engine": {
        "pairs": [{"name": "copies", "ours": 10.0, "ratio": 1.0, "spread": [0.9, 1.2]}],
        "figures": {"idle": 0},
    },
}
AFTER = {
    "conditions": {"cores": 4, "torch": "2.13.0"},
    "engine": {
        "pairs": [{"name": "copies", "ours": 20.0, "ratio": 1.1, "spread": [0.9, 1.2]}],
        "figures": {"idle": 0},
    },
}


def test_every_number_has_a_name_and_conditions_are_no_figures() -> None:
    assert {name for name, _, _ in leaves(BEFORE)} == {
        "engine / pairs / copies / ours",
        "engine / pairs / copies / ratio",
        "engine / figures / idle",
    }


@pytest.mark.parametrize(
    ("name", "verdict"), [("ours", "moved"), ("ratio", "noise"), ("idle", "same")]
)
def test_a_figure_moved_is_noise_or_is_the_same(name: str, verdict: str) -> None:
    found = {change.name.split(" / ")[-1]: change for change in compare(BEFORE, AFTER, bound=0.05)}
    assert found[name].verdict == verdict


def test_what_moved_comes_first() -> None:
    changes = compare(BEFORE, AFTER, bound=0.05)
    assert changes[0].verdict == "moved"
    assert changes[0].ratio == 2.0


def test_other_conditions_are_said() -> None:
    conditions = differing(BEFORE, AFTER)
    assert conditions == {"cores": (2, 4)}
    changes = compare(BEFORE, AFTER, bound=0.05)
    assert as_data(changes, conditions)["conditions"] == {"cores": [2, 4]}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render(changes, conditions, everything=False))
    assert "cores: 2 / 4" in shown.get()
    assert "1 moved, 1 noise, 1 same" in shown.get()
