"""The command as users run it: what it prints, its exit status, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.kvhold import tiny
from typer.testing import CliRunner

from kvhold.cli import app
from tiers import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

RUNNER = CliRunner()
SMALL = ("--documents", "2", "--tokens", "128", "--new", "4", "--tasks", "2")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A model and text, as options."""
    folder = tmp_path_factory.mktemp("given")
    model = tiny.folder(folder / "model")
    text = tiny.text(folder / "text", documents=16, words=150)
    return ("--model", str(model), "--text", str(text))


def left(folder: Path) -> set[str]:
    """What lies in a folder, by the kind of its name."""
    return {path.suffix or path.name for path in folder.rglob("*") if path.is_file()}


def test_a_right_run_exits_0_and_keeps_what_a_restart_can_use(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    command = ["demo", *given, *SMALL, "--folder", str(folder), "--json"]
    shown = RUNNER.invoke(app, command)
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert (report["right"], report["wrong"], report["engine"]) == (True, 0, "kvhold")
    assert [phase["requests"] for phase in report["phases"]] == [4, 4, 4]
    assert left(folder) == {".whole", ".png", "lock"}
    assert {path.name for path in folder.iterdir()} == {"whole", "demo.png"}
    assert "no whole pages of an earlier run: the next run finds 8 of this one" in report["notes"]
    again = RUNNER.invoke(app, command[:-1], env={"COLUMNS": "80"})
    assert again.exit_code == 0, again.output
    said = " ".join(again.stdout.split())
    assert "an earlier run's files 4+0+0 16" in said
    assert "an earlier run left 8 whole pages, 8 of these documents: used" in said
    assert "12 answers" not in said
    assert "16 answers, 0 wrong" in said


def test_a_folder_of_somebody_else_stays_as_it_is(given: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "letters").write_text("mine")
    shown = RUNNER.invoke(app, ["demo", *given, *SMALL, "--folder", str(tmp_path)])
    assert shown.exit_code == 2
    assert "split has letters, which is not kvhold's" in shown.stderr
    assert (tmp_path / "split" / "letters").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["split"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "200"], "200 tokens: expected multiples of 128"),
        (["--tokens", "1024"], "model takes 1024"),
        (["--folder", "README.md"], "README.md: File exists"),
        (["--picture", "none/x.png"], "none/x.png: No such file or directory"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_made(
    given: tuple[str, ...], tmp_path: Path, options: list[str], said: str
) -> None:
    where = ["--folder", str(tmp_path / "folder")]
    shown = RUNNER.invoke(app, ["demo", *given, "--documents", "1", *where, *options])
    assert shown.exit_code == 2
    assert said in " ".join(shown.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_run_has_is_one_line_and_stays_whole(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    other = DiskTier(tmp_path / "split")
    other.open()
    try:
        shown = RUNNER.invoke(app, ["demo", *given, *SMALL, "--folder", str(tmp_path)])
    finally:
        other.close()
    assert shown.exit_code == 2
    assert "another process has the folder" in shown.stderr
    assert (tmp_path / "split" / "lock").exists()


def test_too_little_text_is_one_line(given: tuple[str, ...], tmp_path: Path) -> None:
    command = ["demo", *given, "--documents", "90", "--folder", str(tmp_path)]
    shown = RUNNER.invoke(app, command)
    assert shown.exit_code == 2
    assert "90 are wanted" in shown.stderr


def test_the_command_line_itself_imports_no_torch() -> None:
    code = "import sys, kvhold.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "src"}, check=False
    )
    assert done.returncode == 0
