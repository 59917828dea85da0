"""Every figure of the copies is there, at small sizes."""

import pytest
from tests.kvhold.bench.fake_gpu import stand_in

from kvhold.bench import gpu_copy


def test_pages_by_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stand_in(monkeypatch, gpu_copy)
    monkeypatch.setattr(gpu_copy, "rounds", lambda _count, *ways: [way() for way in ways])
    found = gpu_copy.pages(False, settings)
    assert {row["direction"] for row in found["rows"]} == {"out", "in", "out*", "in*"}
    for row in found["rows"]:
        assert row["link"] > 0
        assert row["fraction"] == pytest.approx(row["ours"] / row["link"])
        assert {"STAGED", "MAPPED", "BATCH"} <= set(row["ways"])
    assert len(found["lines"]) == len(found["rows"])


def test_both_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stand_in(monkeypatch, gpu_copy)
    found = gpu_copy.two_way(True, settings)
    assert [row["MiB"] for row in found["rows"]] == [96, 256, 1024]
    assert all(row["fraction"] > 0 for row in found["rows"])


def test_small_pieces_against_the_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stand_in(monkeypatch, gpu_copy)
    found = gpu_copy.fragments(True, settings)
    assert {row["KiB"] for row in found["rows"]} == {4, 8, 16, 24, 28, 32, 48, 64}
    assert all(row["of_64"] == 1 for row in found["rows"] if row["KiB"] == 64)
