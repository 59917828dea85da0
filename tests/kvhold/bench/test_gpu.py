"""Parts fail apart, and the report says how."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import typer

from kvhold._errors import UserError
from kvhold.bench import gpu


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run parts in this process instead of in one each."""

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        name = command[command.index("--part") + 1]
        if name == "slow":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        if name == "broken":
            return SimpleNamespace(returncode=1, stdout="", stderr="no such thing")
        gpu.command(
            Path(command[command.index("--out") + 1]), part=name, short="--short" in command
        )
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["/somewhere/gpu.py", "--out", "figures"])


def test_a_part_that_fails_costs_its_own_figures_only(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(short: bool, settings: Any) -> dict[str, Any]:
        return {"rows": [{"short": short, "staging": settings.staging}], "lines": ["a line"]}

    parts = dict.fromkeys(("slow", "broken", "good"), (part, 9.0))
    monkeypatch.setattr(gpu, "PARTS", parts)
    gpu.main(tmp_path, short=True)
    report = msgspec.json.decode((tmp_path / "gpu.json").read_bytes())
    assert report["command"] == "python -m kvhold.bench.gpu --out figures"
    assert report["slow"]["problem"] == "stopped after 9.0 s"
    assert report["broken"]["problem"] == "no such thing"
    assert report["good"]["figures"]["rows"] == [{"short": True, "staging": 32 << 20}]
    assert "problem" not in report["good"]
    assert report["versions"]["torch"]


def test_unknown_parts_are_named(here: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'nothing': there are tune, pace"):
        gpu.main(tmp_path, only="nothing")


def test_a_run_with_a_failed_part_ends_in_one_and_has_a_picture(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(_short: bool, _settings: Any) -> dict[str, Any]:
        return {"rows": [], "lines": []}

    monkeypatch.setattr(gpu, "PARTS", dict.fromkeys(("broken", "good"), (part, 9.0)))
    with pytest.raises(typer.Exit) as end:
        gpu.command(tmp_path)
    assert end.value.exit_code == 1
    out, err = capsys.readouterr()
    assert err == "failed: broken\n"
    assert "2 of 2, good" in out
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    gpu.command(tmp_path, only="good")  # no exception: exit 0


def test_what_an_earlier_run_left_is_not_reported(here: None, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}", encoding="utf-8")
    gpu.PARTS["broken"] = (lambda *_: {}, 9.0)
    try:
        found = gpu.run_part("broken", tmp_path, short=True)
    finally:
        del gpu.PARTS["broken"]
    assert set(found) == {"seconds", "problem"}


def test_gpu_as_a_word_of_the_other_command(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhold.bench import __main__ as parts

    called: list[Any] = []
    monkeypatch.setattr(typer, "run", called.append)
    monkeypatch.setattr(sys, "argv", ["bench", "gpu", "--out", "x"])
    parts.entry()
    assert called == [gpu.command]
    assert sys.argv == ["bench", "--out", "x"]
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "engine"])
    parts.entry()
    assert called[1] is parts.main
