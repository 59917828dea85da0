"""What the measurements on a GPU share."""

import math
from pathlib import Path

import msgspec
import pytest
from tests.kvhold.bench.fake_gpu import LAYOUT, stand_in

from kvhold.bench import gpu_rig
from transfer import Copy
from transfer.cuda import H200, CopyTable, Pace, Way


def test_rounds_are_taken_in_turn_and_the_first_two_do_not_count() -> None:
    turns: list[str] = []

    def way(name: str, *times: float) -> float:
        turns.append(name)
        return times[turns.count(name) - 1]

    found = gpu_rig.rounds(3, lambda: way("a", 9, 9, 1, 2, 3), lambda: way("b", 9, 9, 5, 4, 6))
    assert found == [2, 5]
    assert "".join(turns) == "ab" * 5


def test_settings_follow_what_the_first_parts_found(tmp_path: Path) -> None:
    assert gpu_rig.Settings.of(tmp_path) == gpu_rig.Settings(table=H200)
    best = {"best": {"multiprocessors": 8, "staging": 1 << 23}}
    (tmp_path / "tune.json").write_bytes(msgspec.json.encode(best))
    made = CopyTable("here", H200.rates[:3], ((Way.DMA, 1e-6),))
    (tmp_path / "table.json").write_bytes(msgspec.json.encode({"table": made.dump()}))
    assert gpu_rig.Settings.of(tmp_path) == gpu_rig.Settings(8, 1 << 23, made)
    (tmp_path / "pace.json").write_bytes(msgspec.json.encode({"best": {"movers": 2}}))
    assert gpu_rig.Settings.of(tmp_path).pace == Pace(movers=2)


def test_copies_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stand_in(monkeypatch)
    gpu, host = gpu_rig.page_pools(LAYOUT, 8, 4)
    pages, slots = gpu_rig.scattered(gpu, 8), host.lease(4).handle
    assert sorted(pages.ids.tolist()) == list(range(8)) != pages.ids.tolist()
    bare = gpu_rig.Bare(1 << 16)
    with gpu_rig.direct(settings) as one:
        assert one.seconds(Copy(pages[:4], slots), Copy(slots, pages[4:])) > 0
        assert len(one.posting) == 1
        running = one.device._running
        assert running is not None
        assert running.signals.quiet
        assert running.signals.spin == math.inf
    assert one.device._running is None
    assert bare.seconds(1 << 16, outward=True) > 0
    assert bare.both(1 << 16) > 0
    bare.close()
    assert gpu_rig.gigabytes(5e9, 2) == 2.5
