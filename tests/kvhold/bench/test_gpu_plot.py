"""The picture is drawn of whatever parts there are."""

from pathlib import Path
from typing import Any

import pytest

from kvhold.bench import gpu_plot

pytest.importorskip("matplotlib")

PAGES = [
    {
        "layers": layers,
        "direction": direction,
        "MiB": size,
        "ours": 50.0,
        "link": 55.0,
        "ways": {"STAGED": 50.0, "MAPPED": 48.0, "BATCH": 40.0},
    }
    for layers in (32, 64)
    for direction in ("out", "in", "out*")
    for size in (12, 96)
]
FRAGMENTS = [
    {"KiB": kib, "MiB": 64, "slots": slots, "direction": direction, "chosen": 50.0}
    for kib in (4, 64)
    for slots in ("row", "apart")
    for direction in ("out", "in")
]
CAST = [
    {"MiB": size, "scope": "page_head", "direction": direction, "over_link": 1.3}
    for size in (96, 256)
    for direction in ("out", "in")
]


@pytest.mark.parametrize("parts", [{}, {"pages": PAGES, "fragments": FRAGMENTS, "cast": CAST}])
def test_a_picture(parts: dict[str, Any], tmp_path: Path) -> None:
    report = {name: {"figures": {"rows": rows}} for name, rows in parts.items()}
    report["pages" if not parts else "two_way"] = {"problem": "stopped after 60 s"}  # type: ignore[dict-item]
    gpu_plot.draw(report, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
