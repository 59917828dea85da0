"""The table of rates, and the choice by it."""

import json
from pathlib import Path
from random import Random

import pytest

from transfer._cuda_plan import GENTLE, H200, LEAST, Besides, CopyTable, Rate, Way, choose

TABLE = CopyTable(
    "made up",
    (
        Rate(Way.BATCH, outward=True, fragment=1000, rate=1e9),
        Rate(Way.BATCH, outward=True, fragment=3000, rate=3e9),
        Rate(Way.STAGED, outward=True, fragment=1000, rate=2e9),
    ),
    ((Way.STAGED, 1e-3),),
)


BESIDES = (
    Besides(Way.STAGED, outward=True, nbytes=1000, seconds=1e-6),
    Besides(Way.STAGED, outward=True, nbytes=3000, seconds=5e-6),
)


def seconds(way: Way, nbytes: int, fragment: float) -> float:
    return TABLE.seconds(way, nbytes, fragment, outward=True)


def test_time_follows_the_measured_sizes() -> None:
    assert seconds(Way.BATCH, 6000, 1000) == pytest.approx(6e-6)
    assert seconds(Way.BATCH, 6000, 3000) == pytest.approx(2e-6)
    # Between them a piece takes what lies between: 1 us both at 1000 and at 3000 bytes.
    assert seconds(Way.BATCH, 6000, 2000) == pytest.approx(3e-6)
    # Below the smallest a piece takes as long as the smallest; above the largest, the same rate.
    assert seconds(Way.BATCH, 6000, 500) == pytest.approx(12e-6)
    assert seconds(Way.BATCH, 6000, 6000) == pytest.approx(2e-6)
    assert seconds(Way.STAGED, 2000, 1000) == pytest.approx(1e-3 + 1e-6)


def test_what_a_copy_costs_besides_goes_by_its_size() -> None:
    table = CopyTable("made up", TABLE.rates, TABLE.base, BESIDES)
    found = [table.rest(Way.STAGED, n, outward=True) for n in (500, 1000, 2000, 3000, 9000)]
    assert found == pytest.approx([1e-6, 1e-6, 3e-6, 5e-6, 5e-6])
    # Not measured in that direction, or not at all: the one figure of the way.
    assert table.rest(Way.STAGED, 2000, outward=False) == 1e-3
    assert table.rest(Way.BATCH, 2000, outward=True) == 0


MACHINE = (  # bytes per second and seconds besides, as they really are
    {Way.STAGED: (55e9, 80e-6), Way.MAPPED: (52e9, 70e-6), Way.BATCH: (40e9, 150e-6)},
    {Way.STAGED: (20e9, 300e-6), Way.MAPPED: (22e9, 90e-6), Way.BATCH: (24e9, 60e-6)},
)


def noisy(true: dict[Way, tuple[float, float]], noise: float, chance: Random) -> CopyTable:
    """A table of that machine as a bad minute shows it."""
    rates = tuple(
        Rate(way, outward, 1 << 15, rate * (1 + chance.uniform(-noise, noise)))
        for way, (rate, _) in true.items()
        for outward in (True, False)
    )
    besides = tuple(
        Besides(way, outward, size << 20, rest * (1 + chance.uniform(-5 * noise, 5 * noise)))
        for way, (_, rest) in true.items()
        for outward in (True, False)
        for size in (4, 32, 256)
    )
    return CopyTable("noisy", rates, (), besides, noise)


@pytest.mark.parametrize("true", MACHINE, ids=["like the H200", "quite another"])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("size", [4, 12, 48, 96, 256, 1024])
def test_noise_never_costs_more_than_itself(
    true: dict[Way, tuple[float, float]], noise: float, size: int
) -> None:
    """The way taken is at most so much slower than the best one, however the minute was."""
    nbytes = size << 20
    real = {way: rest + nbytes / rate for way, (rate, rest) in true.items()}
    gentle = GENTLE if Way.STAGED in real else 1
    for seed in range(40):
        plan = choose(
            noisy(true, noise, Random(seed)),
            outward=bool(seed % 2),
            nbytes=nbytes,
            page_fragment=1 << 15,
            host_fragment=1 << 15,
            ways=tuple(true),
        )
        slack = (1 + 2 * noise) * max(LEAST, 1 + noise) * (1 + 8 * noise)
        worth = gentle if plan.way is Way.STAGED else 1
        assert real[plan.way] <= min(real.values()) * slack * worth


