"""Damages to restored pages: a measurement that does not see them measures nothing."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvhold.quality_restored import Tiers
    from transfer._handle import Blocks

    Damage = Callable[[Tiers, list[Blocks]], None]


def _swap(tensor: torch.Tensor, pages: list[Blocks]) -> None:
    """Exchange the first two pages of each document."""
    for mine in pages:
        first, second = int(mine.ids[0]), int(mine.ids[1])
        kept = tensor[first].clone()
        tensor[first] = tensor[second]
        tensor[second] = kept


def swap_values(tiers: Tiers, pages: list[Blocks]) -> None:
    """Values of two pages exchanged, in every layer."""
    for layer in range(tiers.room.cache.layers):
        _swap(tiers.room.cache.layer(layer).value.view(torch.uint8), pages)


def swap_keys(tiers: Tiers, pages: list[Blocks]) -> None:
    """Keys of two pages exchanged, in every layer."""
    for layer in range(tiers.room.cache.layers):
        _swap(tiers.room.cache.layer(layer).key.view(torch.int16), pages)


def flip_value(tiers: Tiers, pages: list[Blocks]) -> None:
    """The sign of one value, in one layer of one document."""
    codes = tiers.room.cache.layer(0).value.view(torch.uint8)
    codes[int(pages[0].ids[0])].view(-1)[:1] ^= 0x80


def flip_key(tiers: Tiers, pages: list[Blocks]) -> None:
    """The sign of one element of a key, in one layer of one document."""
    keys = tiers.room.cache.layer(0).key.view(torch.int16)
    keys[int(pages[0].ids[0])].view(-1)[:1] ^= -0x8000


def double_scale(tiers: Tiers, pages: list[Blocks]) -> None:
    """The scales of one page, in one layer of one document."""
    tiers.room.cache.layer(0).scale[int(pages[0].ids[0])] *= 2


DAMAGES: Final = MappingProxyType[str, "Damage | None"](
    {
        "none (fetched again)": None,
        "values of two pages exchanged": swap_values,
        "keys of two pages exchanged": swap_keys,
        "sign of one value": flip_value,
        "sign of one key element": flip_key,
        "scales of one page doubled": double_scale,
    }
)
"""What is done, by name. The first does nothing and has to change nothing."""
