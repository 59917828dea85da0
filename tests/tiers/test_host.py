"""The host tier: layouts, handles of several places, generations."""

from dataclasses import replace

import pytest
import torch
from tests.tiers.store_kit import LAYOUT

from tiers import CapacityExceeded, HostTier, Item, PageOrder
from tiers._form import Form, Placement
from tiers.host import gather, join
from transfer import Block, BlockLayout, Extent, HostPool, LayoutMismatch, Pool, StaleBlock

FORM = Form(LAYOUT, Placement.SPLIT)


def tier_of(blocks: int = 4) -> HostTier:
    return HostTier.of(FORM.stored, ("key",), blocks=blocks)


def item(number: int = 0) -> Item:
    return Item(bytes(32), number.to_bytes(16, "big"), FORM.host_parts, FORM.host_bytes)


def test_other_layouts_are_refused() -> None:
    tier = tier_of()
    tier.check_layout(FORM.stored, ("key",))
    for change in ({"order": PageOrder.HND}, {"key": "float16"}, {"layers": 3}):
        with pytest.raises(LayoutMismatch, match="key"):
            tier.check_layout(replace(FORM.stored, **change), ("key",))
    with pytest.raises(LayoutMismatch, match="missing"):
        tier.check_layout(FORM.stored, ("value",))
    tensors: dict[tuple[str, int | None], torch.Tensor] = {("key", None): torch.zeros(4, 8)}
    plain = BlockLayout((Extent("key", (8,), "float32"),), (32,))
    foreign = Pool.over(tensors, plain)
    with pytest.raises(LayoutMismatch, match="our own"):
        HostTier(foreign)
    tier.close()


def test_memory_of_the_callers() -> None:
    made: list[Pool] = []

    def make(layout: BlockLayout, blocks: int, *, name: str) -> Pool:
        made.append(HostPool(layout, blocks, align=8192, name=name))
        return made[-1]

    tier = HostTier.of(FORM.stored, ("key",), blocks=3, make_pool=make, name="locked")
    assert tier.pool is made[0]
    assert tier.stride == 8192
    assert made[0].name == "locked"
    tier.close()

    def other(layout: BlockLayout, blocks: int, *, name: str) -> Pool:
        return HostPool(layout, blocks + 1, name=name)

    with pytest.raises(LayoutMismatch, match="4 blocks"):
        HostTier.of(FORM.stored, ("key",), blocks=3, make_pool=other)


def test_places_are_blocks_and_come_back() -> None:
    tier = tier_of(3)
    slots = [tier.reserve(item(number)) for number in range(3)]
    assert len({slot.block.id for slot in slots}) == 3
    with pytest.raises(CapacityExceeded, match="free=0"):
        tier.reserve(item())
    assert not isinstance(gather(slots), Block)
    assert isinstance(join([slots[0].block]), Block)
    for slot in slots:
        tier.publish(slot)
        assert tier.evict(slot) == ()
        tier.freed(slot)
        with pytest.raises(StaleBlock):
            _ = slot.block
    assert tier.fits(1) == 3
    assert tier.fits(1 << 20) == 0
    tier.close()


def test_huge_pages_are_advice() -> None:
    tier = HostTier.of(FORM.stored, ("key",), blocks=4, huge=True)
    assert tier.huge in {True, False}
    tier.close()
    assert not tier_of().huge
