"""What is kept of measured runs: joined, summed up, and put into the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvhold.bench.attention_plot import best
from kvhold.bench.attention_record import END, START, app, join, page_of, place, text_of

CASE = "NHD g4 d128 p16 bfloat16 e4m3fn head decode eager"


def cell(backend: str, verdict: str, out: float = 1e-3) -> dict[str, Any]:
    line = {"cell": f"{backend} {CASE}", "verdict": verdict}
    return line | ({"out": out, "lse": 1e-6} if verdict == "right" else {"why": "reasons"})


def run(cells: list[dict[str, Any]], micros: float) -> dict[str, list[dict[str, Any]]]:
    shape = "64 x 4096, group 4"
    return {
        "conditions": [{"device": "H200", "date": f"day {micros}"}],
        "cells": cells,
        "copy": [{"GB/s": 4000}],
        "time": [
            {"what": "FlashInfer BF16 cores", "shape": shape, "us": 380.0, "of_copy": 0.6},
            {"what": "FlashInfer BF16 tensor", "shape": shape, "us": 250.0, "of_copy": 1.0},
            {"what": "K16/V8 auto: triton", "shape": shape, "us": micros, "of_copy": 0.93},
        ],
        "prefill": [
            {"what": "FlashInfer BF16 prefill fa2", "shape": "2 over 3", "us": 30.0},
            {"what": "FlashInfer BF16 prefill fa3", "shape": "2 over 3", "us": 20.0},
            {"what": "K16/V8 prefill triton", "shape": "2 over 3", "us": 25.0},
        ],
        "controls": [
            cell("triton", "right") | {"damage": "none"},
            {"cell": "x", "verdict": "wrong", "out": 0.5, "damage": "key"},
            {"cell": "y", "verdict": "right", "out": 0.001, "damage": "value"},
        ],
    }


FIRST = run([cell("triton", "right", 2e-3), cell("flashinfer", "wrong")], 230.0)
SECOND = run([cell("triton", "right", 1e-3), cell("flashinfer", "refused")], 203.0)


def test_later_runs_replace_what_they_measured_again() -> None:
    record = join([FIRST, SECOND])
    assert [c["date"] for c in record["conditions"]] == ["day 230.0", "day 203.0"]
    assert (record["combinations"], record["computed by a backend"]) == (1, 1)
    assert record["wrong"] == []
    rows = {row["backend"]: row for row in record["sweep"]}
    assert rows["triton"]["right"] == 1
    assert rows["triton"]["out"] == 1e-3
    assert rows["flashinfer"]["refused"] == 1
    assert best(record["time"], "64 x 4096, group 4", "K16/V8 auto") == 203.0
    assert best(record["time"], "64 x 4096, group 4", "FlashInfer BF16") == 250.0
    only = join([FIRST])
    assert [line["why"] for line in only["wrong"]] == ["reasons"]
    assert json.loads(text_of(only)) == only


def test_the_page_says_what_was_measured_and_against_the_fastest() -> None:
    page = page_of(join([FIRST, SECOND]))
    assert "1 combinations, 1 of them right" in page
    assert "| `flashinfer` | 0 | 1 | 0 | 0.00e+00 |" in page
    assert "1 of 2 show, the smallest with an error of 5.00e-01" in page
    assert "| 64 x 4096, group 4 | 380.0 | 250.0 |  |  | 203.0 | `triton` | 0.93 |" in page
    assert "| 2 over 3 | K16/V8 prefill triton | 25.0 | 0.80 |" in page


def test_the_page_says_whether_fa3_is_missing_and_why() -> None:
    assert "FA3 is missing: these runs did not ask for it." in page_of(join([FIRST]))
    late = {"state": "missing", "reason": "not built within 60 s: 2 of 7 objects"}
    assert "FA3 is missing: not built within 60 s: 2 of 7 objects." in page_of(
        join([{**FIRST, "fa3": [late]}])
    )
    there = {"state": "compared", "build_s": 101.2, "module": "x_sm90"}
    found = join([{**FIRST, "fa3": [late, there]}])
    assert "FA3 was built in 101 s as `x_sm90`." in page_of(found)


def test_ways_to_join_splits_are_a_table_of_their_own() -> None:
    row = {"shape": "1 x 9, group 1", "what": "cores", "us": 99.1, "of_copy": 0.94, "apart": "0"}
    page = page_of(join([{**FIRST, "merge": [row]}]))
    assert "| 1 x 9, group 1 | cores | 99.1 | 0.940 | 0 |" in page
    assert "by how splits are joined" not in page_of(join([FIRST]))


def test_the_page_is_replaced_in_its_place() -> None:
    page = f"before\n{START}\nold\n{END}\nafter\n"
    once = place(page, "new")
    assert once == f"before\n{START}\n\nnew\n\n{END}\nafter\n"
    assert place(once, "new") == once
    with pytest.raises(ValueError, match="in the page"):
        place("nothing", "new")


def test_one_command_writes_record_picture_and_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "attention.md").write_text(f"{START}{END}")
    (tmp_path / "run.json").write_text(json.dumps(FIRST))
    made = CliRunner().invoke(app, [str(tmp_path / "run.json"), "--docs", str(tmp_path)])
    assert made.exit_code == 0, made.output
    record = json.loads((tmp_path / "benchmarks/attention-h200.json").read_text())
    assert record == join([FIRST])
    assert (tmp_path / "benchmarks/attention-h200.png").stat().st_size > 10_000
    assert "Controls" in (tmp_path / "attention.md").read_text()
