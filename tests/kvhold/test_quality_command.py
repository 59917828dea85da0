"""`kvhold quality` as users run it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.kvhold import tiny
from typer.testing import CliRunner

from kvhold.cli import app

if TYPE_CHECKING:
    from pathlib import Path

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    model = tiny.folder(folder / "model")
    text = tiny.text(folder / "text", documents=8, words=150)
    return ["quality", "--model", str(model), "--text", str(text), "--documents", "4"]


def test_figures_go_where_they_are_wanted_and_no_file_stays(
    given: list[str], tmp_path: Path
) -> None:
    sizes = ["--prefix", "64", "--suffix", "32", "--greedy-documents", "0"]
    places = ["--folder", str(tmp_path / "meanwhile"), "--out", str(tmp_path / "figures.json")]
    picture = ["--picture", str(tmp_path / "picture.png")]
    shown = RUNNER.invoke(app, [*given, *sizes, *places, *picture, "--json"])
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report == json.loads((tmp_path / "figures.json").read_bytes())
    assert report["predictions"] == 4 * 32
    assert report["settings"]["dtype"] == "float32"
    assert report["formats"]["K8/V8"]["greedy_agreeing"] == []
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", "picture.png"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "int3"], "dtype 'int3': expected float32 or bfloat16"),
        (["--documents", "6"], "6 documents in batches of 4"),
        (["--prefix", "100"], "prefixes of 100 tokens in pages of 32"),
        (["--suffix", "5000"], "documents of 5257 tokens: model takes 1024"),
        (["--documents", "40"], "the text gives"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(
    given: list[str], options: list[str], said: str, tmp_path: Path
) -> None:
    shown = RUNNER.invoke(app, [*given, *options, "--folder", str(tmp_path / "files")])
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert not (tmp_path / "files").exists()
