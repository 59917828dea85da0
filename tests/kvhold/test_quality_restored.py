"""Prefixes through the tiers: whole pages, or no measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kvhold import tiny

from kvhold.quality_restored import Shape, tiers_of
from tiers import TierError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]
SHAPE = Shape(batch=2, prefix=32, suffix=8, chunk=16, page_size=8)
TOKENS = torch.randint(0, 120, (2, 40), generator=torch.Generator().manual_seed(5))


async def test_pages_come_back_bit_for_bit_into_others(tmp_path: Path) -> None:
    assert (SHAPE.prefix_pages, SHAPE.pages) == (4, 5)
    async with tiers_of(tiny.model(), SHAPE, tmp_path) as tiers:
        cache = tiers.room.cache
        first, second = [[await tiers.room.take(5) for _ in range(2)] for _ in range(2)]
        tiers.prefill([lease.handle for lease in first], TOKENS)
        await tiers.store([lease.handle for lease in first], TOKENS)
        await tiers.restore([lease.handle for lease in second], TOKENS)
        for one, other in zip(first, second, strict=True):
            mine, theirs = one.handle.ids[:4], other.handle.ids[:4]
            assert set(mine.tolist()).isdisjoint(theirs.tolist())
            for layer in range(3):
                view = cache.layer(layer)
                for part in (view.key.view(torch.int16), view.value.view(torch.uint8), view.scale):
                    assert torch.equal(part[mine], part[theirs])
        suffix = TOKENS[:, 32:]
        logits = [tiers.run([x.handle for x in pages], suffix, 32) for pages in (first, second)]
        assert torch.equal(logits[0], logits[1])
        for lease in (*first, *second):
            lease.release()


async def test_what_was_dropped_is_no_measurement(tmp_path: Path) -> None:
    async with tiers_of(tiny.model(), SHAPE, tmp_path) as tiers:
        leases = [await tiers.room.take(5) for _ in range(2)]
        pages = [lease.handle for lease in leases]
        tiers.prefill(pages, TOKENS)
        await tiers.store(pages, TOKENS)
        await tiers.forget(TOKENS)
        with pytest.raises(TierError, match="0 of 4 pages came back"):
            await tiers.restore(pages, TOKENS)
        for lease in leases:
            lease.release()
