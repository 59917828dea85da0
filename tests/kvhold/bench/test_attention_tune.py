"""Variants that are timed against each other."""

from kvhold.bench.attention_tune import WIDEN_ROWS, _line


def test_lines_are_plain_figures() -> None:
    line = _line("triton", "64 x 4096", 230.04, 1.26)
    assert line == {
        "what": "triton",
        "shape": "64 x 4096",
        "us": 230.0,
        "spread_us": 1.3,
        "kv_heads": 8,
    }
    assert len(set(WIDEN_ROWS)) == len(WIDEN_ROWS)
