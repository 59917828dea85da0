"""The doctor: what it looks at, and what it says of an environment that cannot work."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from rich.console import Console

from kvhold import doctor

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_it_reports_everything_that_decides_what_is_used(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path)
    looked_at = {finding.what for finding in findings}
    assert {"Python", "uvloop", "torch", "CUDA", "triton", "locked-memory limit", "files"} <= (
        looked_at
    )
    files = next(finding for finding in findings if finding.what == "files")
    assert str(tmp_path) in files.found
    assert files.use.startswith(("O_DIRECT", "no O_DIRECT"))
    assert list(tmp_path.iterdir()) == []


def test_an_unrelated_distribution_of_our_package_name_is_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        return "0.3" if name == "transfer" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (found,) = doctor.strangers()
    assert found.verdict == "bad"
    assert "pip uninstall transfer" in found.use


def test_nothing_collides_here() -> None:
    assert doctor.strangers() == []


def test_a_folder_without_direct_io_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: str) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("kvhold.doctor._write_direct", refuse)
    finding = doctor._disk(tmp_path)
    assert finding.verdict == "note"
    assert "buffered" in finding.use


def test_a_folder_that_takes_no_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = doctor._disk(tmp_path / "file")
    assert finding.verdict == "bad"
    assert "cannot be written there: Not a directory" in finding.use


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(doctor.table_of(findings))
    text = shown.get()
    for line in doctor.plain(findings):
        assert line["what"] in text
