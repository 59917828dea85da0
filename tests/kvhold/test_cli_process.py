"""Commands as processes: what ends them, what they print where, and what they leave behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.kvhold import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--documents", "2", "--tokens", "128", "--new", "4", "--tasks", "2")
LONG = ("--documents", "3", "--tokens", "128", "--new", "20", "--tasks", "2")
FEW = ("--documents", "4", "--prefix", "64", "--suffix", "32", "--greedy-documents", "0")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A model and text, as options."""
    folder = tmp_path_factory.mktemp("given")
    model = tiny.folder(folder / "model")
    text = tiny.text(folder / "text", documents=40, words=150)
    return ("--model", str(model), "--text", str(text))


def environment(temporary: Path, **more: str) -> dict[str, str]:
    temporary.mkdir(exist_ok=True)
    return {
        **os.environ,
        "COLUMNS": "200",
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(temporary),
        **more,
    }


def kvhold(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "kvhold", *arguments],
        cwd=folder,
        env=environment(folder / "tmp"),
        text=True,
        check=False,
        timeout=90,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@contextmanager
def started(
    *arguments: str, folder: Path, python: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A command under way, whose progress is written as to a terminal."""
    with subprocess.Popen(
        [sys.executable, *python, "-m", "kvhold", *arguments],
        cwd=folder,
        env=environment(folder / "tmp", FORCE_COLOR="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_for(child: subprocess.Popen[str], words: str) -> None:
    """Read a command's progress until it says something."""
    assert child.stderr is not None
    seen = ""
    while words not in seen:
        read = child.stderr.read(32)
        assert read, f"it ended by itself: {seen[-500:]}"
        seen += read


def left(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# Signals


@pytest.mark.parametrize(
    ("moment", "signals"),
    [
        ("loading the model", [signal.SIGTERM]),
        ("storing whole pages", [signal.SIGTERM]),
        ("the tiers, with faults", [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_a_demo_that_is_stopped_leaves_nothing_of_use_to_nobody(
    given: tuple[str, ...], tmp_path: Path, moment: str, signals: list[signal.Signals]
) -> None:
    folder = tmp_path / "folder"
    with started("demo", *given, *LONG, "--folder", str(folder), folder=tmp_path) as child:
        wait_for(child, moment)
        for number in signals:
            child.send_signal(number)
        out, rest = child.communicate(timeout=60)
    word = "interrupted" if signals[0] == signal.SIGINT else "terminated"
    assert child.returncode == 128 + signals[0], rest
    assert rest.count(f"{word}; nothing is left behind") == 1
    assert "Traceback" not in rest
    assert out == ""
    assert left(tmp_path / "tmp") == []
    if moment == "loading the model":
        assert not folder.exists()
        return
    assert {path.name for path in folder.iterdir()} == {"whole"}
    assert {Path(name).suffix for name in left(folder) if "-" in name} <= {".whole"}
    assert left(folder / "whole" / "writers") == []
    with (folder / "whole" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("arguments", "moment", "number"),
    [
        (["quality", *FEW], "batches of documents", signal.SIGINT),
        (["bench", "ttft", "--lengths", "32,960", "--rounds", "15"], "L1 only", signal.SIGTERM),
        (["faults", "--duration", "60"], "operations, ", signal.SIGINT),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_that_is_stopped_leaves_nothing(
    given: tuple[str, ...],
    tmp_path: Path,
    arguments: list[str],
    moment: str,
    number: signal.Signals,
) -> None:
    options = [] if arguments[0] == "faults" else ["--folder", "a/b", *given[:2]]
    if arguments[0] == "quality":
        options += given[2:]
    with started(*arguments, *options, folder=tmp_path) as child:
        wait_for(child, moment)
        child.send_signal(number)
        out, rest = child.communicate(timeout=60)
    assert child.returncode == 128 + number, rest
    assert rest.count("; nothing is left behind") == 1
    assert "Traceback" not in rest
    assert out == ""
    assert left(tmp_path) == ["tmp"]


def test_a_bench_that_is_stopped_in_its_files_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    with started("bench", "engine", "--rounds", "1", "--folder", "files", folder=tmp_path) as child:
        while not any(path.is_dir() for path in (tmp_path / "files").iterdir()):
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        out, rest = child.communicate(timeout=60)
    assert child.returncode == 143, rest
    assert rest.count("terminated; nothing is left behind") == 1
    assert "Traceback" not in rest
    assert out == ""
    assert left(tmp_path) == ["files", "tmp"]


def test_a_signal_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    with started("doctor", folder=tmp_path, python=("-X", "importtime")) as child:
        wait_for(child, "typer")
        child.send_signal(signal.SIGINT)
        _, rest = child.communicate(timeout=60)
    assert child.returncode == 130
    said = [line for line in rest.splitlines() if "import time:" not in line]
    assert said[-1] == "kvhold: interrupted; nothing is left behind"
    assert "Traceback" not in rest


# Mistakes


def is_closed(folder: Path) -> bool:
    """Whether nothing can be made in a folder, whoever we are; permissions do not bind root."""
    try:
        (folder / "kvhold-probe").mkdir()
    except OSError:
        return True
    (folder / "kvhold-probe").rmdir()
    return False


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("demo --nothing", "No such option: --nothing"),
        ("quality --model empty", "empty has no config.json"),
        ("quality --out none/x.json", "none/x.json: No such file or directory"),
        ("bench gpu --out figures", "no CUDA device"),
        ("bench engine --folder none", "none is no folder"),
        ("bench engine --folder /sys", "/sys/kvhold-bench: "),
        ("bench compare a-file none.json", "a-file is no JSON"),
        ("bench compare deep.json deep.json", "nests too deep"),
        ("bench compare empty.json empty.json", "no figure is in both"),
        ("faults --only gremlins", "no fault 'gremlins': there are refuse"),
        ("faults --duration 0", "Invalid value for '--duration'"),
        ("inspect [red]", "[red]: No such file or directory"),
        ("inspect pipe", "pipe: no regular file"),
        ("store ls none", "none is no folder of a disk tier"),
        ("store ls --limit 0 none", "Invalid value for '--limit'"),
        ("store verify tier", "tier/data/00: Not a directory"),
        ("doctor --folder none", "none is no folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command: str, said: str, tmp_path: Path) -> None:
    if "/sys" in command and not is_closed(Path("/sys")):
        pytest.skip("/sys can be written here")
    if "gpu" in command and Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").write_bytes(b"{\xff")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "tier" / "data").mkdir(parents=True)
    (tmp_path / "tier" / "data" / "00").touch()
    os.mkfifo(tmp_path / "pipe")
    before = left(tmp_path)
    done = kvhold(*command.split(), folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("loading the model")]
    if "Usage:" not in done.stderr:  # the parser's own errors say how it is used
        assert len(lines) == 1
        assert lines[0].startswith("kvhold: ")
    assert "Traceback" not in done.stderr
    assert left(tmp_path) == sorted([*before, "tmp"])


def test_a_doctor_without_a_place_to_write_exits_1(tmp_path: Path) -> None:
    if not is_closed(Path("/sys")):
        pytest.skip("/sys can be written here")
    done = kvhold("doctor", "--json", "--folder", "/sys", folder=tmp_path)
    assert done.returncode == 1
    (bad,) = [found for found in json.loads(done.stdout) if found["verdict"] == "bad"]
    assert (bad["what"], done.stderr) == ("files", "")


# A disk that is full


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of three blocks."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12k", "none", str(place)]
    try:
        done = subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)  # noqa: S607


def test_a_demo_on_a_full_disk_answers_right_and_says_what_it_could_not_do(
    given: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    done = kvhold("demo", *given, *SMALL, "--json", "--folder", str(full / "demo"), folder=tmp_path)
    assert done.returncode == 2
    report = json.loads(done.stdout)
    assert (report["right"], report["wrong"]) == (True, 0)
    stored = (
        "storing whole pages: 8 pages could not be stored (No space left on device); recomputed"
    )
    assert stored in report["notes"]
    assert "the next run finds 0 of this one" in " ".join(report["notes"])
    assert "kvhold: no picture: " in done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in (full / "demo").iterdir()} == {"whole"}


def test_a_measurement_on_a_full_disk_is_one_line_and_leaves_nothing(
    given: tuple[str, ...], full: Path, tmp_path: Path
) -> None:
    done = kvhold("quality", *given, *FEW, "--folder", str(full / "q"), folder=tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvhold: ")]
    assert len(lines) == 1
    assert "pages could not be stored: No space left on device" in lines[0]
    assert done.stdout == ""
    assert left(full) == []


def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text("before")
    code = (
        "import resource; from pathlib import Path; from kvhold._output import write\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write(Path('figures.json'), bytes(9999))\n"
        "except OSError as error: print(error.strerror)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path / "tmp"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "File too large\n"
    assert left(tmp_path) == ["figures.json", "tmp"]
    assert (tmp_path / "figures.json").read_text() == "before"


def test_output_that_nobody_takes_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    for options in ([], ["--json"]):
        with Path("/dev/full").open("w") as nowhere:
            done = kvhold(
                "bench", "compare", "a.json", "a.json", *options, folder=tmp_path, stdout=nowhere
            )
        assert done.returncode == 2
        assert done.stderr == "kvhold: No space left on device\n"
