"""The measurement of quality, whole, on a tiny model: the restored cache is what is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kvhold import tiny

from kvhold.quality import RESTORED, Quality
from kvhold.quality_report import is_sound, report_of
from kvhold.quality_runs import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from kvhold.quality_restored import Tiers
    from transfer import Blocks

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SETTINGS = Settings(
    documents=6,
    prefix=64,
    suffix=24,
    batch=3,
    chunk=32,
    page_size=8,
    greedy_documents=3,
    greedy=8,
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def measured(folder: Path) -> Quality:
    draw = torch.Generator().manual_seed(2)
    documents = torch.randint(0, 120, (6, 64 + 24 + 1), generator=draw).tolist()
    steps: list[tuple[int, int]] = []
    quality = Quality(
        tiny.model(torch.float32),
        documents,
        settings=SETTINGS,
        progress=lambda done, total: steps.append((done, total)),
    )
    await quality.run(folder)
    assert steps == [(0, 2), (1, 2), (2, 2)]
    return quality


async def test_it_reads_what_the_tiers_gave_back_and_sees_every_damage(tmp_path: Path) -> None:
    quality = await measured(tmp_path / "files")
    report = report_of(quality, tiny.model(), seed=0, conditions={"where": "here"})
    assert is_sound(report)
    assert report["predictions"] == 6 * 24
    assert (report["batches_restored_equal"], report["batches"]) == (2, 2)
    kl = {name: figures["kl"]["mean"] for name, figures in report["formats"].items()}
    assert 0 < kl[RESTORED] < kl["K8/V16"] < 2 * kl["K8/V8"]
    # A simulation that shares no code with the pages agrees far beyond what the format costs.
    assert report["kl_from_simulation"] < kl[RESTORED] / 50
    damages = {mutation["what"]: mutation for mutation in report["mutations"]}
    none = damages.pop("none (fetched again)")
    assert not none["bits_differ"]
    assert all(mutation["bits_differ"] for mutation in damages.values())
    assert damages["keys of two pages exchanged"]["kl"] > 10 * none["kl"]
    assert damages["values of two pages exchanged"]["kl"] > 10 * none["kl"]
    assert len(report["formats"][RESTORED]["greedy_agreeing"]) == 3
    assert all(len(figures["attention"]) == 3 for figures in report["formats"].values())
    assert set(report["attention_isolated"]) == {"K16/V8", "K8/V16", "K8/V8"}


async def test_a_cache_that_is_damaged_on_its_way_back_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhold.quality_restored import Tiers as Real

    right = Real.restore

    async def wrong(self: Tiers, pages: list[Blocks], tokens: torch.Tensor) -> None:
        await right(self, pages, tokens)
        self.room.cache.layer(1).value.view(torch.uint8)[int(pages[0].ids[3])].view(-1)[:1] ^= 1

    monkeypatch.setattr(Real, "restore", wrong)
    quality = await measured(tmp_path / "files")
    assert quality.equal == 0
    assert not is_sound(report_of(quality, tiny.model(), seed=0, conditions={}))
