"""Every figure of the host's part is there, and is a time."""

from kvhold.bench import cuda_host


def test_phases_and_loops() -> None:
    found = cuda_host.phases(5)
    assert set(found) == set(cuda_host.PHASES)
    assert all(0 < value < 1e5 for value in found.values())
    for row in cuda_host.loops(20).values():
        assert row["call"] > 0
        assert row["loop"] > 0
        assert row["process"] > 0
        assert row["hop"] > 0
        assert row["deep"] > 0


def test_posting_by_size_and_way() -> None:
    rows = cuda_host.posting(3)
    assert {row["MiB"] for row in rows} == {6, 12, 96, 128}
    for row in rows:
        assert 0 < row["first_hot"] <= row["posted_hot"]
        assert 0 < row["first_cold"] <= row["posted_cold"]
        assert row["commands"] >= 2
