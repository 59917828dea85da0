"""The rounds against another program, with a stand-in for that program."""

import sys
from pathlib import Path

import anyio
import pytest

from kvhold.bench import store as bench
from kvhold.bench.store_lmcache import Peer, _rounds

STAND_IN = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("noise", flush=True)
    print("seconds 0.25", flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return [sys.executable, str(script)]


def test_rounds_alternate(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PAGES", 2)
    found = anyio.run(_rounds, command, tmp_path, 2)
    assert {verb: len(times) for verb, times in found.items()} == {"put": 2, "fetch": 2}
    for times in found.values():
        assert all((a, c) == (0.25, 0.25) and b > 0 for a, b, c in times)


def test_a_program_that_ends_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended"):
        Peer([sys.executable, "-c", ""], tmp_path, 1, 1)
