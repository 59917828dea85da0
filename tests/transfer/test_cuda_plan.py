"""The table of rates, and the choice by it."""

from pathlib import Path

import pytest

from transfer._cuda_plan import H200, CopyTable, Rate, Way, choose

TABLE = CopyTable(
    "made up",
    (
        Rate(Way.BATCH, outward=True, fragment=1000, rate=1e9),
        Rate(Way.BATCH, outward=True, fragment=3000, rate=3e9),
        Rate(Way.STAGED, outward=True, fragment=1000, rate=2e9),
    ),
    ((Way.STAGED, 1e-3),),
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


def test_a_way_that_was_not_measured_is_never_taken() -> None:
    assert seconds(Way.MAPPED, 1, 1) == float("inf")
    assert TABLE.seconds(Way.BATCH, 1, 1, outward=False) == float("inf")


def test_the_cheapest_of_the_possible_ways() -> None:
    def way(nbytes: int, *ways: Way) -> Way:
        plan = choose(
            TABLE, outward=True, nbytes=nbytes, page_fragment=500, host_fragment=1000, ways=ways
        )
        assert plan.others.keys() == set(ways) - {plan.way}
        assert all(plan.seconds <= other for other in plan.others.values())
        return plan.way

    assert way(10_000, Way.BATCH, Way.STAGED) is Way.BATCH
    assert way(10_000_000, Way.BATCH, Way.STAGED) is Way.STAGED
    assert way(10_000_000, Way.BATCH) is Way.BATCH


def test_a_table_survives_its_text(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(H200.dump(), encoding="utf-8")
    assert CopyTable.read(file) == H200
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
