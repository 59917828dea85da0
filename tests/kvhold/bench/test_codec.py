import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvhold import _peer
from kvhold.bench import codec as bench
from tiers._team import Team
from tiers.codec import BLOB
from tiers.format import V1Scope

SLOW = """
import json, sys, time
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "time":
        print(json.dumps({"seconds": 1000.0}), flush=True)
    else:
        print(json.dumps({"ready": True}), flush=True)
"""


@pytest.mark.parametrize("keys", [True, False])
def test_a_case_is_as_large_as_it_says(*, keys: bool) -> None:
    case = bench.Case(1 << 16, V1Scope.HEAD, keys=keys, team=Team())
    assert sum(tensor.nbytes for tensor in case.source.values()) == 1 << 16
    assert case.repeats == bench.BATCH >> 16
    case.encode()
    case.decode()
    for name, tensor in case.source.items():
        error = (case.into[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert float(error) < (0.03 if name == "value" else 1e-9)
    assert case.as_json()["shape"] == list(case.shape)
    assert len(case.room) == case.codec.outputs[BLOB].capacity


@pytest.fixture
def slow_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side is a script that says it took long."""
    script = tmp_path / "peer.py"
    script.write_text(SLOW, encoding="utf-8")
    monkeypatch.setattr(_peer, "SCRIPT", script)
    monkeypatch.setattr(bench, "build", lambda: Path(sys.executable))
    monkeypatch.setattr(bench, "BATCH", 1 << 16)


@pytest.mark.usefixtures("slow_peer")
def test_every_size_scope_form_and_direction_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LARGEST", 1 << 17)
    pairs = list(bench.against_lmcache(1, sizes=[1 << 16]))
    assert len({pair.name for pair in pairs}) == len(pairs) == 10
    assert [pair.target for pair in pairs] == [1.0] * 8 + [None] * 2
    assert all(pair.met for pair in pairs)
    assert [pair.name for pair in pairs if "after larger blocks" in pair.name] == [
        "64 KiB K+V per tensor, after larger blocks, encode",
        "64 KiB K+V per tensor, after larger blocks, decode",
    ]
    assert all(pair.ours > pair.theirs for pair in pairs)
    assert bench.size_name(1 << 20) == "1 MiB"
    assert bench.size_name(1 << 16) == "64 KiB"


@pytest.mark.usefixtures("slow_peer")
def test_the_largest_block_has_none_larger_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LARGEST", 1 << 16)
    assert len(list(bench.against_lmcache(1, sizes=[1 << 16]))) == 8


def test_the_cast_is_timed_in_every_scope() -> None:
    figures = bench.cast_alone(1, nbytes=1 << 21)
    assert len(figures) == 8
    assert all(figure > 0 for figure in figures.values())
    assert torch.get_num_threads() >= 1


def test_the_command_prints_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "against_lmcache", lambda _rounds: iter(()))
    monkeypatch.setattr(bench, "cast_alone", lambda _rounds: {"cast alone": 3.0})
    app = typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, ["--rounds", "1"])
    assert result.exit_code == 0
    assert "cast alone: 3.00 GB/s" in result.output
    result = CliRunner().invoke(app, ["--rounds", "1", "--json"])
    assert '"figures":{"cast alone":3.0}' in result.output
