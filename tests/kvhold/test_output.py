"""What commands print: data for programs, tables for people, one line for an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.table import Table

from kvhold._output import brief, check_writable, reason, refuse, show, write


def test_json_is_what_programs_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    show({"blocks": 3}, Table(title="never shown"), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"blocks": 3}


def test_a_table_is_what_people_see(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("what", "figure")
    table.add_row("blocks", "3")
    show({"blocks": 3}, table, as_json=False)
    printed = capsys.readouterr().out
    assert "blocks" in printed
    assert "{" not in printed


def test_a_refusal_is_one_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left:
        refuse("no such folder", code=1)
    shown = capsys.readouterr()
    assert left.value.exit_code == 1
    assert shown.out == ""
    assert shown.err == "kvhold: no such folder\n"


def test_a_refusal_takes_marks_and_lines_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        refuse("[red]x[/nope]:\n  not :smile: there")
    assert capsys.readouterr().err == "kvhold: [red]x[/nope]: not :smile: there\n"


def test_an_error_of_the_system_is_place_and_reason() -> None:
    assert reason(OSError(28, "No space left", "/x/y")) == "/x/y: No space left"
    assert reason(OSError("odd")) == "odd"
    assert brief("[Errno 28] No space left on device: '/x/y'") == "No space left on device"
    assert brief("the page's bytes are others") == "the page's bytes are others"


def test_a_file_is_written_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write(path, b"1")
    path.chmod(0o640)
    write(path, b"22")
    assert path.read_bytes() == b"22"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [found.name for found in tmp_path.iterdir()] == ["figures.json"]
    write(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("stays")
    check_writable(None, tmp_path / "there", tmp_path / "new", Path("/dev/null"))
    assert (tmp_path / "there").read_text() == "stays"
    assert [found.name for found in tmp_path.iterdir()] == ["there"]
    for path in (tmp_path, tmp_path / "none" / "new", tmp_path / "there" / "new"):
        with pytest.raises(OSError, match=str(path)):
            check_writable(path)
