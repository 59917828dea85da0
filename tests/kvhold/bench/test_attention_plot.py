"""The picture of a record: the faster kernel of each type, and a file."""

from pathlib import Path
from typing import Any

import pytest

from kvhold.bench.attention_plot import best, draw

TIMES: list[dict[str, Any]] = [
    {"what": "FlashInfer BF16 cores", "shape": "1 x 8, group 4", "us": 20.0},
    {"what": "FlashInfer BF16 tensor", "shape": "1 x 8, group 4", "us": 10.0},
    {"what": "K16/V8 auto: triton", "shape": "1 x 8, group 4", "us": 8.0},
]


def test_the_faster_kernel_is_shown_and_what_is_missing_is_nothing() -> None:
    assert best(TIMES, "1 x 8, group 4", "FlashInfer BF16") == 10.0
    assert best(TIMES, "1 x 8, group 4", "FlashInfer FP8") == 0
    assert best(TIMES, "1 x 8, group 8", "FlashInfer BF16") == 0


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prefill = [{"what": "K16/V8 prefill triton", "shape": "2 over 3", "us": 9.0}]
    picture = tmp_path / "picture.png"
    draw({"time": TIMES, "prefill": prefill, "conditions": [{"device": "H200"}]}, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
