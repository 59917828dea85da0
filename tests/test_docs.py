"""Every Python example of the documentation runs as a program of its own.

A fenced block that opens with ```python is a complete script; ```python no-run marks a sketch.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"^(?P<fence>`{3,})python(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL
)


def examples(text: str) -> list[tuple[int, str]]:
    """Find the blocks to run.

    Returns:
        Pairs of the line on which the code begins and the code.
    """
    return [
        (text.count("\n", 0, found.start("code")) + 1, found["code"])
        for found in FENCE.finditer(text)
        if "no-run" not in found["info"].split()
    ]


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, with warnings as errors."""
    script = folder / "example.py"
    script.write_text(code, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT).as_posix()}:{line}")
    for page in PAGES
    for line, code in examples(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, tmp_path: Path) -> None:
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_examples_are_found_and_sketches_are_not() -> None:
    page = "a\n```python\nprint(1)\n```\n\n```python no-run\nf(...)\n```\n```sh\nls\n```\n"
    page += "````python\nprint('```')\n````\n"
    assert examples(page) == [(3, "print(1)\n"), (13, "print('```')\n")]


def test_a_failing_example_is_seen(tmp_path: Path) -> None:
    assert run("raise SystemExit(3)", tmp_path).returncode == 3
    assert run("import warnings\nwarnings.warn('old')", tmp_path).returncode == 1
