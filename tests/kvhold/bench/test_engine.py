"""The engine's benchmark: both sides really do the same work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvhold.bench import engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "COUNT", 4)
    monkeypatch.setattr(engine, "LARGE", 1 << 20)
    monkeypatch.setattr(engine.Small, "each", 3)


@pytest.mark.parametrize("way", ["bare", "batch", "single"])
def test_large_copies_arrive(way: str) -> None:
    work = engine.Large()
    assert getattr(work, way)() > 0
    for src, dst in zip(work._src, work._dst, strict=True):
        assert bytes(src.view()) == bytes(dst.view())


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("way", ["ours", "theirs"])
def test_small_copies_arrive(backend: str, way: str) -> None:
    work = engine.Small(backend)
    work._src[0].view(write=True)[:] = b"\x55" * engine.SMALL
    assert getattr(work, way)() > 0
    for src, dst in zip(work._src, work._dst, strict=True):
        assert bytes(src.view()) == bytes(dst.view())


@pytest.mark.parametrize(("write", "read"), [("write", "bare_read"), ("bare_write", "read")])
def test_files_hold_what_the_other_side_wrote(tmp_path: Path, write: str, read: str) -> None:
    work = engine.Files(tmp_path)
    before = [bytes(block.view()) for block in work.blocks]
    assert getattr(work, write)() > 0
    for block in work.blocks:
        block.view(write=True)[:16] = b"overwritten here"
    assert getattr(work, read)() > 0
    assert [bytes(block.view()) for block in work.blocks] == before


def test_gaps_are_measured_on_both_sides() -> None:
    found = engine.loop_gaps(runs=1)
    assert found["engine p99 (µs)"] > 0
    assert found["threads p99 (µs)"] > 0


def test_an_idle_engine_does_not_wake_up() -> None:
    assert engine.idle_wakeups(seconds=0.5) == 0
