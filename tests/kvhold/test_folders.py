"""What a command makes goes again; what was there stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvhold._errors import UserError
from kvhold.folders import check_own, made, scratch

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_made_goes_with_all_that_led_to_it(tmp_path: Path) -> None:
    def command() -> None:
        with scratch(tmp_path / "a" / "b", "test") as place:
            assert place.parent == tmp_path / "a" / "b"
            (place / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()
    assert list(tmp_path.iterdir()) == []


def test_what_is_of_use_stays(tmp_path: Path) -> None:
    with made(tmp_path / "a" / "b") as folder:
        (folder / "file").touch()
    with scratch(folder, "test") as place:
        assert place.name.startswith("kvhold-test-")
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_folder_that_was_there_stays_though_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with scratch(tmp_path / "mine", "test"):
        pass
    assert (tmp_path / "mine").is_dir()


def test_somebody_elses_files_are_seen(tmp_path: Path) -> None:
    check_own(tmp_path / "none")
    for name in ("lock", "data"):
        (tmp_path / name).touch()
    check_own(tmp_path)
    (tmp_path / "letters").touch()
    with pytest.raises(UserError, match="has letters, which is not kvhold's"):
        check_own(tmp_path)
