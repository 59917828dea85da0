"""Exit codes tell the truth: each cell of the table in docs/commands.md, by a run that ends so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import typer.main
from tests.kvhold import reports
from tests.tiers.blobs import codecs, encode
from tests.tiers.store_kit import keys_of, rig
from typer.testing import CliRunner

from kvhold import doctor
from kvhold.cli import app
from kvhold.demo_report import Phase, Report
from tiers import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNER = CliRunner()
PAGE = Path(__file__).parent.parent.parent / "docs" / "commands.md"
ROW = re.compile(r"^\| `([a-z ]+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)

Patch = pytest.MonkeyPatch


def documented() -> set[tuple[str, int]]:
    """Command and code of every cell that says something."""
    text = PAGE.read_text(encoding="utf-8")
    return {
        (row[0], code)
        for row in ROW.findall(text)
        for code, meaning in enumerate(row[1:])
        if meaning.strip()
    }


def leaves() -> set[str]:
    """Every command that does something, by its words."""
    root: Any = typer.main.get_command(app)
    found = set()
    for name, command in root.commands.items():
        below = getattr(command, "commands", None)
        found |= {f"{name} {leaf}" for leaf in below} if below else {name}
    return found


def demo_of(bits: int) -> Callable[..., Report]:
    phase = Phase("the tiers", 1, 1, 0, 0, 4, 0, 1.0, 1.0, wrong=bits, bits=bits)
    return lambda *_, **__: Report({"name": "m"}, {}, "kvhold", phases=[phase])


def demo(patch: Patch, folder: Path, code: int) -> list[str]:
    patch.setattr("kvhold.demo_command.run_demo", demo_of(int(code == 1)))
    (folder / "demo").mkdir()
    return ["demo", "--folder", str(folder / ("none" if code == 2 else "demo"))]


def quality(patch: Patch, folder: Path, code: int) -> list[str]:
    report = reports.quality()
    patch.setattr("kvhold.quality_command.run_quality", lambda *_, **__: report)
    patch.setattr("kvhold.quality_report.is_sound", lambda _report: code == 0)
    return ["quality", *(["--out", str(folder / "none" / "x")] if code == 2 else [])]


def faults(patch: Patch, folder: Path, code: int) -> list[str]:
    if code == 2:
        return ["faults", "--only", "gremlins"]

    def command(*, as_json: bool, **_: Any) -> bool:
        assert as_json
        typer.echo("{}")
        return code == 0

    patch.setattr("kvhold.campaigns.__main__.command", command)
    return ["faults"]


def look(patch: Patch, folder: Path, code: int) -> list[str]:
    if code == 1:
        bad = doctor.Finding("files", "none", "nothing", "bad")
        patch.setattr("kvhold.doctor._disk", lambda _folder: bad)
    return ["doctor", "--folder", str(folder / "none" if code == 2 else folder)]


def inspect(patch: Patch, folder: Path, code: int) -> list[str]:
    content = encode(codecs()["v3 head"])
    (folder / "blob").write_bytes(content[:-1] if code == 1 else content)
    return ["inspect", str(folder / ("none" if code == 2 else "blob"))]


def store(verb: str) -> Callable[[Patch, Path, int], list[str]]:
    def made(patch: Patch, folder: Path, code: int) -> list[str]:
        async def make() -> None:
            async with rig(folder, placement=Placement.WHOLE_DISK) as it:
                await it.put(keys_of(1))

        if code != 2:
            anyio.run(make)
        if code == 1:
            (path,) = folder.glob("data/*/*.whole")
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        return ["store", verb, str(folder)]

    return made


def bench(part: str) -> Callable[[Patch, Path, int], list[str]]:
    def made(patch: Patch, folder: Path, code: int) -> list[str]:
        patch.setattr(f"kvhold.bench.__main__.measure_{part}", lambda *_: {"pairs": []})
        return ["bench", part, "--folder", str(folder / "none" if code == 2 else folder)]

    return made


def gpu(patch: Patch, folder: Path, code: int) -> list[str]:
    patch.setattr("kvhold.bench.gpu.require", lambda: None)
    found: dict[str, Any] = {"seconds": 1.0}
    if code == 1:
        found["problem"] = "it broke"
    patch.setattr("kvhold.bench.gpu.run_part", lambda *_, **__: found)
    return ["bench", "gpu", "--out", str(folder), "--only", "none" if code == 2 else "cast"]


def ttft(patch: Patch, folder: Path, code: int) -> list[str]:
    report: dict[str, Any] = {"model": {"name": "m"}, "bytes_per_token": 1, "placements": {}}
    patch.setattr("kvhold.bench.ttft_command.run", lambda **_: report)
    return ["bench", "ttft", "--lengths", "33" if code == 2 else "64"]


def compare(patch: Patch, folder: Path, code: int) -> list[str]:
    for name, number in (("a", 1), ("b", 2)):
        (folder / name).write_text(json.dumps({name if code == 2 else "same": number}))
    return ["bench", "compare", str(folder / "a"), str(folder / "b")]


ENDS: dict[str, Callable[[Patch, Path, int], list[str]]] = {
    "demo": demo,
    "quality": quality,
    "faults": faults,
    "doctor": look,
    "inspect": inspect,
    **{f"store {verb}": store(verb) for verb in ("ls", "verify", "stats")},
    **{f"bench {part}": bench(part) for part in ("engine", "codec", "store")},
    "bench gpu": gpu,
    "bench ttft": ttft,
    "bench compare": compare,
}


def test_the_table_has_every_command() -> None:
    assert {command for command, _ in documented()} == leaves() == set(ENDS)
    assert all((command, 0) in documented() for command in ENDS)


@pytest.mark.parametrize(("command", "code"), sorted(documented()))
def test_a_run_ends_as_the_table_says_and_speaks_json(
    monkeypatch: Patch, tmp_path: Path, command: str, code: int
) -> None:
    arguments = ENDS[command](monkeypatch, tmp_path, code)
    shown = RUNNER.invoke(app, [*arguments, "--json"], env={"COLUMNS": "200"})
    assert shown.exit_code == code, shown.output
    assert isinstance(shown.exception, SystemExit | None)
    if code < 2:
        json.loads(shown.stdout)
    if code == 2:
        assert shown.stderr.startswith("kvhold: ")
        assert len(shown.stderr.splitlines()) == 1
