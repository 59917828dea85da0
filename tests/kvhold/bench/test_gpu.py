"""Parts fail apart, and the report says how."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

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
    with pytest.raises(UserError, match="'nothing': there are tune, table"):
        gpu.main(tmp_path, only="nothing")
