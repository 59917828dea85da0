"""Damages: each changes what it says in the pages it is given, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
from tests.kvhold import tiny

from kvhold.quality_damage import DAMAGES
from kvhold.serving_pages import PageRoom, cache_for

if TYPE_CHECKING:
    from kvhold.quality_restored import Tiers

KEYS, VALUES, SCALES = "keys", "values", "scales"
CHANGED = {
    "values of two pages exchanged": {(VALUES, layer): 2 for layer in range(3)},
    "keys of two pages exchanged": {(KEYS, layer): 2 for layer in range(3)},
    "sign of one value": {(VALUES, 0): 1},
    "sign of one key element": {(KEYS, 0): 1},
    "scales of one page doubled": {(SCALES, 0): 1},
}


def test_each_damage_changes_what_it_says() -> None:
    cache = cache_for(tiny.model(), pages=6, page_size=8)
    lease = cache.lease(4)
    tiers = cast("Tiers", SimpleNamespace(room=PageRoom(cache)))
    assert {what for what, damage in DAMAGES.items() if damage} == set(CHANGED)
    for what, damage in DAMAGES.items():
        if damage is None:
            continue
        for layer in range(3):
            view = cache.layer(layer)
            view.key.normal_()
            view.value.view(torch.uint8).random_(0, 0x70)
            view.scale.fill_(0.5)
        before = state(tiers)
        damage(tiers, [lease.handle])
        after = state(tiers)
        pages = {
            name: int((after[name] != before[name]).flatten(1).any(1).sum())
            for name in before
            if not torch.equal(after[name], before[name])
        }
        assert pages == CHANGED[what]


def state(tiers: Tiers) -> dict[tuple[str, int], torch.Tensor]:
    found = {}
    for layer in range(3):
        view = tiers.room.cache.layer(layer)
        found[KEYS, layer] = view.key.view(torch.int16).clone()
        found[VALUES, layer] = view.value.view(torch.uint8).clone()
        found[SCALES, layer] = view.scale.clone()
    return found
