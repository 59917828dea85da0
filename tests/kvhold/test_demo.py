"""The demonstration, whole, on a tiny model: right with the engine, wrong without the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kvhold import tiny

from kvhold import demo_faults as faults
from kvhold.demo import FAULTS, SPLIT, Demo, Settings

if TYPE_CHECKING:
    from pathlib import Path

    from kvhold.demo_report import Report

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

DOCUMENTS = [[(d * 31 + n * (d + 3)) % 117 for n in range(128)] for d in range(6)]


def settings(*, naive: bool = False, seed: int = 7) -> Settings:
    return Settings(
        documents=6, tokens=128, new=12, page_size=16, chunk=32, late=20, naive=naive, seed=seed
    )


async def run(folder: Path, given: Settings) -> Report:
    steps: list[tuple[str, int, int]] = []
    demo = Demo(
        tiny.model(),
        DOCUMENTS,
        folder=folder,
        settings=given,
        progress=lambda *step: steps.append(step),
    )
    report = await demo.run()
    assert demo.opened == {SPLIT, FAULTS}
    assert {step[0] for step in steps} >= {phase.name for phase in report.phases}
    assert all(done <= total for _, done, total in steps)
    return report


async def test_every_answer_is_right_through_tiers_faults_and_a_restart(tmp_path: Path) -> None:
    first = await run(tmp_path, settings())
    assert first.right, first.phases
    assert [phase.name for phase in first.phases] == [
        "never offloaded",
        "the tiers",
        "the tiers, with faults",
    ]
    computed, tiers, faulty = first.phases
    assert (computed.computed, computed.pages) == (12, 0)
    assert (tiers.restored, tiers.pages) == (12, 12 * 8)
    assert faulty.restored + faulty.in_part + faulty.computed == 12
    assert set(first.faults) == {
        faults.FAILED_WRITE,
        faults.SLOW_READ,
        faults.SLOW_COPY,
        faults.LOST_FILE,
        faults.DAMAGED_FILE,
        faults.CANCELLED,
    }
    assert all(first.faults.values())
    second = await run(tmp_path, settings(seed=8))
    assert second.right, second.phases
    restarted = second.phases[1]
    assert (restarted.name, restarted.restored) == ("an earlier run's files", 12)
    assert second.kept["pages adopted"] == 6 * 8
    assert any("left 48 whole pages, 48 of these documents: used" in n for n in second.notes)


async def test_the_same_run_without_the_rule_gives_wrong_answers(tmp_path: Path) -> None:
    for seed in range(7, 12):
        report = await run(tmp_path, settings(naive=True, seed=seed))
        assert not any(phase.wrong or phase.bits for phase in report.phases[:-1])
        if report.wrong:
            assert not report.right
            return
    pytest.fail("five runs of the control, and no answer was wrong")


def test_page_bytes_are_those_of_the_cache() -> None:
    demo = Demo(
        tiny.model(),
        DOCUMENTS,
        folder=None,  # type: ignore[arg-type]
        settings=settings(),
        progress=lambda *_: None,
    )
    # 3 layers of 16 tokens with 2 heads of 16 elements, 2 bytes of key and 1 of value each.
    assert demo.report.page_bytes == {
        "key": 3 * 16 * 2 * 16 * 2,
        "value": 3 * 16 * 2 * 16,
        "value_scale": 3 * 16 * 2 * 4,
        "bfloat16": 2 * 3 * 16 * 2 * 16 * 2,
    }
