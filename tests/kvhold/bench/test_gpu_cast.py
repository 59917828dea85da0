"""The cast's part: which sizes and scopes, and what the rate is counted in."""

from contextlib import contextmanager
from typing import Any

import pytest
from tests.kvhold.bench.fake_gpu import MIB, stand_in

from kvhold.bench import gpu_cast

pytest.importorskip("triton")


def test_rates_count_what_the_pages_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do not run here: a way that takes half as long as the link is twice as fast."""
    settings = stand_in(monkeypatch, gpu_cast)
    monkeypatch.setattr(gpu_cast, "page_layout", lambda _layers: _Each)
    posted: list[Any] = []

    class Still:
        def seconds(self, work: Any) -> float:
            posted.append(work)
            return 1.0

    @contextmanager
    def still(_settings: object, **_options: Any) -> Any:
        yield Still()

    def rounds(_count: int, _link: Any, *ways: Any) -> list[float]:
        return [2.0, *(way() for way in ways)]

    monkeypatch.setattr(gpu_cast, "direct", still)
    monkeypatch.setattr(gpu_cast, "rounds", rounds)
    found = gpu_cast.measure(True, settings)
    assert {row["scope"] for row in found["rows"]} == {"page_head", "tensor"}
    for row in found["rows"]:
        assert row["over_link"] == 2
        assert row["staged"] == pytest.approx(row["MiB"] * MIB / 1e9)
    assert all(work.nbytes > 0 for work in posted)


class _Each:
    nbytes = 32 * MIB
