"""The figures of the store bench are of what they say; small, since nobody looks at the speed here."""

import json
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from kvhold.bench import store as bench
from kvhold.bench.store import LAYOUT, THROUGH
from tiers import PageLayout, Placement
from tiers._form import Form


@pytest.mark.parametrize(
    ("layout", "placement"),
    [(LAYOUT, Placement.WHOLE_DISK), (LAYOUT, Placement.SPLIT), (THROUGH, Placement.WHOLE_DISK)],
)
def test_rounds_move_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: PageLayout, placement: Placement
) -> None:
    monkeypatch.setattr(bench, "PAGES", 4)
    times = anyio.run(bench._files, tmp_path, layout, placement, 1)
    assert {name: len(rounds) for name, rounds in times.items()} == {"put": 1, "fetch": 1}
    assert all(seconds > 0 for rounds in times.values() for three in rounds for seconds in three)
    assert [path.name for path in tmp_path.iterdir()] == ["tier"]
    assert [path for path in tmp_path.glob("tier/data/*/*") if path.suffix != ".whole"] == []


def test_a_small_index() -> None:
    # A process of its own: where memory was freed before, the resident set need not grow.
    script = "import json; from kvhold.bench.store import index; print(json.dumps(index(65536)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["index memory (bytes per page)"] > 0
    assert 0 < figures["look-up in random order (us per page)"] < 100
    assert bench.hashing() > 0


def test_the_share_of_bytes_is_three_quarters() -> None:
    console = Console(record=True, width=100)
    console.print(bench.bytes_by_tier())
    assert "0.758" in console.export_text()
    form = Form(LAYOUT, Placement.SPLIT)
    wide = LAYOUT.block_layout.nbytes
    assert form.host_bytes == wide // 2
    assert form.file_bytes == wide // 4 + 8192
