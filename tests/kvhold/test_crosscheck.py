"""The comparison itself, with a stand-in for the other side that can be made to differ."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvhold import _peer, crosscheck
from kvhold.crosscheck import Case, cases, command, compare
from tiers.format import V1Scope

SOURCE = Path(__file__).parents[2] / "src"
# Writes what kvhold writes and reads what kvhold reads, but for the damage that it is told to do.
STAND_IN = f"""
import json, sys
sys.path.insert(0, {str(SOURCE)!r})
from pathlib import Path
import torch
from kvhold.crosscheck import Case, raw
from tiers.codec import BLOB
from tiers.format import V1Scope
damage = DAMAGE
for line in sys.stdin:
    command = json.loads(line)
    folder = Path(command["folder"])
    for number, case in enumerate(command["cases"]):
        shape = tuple(case["shape"])
        one = Case(shape, case["key"], "1", V1Scope(case["scope"]), case["keys"],
                   case["strings"], case["numbers"])
        blob = bytearray((folder / f"{{number}}.ours").read_bytes())
        dtype = getattr(torch, case["key"])
        names = ("key", "value") if case["keys"] else ("value",)
        into = {{name: torch.zeros(shape, dtype=dtype) for name in names}}
        one.codec().decode({{BLOB: blob}}, into)
        for name, tensor in into.items():
            data = bytearray(raw(tensor))
            data[0] ^= damage.get(name, 0)
            (folder / f"{{number}}.{{name}}").write_bytes(data)
        blob[22] ^= damage.get("blob", 0)
        (folder / f"{{number}}.theirs").write_bytes(blob)
    print(json.dumps({{"cases": len(command["cases"])}}), flush=True)
"""


def test_there_are_enough_cases_of_every_kind() -> None:
    chosen = list(cases())
    assert len(chosen) == len(set(map(str, chosen))) >= 24
    assert {case.dtype for case in chosen} == {"bfloat16", "float16", "float32"}
    assert {case.scope for case in chosen} == {V1Scope.TENSOR, V1Scope.HEAD, V1Scope.PAGE_HEAD}
    assert {case.keys for case in chosen} == {True, False}
    assert len({case.shape for case in chosen}) >= 4
    assert len({case.magnitude for case in chosen}) >= 5
    assert any(case.strings and case.numbers for case in chosen)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    chosen = [case for case in cases() if case.shape == (3, 2, 4)][:8]
    monkeypatch.setattr(crosscheck, "cases", lambda: iter(chosen))
    return chosen


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, int]) -> None:
    script = folder / "peer.py"
    script.write_text(STAND_IN.replace("DAMAGE", repr(damage)), encoding="utf-8")
    monkeypatch.setattr(_peer, "SCRIPT", script)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({}, set()),
        ({"blob": 1}, {"we refuse theirs: layer_id: found -65537, expected -1 or more"}),
        ({"value": 1}, {"values"}),
        ({"key": 1}, {"keys they read"}),
    ],
)
def test_every_difference_is_seen(
    few: list[Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    damage: dict[str, int],
    what: set[str],
) -> None:
    stand_in(tmp_path, monkeypatch, damage)
    found = compare(Path(sys.executable))
    assert found["cases"] == len(few)
    assert {name for names in found["different"].values() for name in names} == what
    assert found["equal"] == (len(few) if not what else found["cases"] - len(found["different"]))


def test_the_command_exits_with_1_when_a_case_differs(
    few: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(command)
    monkeypatch.setattr(crosscheck, "build", lambda: Path(sys.executable))
    for damage, code in (({}, 0), ({"value": 1}, 1)):
        stand_in(tmp_path, monkeypatch, damage)
        result = CliRunner().invoke(app, ["--json"])
        found: dict[str, Any] = json.loads(result.output)
        assert result.exit_code == code
        assert found["cases"] == len(few)


def test_the_module_says_what_it_does() -> None:
    helped = subprocess.run(
        [sys.executable, "-m", "kvhold.crosscheck", "--help"],
        capture_output=True,
        check=True,
        cwd=SOURCE,
    )
    assert b"LMCache" in helped.stdout
