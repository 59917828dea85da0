"""Pictures are drawn from the same data that `--json` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvhold import plots

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


def phase(name: str, wrong: int) -> dict[str, object]:
    return {
        "name": name,
        "first_ms": 12.0,
        "restored": 2,
        "in_part": 1,
        "computed": 3,
        "wrong": wrong,
    }


def test_the_demonstration_as_a_picture(tmp_path: Path) -> None:
    report = {
        "phases": [phase("never offloaded", 0), phase("the tiers", 1)],
        "model": {"name": "tiny"},
        "engine": "kvhold",
    }
    plots.demo_picture(report, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    report = {"phases": [phase("x", 0)], "model": {"name": "tiny"}, "engine": "kvhold"}
    with pytest.raises(OSError, match="No such file"):
        plots.demo_picture(report, tmp_path / "none" / "demo.png")


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plots.available()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not plots.available()
