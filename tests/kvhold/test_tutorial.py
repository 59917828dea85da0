"""The tutorial is one program, whose steps are its code blocks in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^```\{code-block\} python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(steps: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "tutorial.py"
    script.write_text("\n".join(steps), encoding="utf-8")
    return subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def steps() -> list[str]:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    return STEP.findall(text)


def test_the_steps_run_in_order_and_print_what_the_page_says(tmp_path: Path) -> None:
    found = steps()
    assert len(found) == 8
    done = run(found, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("computed [")
    assert lines[1].startswith("8 value files,")
    assert lines[2:4] == [
        "restored 8 pages, 3 tokens computed",
        "in part 4 pages, 67 tokens computed",
    ]
    assert "held=2" in lines[4]


def test_a_step_that_is_left_out_is_missed(tmp_path: Path) -> None:
    found = steps()
    assert run(found[:3] + found[4:], tmp_path).returncode != 0
