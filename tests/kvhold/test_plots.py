"""Pictures: real PNG files that show each figure, drawn from the data that `--json` prints."""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any

import pytest
from matplotlib import image
from tests.kvhold import reports

from kvhold import plots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Draw = Callable[[dict[str, Any], Path], None]

CASES = [
    (plots.demo_picture, reports.demo(), (plots.GREEN, plots.GREY, plots.RED)),
    (plots.quality_picture, reports.quality(), (plots.GREEN, plots.RED, plots.AMBER)),
    (plots.ttft_picture, reports.ttft(), (plots.GREEN, plots.GREY)),
]


def colours(path: Path) -> set[str]:
    """The colours of a picture that cover more than a few pixels."""
    data = (image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    counts: dict[str, int] = {}
    for red, green, blue in data.tolist():
        name = f"#{red:02x}{green:02x}{blue:02x}"
        counts[name] = counts.get(name, 0) + 1
    return {name for name, count in counts.items() if count > 20}


@pytest.mark.parametrize(("draw", "report", "expected"), CASES)
def test_a_picture_shows_what_was_measured(
    draw: Draw, report: dict[str, Any], expected: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    draw(report, path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width > height > 200
    assert set(expected) <= colours(path)


def test_other_figures_give_another_picture(tmp_path: Path) -> None:
    report = reports.quality()
    plots.quality_picture(report, tmp_path / "one.png")
    report["formats"]["K8/V8"]["kl"]["mean"] *= 0.95
    plots.quality_picture(report, tmp_path / "other.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "other.png").read_bytes()


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        plots.ttft_picture(reports.ttft(), tmp_path / "nowhere" / "picture.png")


def test_the_library_keeps_no_figure(tmp_path: Path) -> None:
    from matplotlib import pyplot as plt

    plots.demo_picture(reports.demo(), tmp_path / "picture.png")
    assert plt.get_fignums() == []


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plots.available()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plots.available()
