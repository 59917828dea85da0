"""The real model that the demonstration runs on, end to end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvhold.cli import app

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_packaged_model_answers_from_the_tiers(tmp_path: Path) -> None:
    sizes = ["--documents", "3", "--tokens", "256", "--new", "6"]
    shown = CliRunner().invoke(app, ["demo", *sizes, "--folder", str(tmp_path), "--json"])
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report["model"]["name"].startswith("SmolLM2-135M-Instruct")
    assert report["model"]["licence"] == "Apache-2.0"
    assert (report["model"]["layers"], report["model"]["kv_heads"]) == (30, 3)
    assert report["right"]
    assert report["phases"][1]["restored"] == 6
    asked, answered = report["sample"]
    assert asked.startswith("Question:")
    assert len(answered.split()) >= 2
