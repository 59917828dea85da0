"""`kvhold store`: what the commands show of a folder in every state."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.tiers.store_kit import keys_of, rig
from typer.testing import CliRunner

from kvhold.store import check, store
from tiers import FormatError, Placement
from tiers._folder import Name

RUN = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three pages, a leftover and an orphan of a dead writer, and a stranger."""

    async def make() -> None:
        async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
            await it.put(keys_of(3))

    anyio.run(make)
    for kind, temporary in (("whole", True), ("part", False)):
        name = Name(bytes(32), b"deadbeef" + bytes(8), kind, temporary)  # type: ignore[arg-type]
        (tmp_path / "data" / "00" / str(name)).write_bytes(bytes(4096))
    (tmp_path / "data" / "00" / "README").write_bytes(b"x")
    return tmp_path


def run(*arguments: object, code: int = 0) -> Any:
    """Run a command with ``--json`` and check its exit code."""
    done = RUN.invoke(store, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_ls_names_every_file(folder: Path) -> None:
    rows = run("ls", folder)
    states = sorted(row["state"] for row in rows)
    assert states == ["leftover", "orphan", "page", "page", "page", "unknown"]
    pages = [row for row in rows if row["state"] == "page"]
    assert {row["key"] for row in pages} == {d.hex() for d in keys_of(3).digests}
    assert all("key+value+value_scale, 2 layers" in row["holds"] for row in pages)
    done = RUN.invoke(store, ["ls", str(folder), "--limit", "2"])
    assert "4 more" in done.output


def test_verify_finds_damage(folder: Path) -> None:
    orphan = next(folder.glob("data/*/*.part"))
    orphan.unlink()
    assert run("verify", folder)["damaged"] == {}
    path = next(folder.glob("data/*/*.whole"))
    with path.open("r+b") as file:
        file.seek(4100)
        file.write(b"\xff\x00\xff")
    found = run("verify", folder, code=1)
    assert list(found["damaged"]) == [path.name]
    assert "CRC" in found["damaged"][path.name]
    done = RUN.invoke(store, ["verify", str(folder)])
    assert done.exit_code == 1
    assert "damaged file" in done.output


def test_stats_count_bytes_that_are_really_there(folder: Path) -> None:
    found = run("stats", folder)
    assert found["files"] == {
        "page": 3,
        "leftover": 1,
        "orphan": 1,
        "unknown": 1,
        "set aside": 0,
    }
    real = sum(p.stat().st_blocks * 512 for p in folder.glob("data/*/*"))
    assert sum(found["allocated"].values()) == real
    assert found["writers"] == 0
    assert "live writers" in RUN.invoke(store, ["stats", str(folder)]).output


def test_looking_changes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    for verb in ("ls", "stats", "verify"):
        RUN.invoke(store, [verb, str(folder)])
    assert sorted(folder.rglob("*")) == before


def test_live_writers_are_seen(tmp_path: Path) -> None:
    async def look() -> None:
        async with rig(tmp_path) as it:
            await it.put(keys_of(2))
            found = run("stats", tmp_path)
            assert found["writers"] == 1
            assert found["files"]["values"] == 2
            await it.store.drain()

    anyio.run(look)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    for verb in ("ls", "verify", "stats"):
        assert RUN.invoke(store, [verb, str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize("size", [0, 1, 4095, 4096])
def test_short_files_are_damaged(tmp_path: Path, size: int) -> None:
    # case 31 (files of 0 to header-size bytes)
    name = Name(bytes(32), bytes(16), "whole")
    path = tmp_path / str(name)
    path.write_bytes(bytes(size))
    with pytest.raises(FormatError):
        check(path, name)
