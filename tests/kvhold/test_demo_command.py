"""The command as users run it: what it prints, its exit status, and what it leaves behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.kvhold import tiny
from typer.testing import CliRunner

from kvhold.cli import app
from tiers import DiskTier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUNNER = CliRunner()
SMALL = ("--documents", "2", "--tokens", "128", "--new", "4", "--tasks", "2")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A model and text, as options."""
    folder = tmp_path_factory.mktemp("given")
    model = tiny.folder(folder / "model")
    text = tiny.text(folder / "text", documents=8, words=150)
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
    again = json.loads(RUNNER.invoke(app, command).stdout)
    assert again["kept"]["pages adopted"] == 2 * 4
    assert len(again["phases"]) == 4


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


@pytest.fixture
def running(given: tuple[str, ...], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process, with enough to do to be interrupted at it."""
    code = "from kvhold.cli import main; main()"
    options = ("--new", "200", "--documents", "4", "--folder", str(tmp_path / "folder"))
    environment = {**os.environ, "COLUMNS": "200", "FORCE_COLOR": "1", "PYTHONPATH": "src"}
    with subprocess.Popen(
        [sys.executable, "-c", code, "demo", *given, *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def test_ctrl_c_leaves_no_value_file_no_lock_and_its_exit_code(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert running.stderr is not None
    seen = ""
    while "the tiers" not in seen:
        read = running.stderr.read(64)
        assert read, f"it ended by itself: {seen[-500:]}"
        seen += read
    running.send_signal(signal.SIGINT)
    _, rest = running.communicate(timeout=60)
    assert running.returncode == 130, rest
    assert "interrupted; nothing is left behind" in rest
    assert "Traceback" not in rest
    folder = tmp_path / "folder"
    assert left(folder) <= {".whole", "lock"}
    assert {path.name for path in folder.iterdir()} == {"whole"}
    with (folder / "whole" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_command_line_itself_imports_no_torch() -> None:
    code = "import sys, kvhold.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "src"}, check=False
    )
    assert done.returncode == 0
