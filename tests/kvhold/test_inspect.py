import json
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.tiers.blobs import codecs, encode
from typer.testing import CliRunner

from kvhold.inspect import inspect, inspect_bytes, inspect_file
from tiers import ByteThroughCodec, PageLayout, PageOrder, ScaleScope, StaticScales, V3Codec
from tiers.format import Identity


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(inspect)
    return made


def run(app: typer.Typer, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def write(folder: Path) -> dict[str, Path]:
    paths = {}
    for name, codec in codecs().items():
        paths[name] = folder / name.replace(" ", "-")
        paths[name].write_bytes(encode(codec))
    return paths


def test_valid_files_exit_with_0(app: typer.Typer, tmp_path: Path) -> None:
    paths = write(tmp_path)
    code, output = run(app, *map(str, paths.values()), "--json")
    found = json.loads(output)
    assert code == 0
    assert found["unreadable"] == []
    assert [one["valid"] for one in found["files"]] == [True] * len(paths)
    for name, one in zip(paths, found["files"], strict=True):
        assert one["version"] == int(name[1])
        assert one["bytes"] == paths[name].stat().st_size
        assert {check["outcome"] for check in one["checks"]} == {"passed"}
        assert one["error"] is None
        assert sum(part["bytes"] for part in one["components"]) < one["bytes"]


def test_a_report_says_what_the_blob_holds(tmp_path: Path) -> None:
    report = inspect_file(write(tmp_path)["v3 page_head"])
    assert report.header["scale_scope"] == "page_head"
    assert report.header["key_digest"] == bytes(range(32)).hex()
    assert [part["name"] for part in report.components] == ["key", "value", "value_scale"]
    assert [name for name, _ in report.checks] == ["header", "key", "value", "value_scale"]
    report = inspect_file(write(tmp_path)["v1 page head"])
    assert report.header["model_id"] == "m"
    assert report.header["layer_id"] == 3
    assert report.components[-1]["shape"] == [3, 2]


def test_static_scales_are_shown_as_a_provenance_has_them() -> None:
    layout = PageLayout(
        layers=2,
        page_size=4,
        kv_heads=2,
        head_dim=8,
        order=PageOrder.NHD,
        value="float8_e4m3fn",
    )
    scales = StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0]])
    whose = Identity(key=bytes(32), provenance=bytes(32), put=bytes(16))
    codec = V3Codec(ByteThroughCodec(layout, static_scales=scales), identity=whose)
    header = inspect_bytes(memoryview(encode(codec))).header
    assert header["scheme"] == "producer_scaled"
    assert header["scale_scope"] == "head"
    assert header["scales"] == "0.25 to 3"
    assert header["static_scales"] == scales.digest.hex()
    computed = inspect_bytes(memoryview(encode(codecs()["v3 head"]))).header
    assert "static_scales" not in computed
    assert "to" in computed["scales"]


@pytest.mark.parametrize(
    ("name", "damage", "check", "cause"),
    [
        ("v3 head", 20, "header", "LengthError"),
        ("v3 head", 70, "header", "ChecksumMismatch"),
        ("v3 head", 4097, "key", "ChecksumMismatch"),
        ("v3 head", 8192 - 1, "key", "ReservedError"),
        ("v1 tensor", 19, "header", "ReservedError"),
        ("v1 tensor", 220, "payload", "ChecksumMismatch"),
        ("v2", 240, "payload", "ChecksumMismatch"),
        ("v3 head", 0, "header", "VersionError"),
    ],
)
def test_a_refused_file_exits_with_1_and_says_why(
    app: typer.Typer, tmp_path: Path, *, name: str, damage: int, check: str, cause: str
) -> None:
    path = write(tmp_path)[name]
    data = bytearray(path.read_bytes())
    data[damage] ^= 1
    path.write_bytes(data)
    code, output = run(app, str(path), "--json")
    found: dict[str, Any] = json.loads(output)["files"][0]
    assert code == 1
    assert found["error"]["cause"] == cause
    assert {"check": check, "outcome": cause} in found["checks"]
    code, output = run(app, str(path))
    assert code == 1
    assert "refused" in output
    assert cause in output


def test_sections_behind_a_bad_one_are_still_checked(tmp_path: Path) -> None:
    path = write(tmp_path)["v3 head"]
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    report = inspect_bytes(memoryview(data))
    assert dict(report.checks) == {
        "header": "passed",
        "key": "ChecksumMismatch",
        "value": "passed",
        "value_scale": "passed",
    }


def test_one_bad_file_of_several(app: typer.Typer, tmp_path: Path) -> None:
    good = write(tmp_path)["v3 head"]
    bad = tmp_path / "[bold]bad"
    for content in (b"", b"x", bytes(5000)):
        bad.write_bytes(content)
        assert run(app, str(good), str(bad))[0] == 1
    code, output = run(app, str(good), str(tmp_path / "missing"), "--json")
    assert code == 2
    assert "missing: No such file or directory" in output.splitlines()[-1]
    said = output[: output.rindex("kvhold:")]
    assert json.loads(said)["unreadable"][0]["error"] == "No such file or directory"


def test_the_output_for_people_names_components(app: typer.Typer, tmp_path: Path) -> None:
    code, output = run(app, str(write(tmp_path)["v3 head"]))
    assert code == 0
    for word in ("valid", "version 3", "value_scale", "float8_e4m3fn", "check header: passed"):
        assert word in output
