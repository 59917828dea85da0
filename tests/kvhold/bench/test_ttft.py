"""Time to the first token: rounds alternate, and the break-even length lies where the ratio is 1."""

from __future__ import annotations

import pytest

from kvhold.bench.ttft import Point, Restored, as_data, break_even, measure
from kvhold.bench.ttft_command import CPU_LENGTHS, GPU_LENGTHS, parse_lengths

pytestmark = pytest.mark.anyio


def point(length: int, ratio: float) -> Point:
    return Point(length, ratio, 1.0, 0.5, ratio, (ratio, ratio))


async def test_the_break_even_is_between_the_last_slower_and_the_first_faster() -> None:
    assert break_even([point(256, 0.5), point(1024, 2.0)]) == pytest.approx(512)
    assert break_even([point(1024, 2.0), point(256, 0.5)]) == pytest.approx(512)
    assert break_even([point(256, 1.5)]) == 256
    assert break_even([point(256, 0.5)]) is None
    assert break_even([]) is None


class Scripted:
    """A rig whose times are known."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    async def recompute(self, length: int) -> float:
        self.calls.append(("recompute", length))
        return length / 100

    async def restore(self, length: int) -> Restored:
        self.calls.append(("restore", length))
        return Restored(fetch=0.5, suffix=1.5)


async def test_rounds_alternate_and_the_first_is_not_counted() -> None:
    rig, done = Scripted(), []
    points = await measure(
        rig,  # type: ignore[arg-type] # as much of a rig as is asked for
        [100, 400],
        rounds=2,
        progress=lambda: done.append(1),
    )
    assert rig.calls[:6] == [("recompute", 100), ("restore", 100)] * 3
    assert [p.ratio for p in points] == [0.5, 2.0]
    assert [p.fetch for p in points] == [0.5, 0.5]
    assert len(done) == 2
    assert as_data(points)["break_even"] == pytest.approx(200)


async def test_lengths_are_whole_pages() -> None:
    assert parse_lengths("", gpu=False) == CPU_LENGTHS
    assert parse_lengths("", gpu=True) == GPU_LENGTHS
    assert parse_lengths("64,128", gpu=False) == (64, 128)
    with pytest.raises(ValueError, match="expected multiples of"):
        parse_lengths("65", gpu=False)
