import json
import sys
from pathlib import Path

import pytest

from kvhold import _peer
from kvhold._peer import LMCACHE, NEEDS, Peer, build

ECHO = """
import json, sys
print("a library logs to the same place", flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "end":
        print("it broke", file=sys.stderr)
        raise SystemExit(4)
    print(json.dumps({"heard": command}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "inspect.py"  # a name that would hide a module of the standard library
    path.write_text(ECHO, encoding="utf-8")
    monkeypatch.setattr(_peer, "SCRIPT", path)
    return path


def test_commands_are_answered_one_at_a_time(script: Path) -> None:
    with Peer(Path(sys.executable)) as peer:
        for number in range(3):
            assert peer.ask(do="x", n=number) == {"heard": {"do": "x", "n": number}}
    assert script.exists()


def test_an_end_instead_of_an_answer_is_an_error_with_its_reason(script: Path) -> None:
    with Peer(Path(sys.executable)) as peer:
        with pytest.raises(RuntimeError, match="status 4:\nit broke"):
            peer.ask(do="end")
        with pytest.raises(RuntimeError, match="status 4"):
            peer.ask(do="x")
    assert script.exists()


def test_the_environment_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def run(*command: str) -> None:
        commands.append(command)
        (tmp_path / "environment").mkdir(exist_ok=True)

    monkeypatch.setattr(_peer, "_run", run)
    for _ in range(2):
        python = build(tmp_path / "environment")
        assert python == tmp_path / "environment" / "bin" / "python"
    assert [command[1:3] for command in commands] == [("-m", "venv"), ("-m", "pip"), ("-m", "pip")]
    assert commands[1][-len(NEEDS) :] == NEEDS
    assert commands[2][-2:] == ("--no-deps", LMCACHE)
    (tmp_path / "environment" / ".stamp").write_text("older", encoding="utf-8")
    build(tmp_path / "environment")
    assert len(commands) == 6
    assert json.dumps(NEEDS)
