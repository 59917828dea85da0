"""What commands print: data for programs, tables for people, one line for an error."""

from __future__ import annotations

import json

import pytest
import typer
from rich.table import Table

from kvhold._output import refuse, show


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
