"""Figures of the attention measurement: what a row says."""

import pytest

from kvhold.bench.attention_time import GROUPS, SHAPES, Figure


def test_a_row_has_bandwidth_and_its_share_of_the_copy() -> None:
    figure = Figure("kernel", "64 x 4096, group 4", 200.0, 1.0, 800_000_000)
    row = figure.row(5e12)
    assert row["GB/s"] == 4000
    assert row["of_copy"] == pytest.approx(0.8)


def test_the_shapes_are_larger_than_any_cache() -> None:
    for batch, tokens in SHAPES:
        assert batch * tokens * 8 * 128 * 3 > 4 * (60 << 20)
    assert set(GROUPS) == {1, 4, 8}
