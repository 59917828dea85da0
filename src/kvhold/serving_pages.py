"""Pages of a server: taken with defined contents, poisoned when they are given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import torch

from attention import PagedKVCache, ValueScales
from tiers import Provenance

if TYPE_CHECKING:
    from kvhold.model import LanguageModel
    from transfer._handle import Blocks, Lease

_NAN_16: Final = 0x7FFF
"""NaN in bfloat16 and in float16."""
_NAN_8: Final = 0x7F
"""NaN in float8_e4m3fn."""


def cache_for(
    model: LanguageModel, *, pages: int, page_size: int, device: str | torch.device = "cpu"
) -> PagedKVCache:
    """K16/V8 pages for a model; every token's values carry their own scales.

    Args:
        model: whose layers and heads.
        pages: pages of the pool.
        page_size: tokens of a page.
        device: where they are.
    """
    geometry = model.geometry
    return PagedKVCache(
        layers=geometry.layers,
        pages=pages,
        page_size=page_size,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        scales=ValueScales.per_token(),
        device=device,
    )


def provenance_of(model: LanguageModel, cache: PagedKVCache, *, chunk: int) -> Provenance:
    """What the bytes of the model's pages depend on beside the tokens.

    Args:
        model: the model; its weights' dtype counts, since it decides the keys' last bits.
        cache: the pages.
        chunk: tokens of a prefill step, which decides them too.
    """
    dtype = str(model.network.dtype).removeprefix("torch.")
    return Provenance(
        model=model.name,
        revision=f"{model.revision} {dtype} chunk {chunk}",
        layout=cache.page_layout,
        rope=model.rope,
    )


def poison(cache: PagedKVCache, blocks: Blocks) -> None:
    """Make every number of some pages a NaN: whoever reads one shows it in all that follows."""
    ids = torch.from_numpy(blocks.ids).to(cache.device)
    for layer in range(cache.layers):
        view = cache.layer(layer)
        view.key.view(torch.int16).index_fill_(0, ids, _NAN_16)
        view.value.view(torch.uint8).index_fill_(0, ids, _NAN_8)
        if cache.page_layout.scope is not None:
            view.scale.index_fill_(0, ids, float("nan"))


@final
class PageRoom:
    """Leases of a cache's pages that show when somebody reads what is not theirs.

    Args:
        cache: the pages.

    Attributes:
        still_held: pages that were given back while an operation held them.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.still_held = 0

    async def take(self, count: int) -> Lease[Blocks]:
        """Lease pages, all zero, waiting until as many are free."""
        lease = await self.cache.pool.wait_lease(count)
        self.cache.clear(lease.handle)
        return lease

    def give_back(self, lease: Lease[Blocks]) -> None:
        """Release pages; those that nothing holds are poisoned first."""
        pool, blocks = self.cache.pool, lease.handle
        if pool.holders(blocks):
            self.still_held += sum(bool(pool.holders(block)) for block in blocks)
        else:
            poison(self.cache, blocks)
        lease.release()
