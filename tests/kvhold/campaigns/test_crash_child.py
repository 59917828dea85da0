"""The child of the crash campaign, in this process: it checks, and then works."""

from pathlib import Path

import anyio
import pytest

from kvhold.campaigns.crash_child import Child
from tiers import Placement

pytestmark = pytest.mark.anyio


@pytest.mark.may_block
async def test_a_child_works_until_it_is_stopped_and_the_last_one_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for placement in (Placement.WHOLE_DISK, Placement.SPLIT):
        with anyio.move_on_after(1):
            await Child(str(tmp_path), 1, placement.value, alone=True, final=False).run()
    await Child(str(tmp_path), 2, Placement.WHOLE_DISK.value, alone=True, final=True).run()
    said = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [line for line in said if line[0] in {"wrong", "unreadable"}] == []
    final = next(line for line in said if line[0] == "final")
    files, adopted, checked, damaged = map(int, final[1:])
    assert files == adopted == checked > 0
    assert damaged == 0
    assert ["left", "0"] in said
