"""The command line: every command explains itself, and what users can put right is one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from kvhold._errors import UserError
from kvhold.cli import app
from kvhold.cli_errors import one_line
from kvhold.interrupts import Interrupted
from tiers import PutFailed, TierBusy

if TYPE_CHECKING:
    from pathlib import Path

RUNNER = CliRunner()
COMMANDS = ["demo", "quality", "faults", "doctor", "inspect", "bench", "store"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = RUNNER.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "Usage:" in shown.output
    if command not in {"bench", "store"}:
        assert "--json" in shown.output


def test_the_commands_are_these() -> None:
    shown = RUNNER.invoke(app, ["--help"], env={"COLUMNS": "200"})
    for command in COMMANDS:
        assert command in shown.output


def test_doctor_speaks_json(tmp_path: Path) -> None:
    shown = RUNNER.invoke(app, ["doctor", "--json", "--folder", str(tmp_path)])
    assert shown.exit_code == 0
    assert {"what", "found", "use", "verdict"} == set(json.loads(shown.output)[0])


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    shown = RUNNER.invoke(app, ["doctor", "--folder", str(tmp_path / "none")])
    assert shown.exit_code == 2
    assert "is no folder" in shown.stderr
    assert "Traceback" not in shown.output


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    shown = RUNNER.invoke(app, ["demo", "--model", missing, "--folder", str(tmp_path)])
    assert shown.exit_code == 2
    assert missing.rsplit("/", maxsplit=1)[-1] in shown.stderr.replace("\n", "")
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), "/x/y: Permission denied", 2),
        (OSError(28, "No space left on device"), "No space left on device", 2),
        (TierBusy("pid 7 writes there"), "another process has the folder", 2),
        (ExceptionGroup("tasks", [OSError(28, "No space left on device")]), "No space left", 2),
        (ExceptionGroup("tasks", [UserError("say it")]), "kvhold: say it", 2),
        (PutFailed({3: "[Errno 28] No space left: '/x/y'"}), "1 pages could not be stored: No", 2),
        (KeyboardInterrupt(), "interrupted; nothing is left behind", 130),
        (Interrupted(15), "terminated; nothing is left behind", 143),
    ],
)
def test_what_users_can_put_right_is_one_line(
    error: BaseException, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as left, one_line():
        raise error
    assert left.value.exit_code == code
    assert said in capsys.readouterr().err


def test_a_bug_stays_a_traceback() -> None:
    with pytest.raises(ZeroDivisionError), one_line():
        raise ZeroDivisionError
    group = ExceptionGroup("tasks", [OSError(28, "full"), ZeroDivisionError()])
    with pytest.raises(ExceptionGroup), one_line():
        raise group