def test_the_usual_way_stays_unless_another_is_surely_better() -> None:
    """H200 stages 256 MiB of 32 KiB pages; MAPPED measured 2 % cheaper is no reason to change."""

    def way(mapped: float, noise: float = 0.0) -> Way:
        rates = tuple(
            Rate(found, outward=True, fragment=1 << 15, rate=rate)
            for found, rate in ((Way.STAGED, 50e9), (Way.BATCH, mapped))
        )
        table = CopyTable("here", rates, (), (), noise)
        return choose(
            table,
            outward=True,
            nbytes=256 << 20,
            page_fragment=1 << 15,
            host_fragment=2 << 20,
            ways=(Way.STAGED, Way.BATCH),
        ).way

    assert [way(rate * 1e9) for rate in (40, 51, 51.4, 52)] == [Way.STAGED] * 3 + [Way.BATCH]
    assert way(52e9, noise=0.05) is Way.STAGED
    assert way(54e9, noise=0.05) is Way.BATCH


def test_a_way_that_was_not_measured_is_never_taken() -> None:
    assert seconds(Way.MAPPED, 1, 1) == float("inf")
    assert TABLE.seconds(Way.BATCH, 1, 1, outward=False) == float("inf")


def test_the_cheapest_of_the_possible_ways() -> None:
    def way(nbytes: int, *ways: Way) -> Way:
        plan = choose(
            TABLE, outward=True, nbytes=nbytes, page_fragment=500, host_fragment=1000, ways=ways
        )
        assert plan.others.keys() == set(ways) - {plan.way}
        assert all(plan.seconds <= LEAST * other for other in plan.others.values())
        return plan.way

    assert way(10_000, Way.BATCH, Way.STAGED) is Way.BATCH
    assert way(10_000_000, Way.BATCH, Way.STAGED) is Way.STAGED
    assert way(10_000_000, Way.BATCH) is Way.BATCH


def test_a_table_survives_its_text(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(H200.dump(), encoding="utf-8")
    assert CopyTable.read(file) == H200
    more = CopyTable("here", H200.rates, H200.base, BESIDES, 0.02)
    assert CopyTable.parse(more.dump()) == more
    # One that was written before there were any.
    old = json.loads(more.dump())
    del old["besides"], old["noise"]
    assert CopyTable.parse(json.dumps(old)) == CopyTable("here", H200.rates, H200.base)
    assert CopyTable.parse(TABLE.dump()).seconds(Way.BATCH, 6000, 2000, outward=True) == seconds(
        Way.BATCH, 6000, 2000
    )


def test_small_pieces_are_not_left_to_the_engine() -> None:
    """Codes of values, 16 KiB a piece, fall under the cliff of host-to-GPU copies."""
    plan = choose(
        H200,
        outward=False,
        nbytes=256 << 20,
        page_fragment=16 << 10,
        host_fragment=1 << 20,
        ways=(Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED),
    )
    assert plan.way in {Way.STAGED, Way.MAPPED}
    assert plan.others[Way.BATCH] > 2 * plan.seconds


@pytest.mark.parametrize("outward", [True, False])
def test_staging_is_worth_a_little_since_it_is_gentle(outward: bool) -> None:
    def plan(nbytes: int, host_fragment: int, *ways: Way) -> Way:
        return choose(
            H200,
            outward=outward,
            nbytes=nbytes,
            page_fragment=32 << 10,
            host_fragment=host_fragment,
            ways=ways,
        ).way

    both = (Way.STAGED, Way.MAPPED)
    for size in (12, 96, 256):
        assert plan(size << 20, 2 << 20, *both) is Way.STAGED
    # Far dearer: tiny copies, and slots that lie apart in small pieces.
    assert plan(1 << 20, 2 << 20, *both) is Way.MAPPED
    assert plan(256 << 20, 16 << 10, *both) is Way.MAPPED
    assert plan(256 << 20, 2 << 20, Way.MAPPED) is Way.MAPPED
