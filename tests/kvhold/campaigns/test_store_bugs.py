"""Every fault that is put into the store on purpose is noticed, and taken out again."""

from pathlib import Path

import pytest

from kvhold.campaigns.store import run_schedule
from kvhold.campaigns.store_bugs import STORE_BUGS
from kvhold.campaigns.store_schedule import StoreReport
from tiers._store_core import Core


@pytest.mark.parametrize("name", STORE_BUGS)
def test_a_seeded_bug_is_noticed(tmp_path: Path, name: str) -> None:
    for seed in range(150):
        with STORE_BUGS[name]():
            found = run_schedule(seed, StoreReport(), tmp_path)
        if found:
            return
    pytest.fail(f"150 schedules did not notice: {name}")


def test_a_bug_is_gone_afterwards() -> None:
    before = dict(vars(Core))
    for make in STORE_BUGS.values():
        with make():
            pass
    assert dict(vars(Core)) == before
