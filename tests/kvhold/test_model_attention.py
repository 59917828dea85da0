"""The function that transformers calls, and reads over pages against plain attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.kvhold import tiny

from attention import PageTable
from kvhold.model_attention import PagedReads, UnknownAttention, attend
from kvhold.quality_formats import K16V8, K16V16, DenseReads, relative_error
from kvhold.serving_pages import cache_for
from transfer import Blocks


def call(**options: Any) -> None:
    part = torch.zeros(1, 2, 3, 16)
    attend(SimpleNamespace(layer_idx=0), part, part, part, options.pop("mask", None), **options)


class Nothing:
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        self.seen = layer, tuple(query.shape), scale
        return query


def test_the_tokens_come_first_and_the_scale_is_the_models() -> None:
    reads = Nothing()
    call(reads=reads, scaling=0.5)
    assert reads.seen == (0, (1, 3, 2, 16), 0.5)
    call(reads=reads)
    assert reads.seen == (0, (1, 3, 2, 16), 0.25)


def test_more_than_causal_attention_is_refused() -> None:
    with pytest.raises(UnknownAttention, match="without reads"):
        call()
    with pytest.raises(UnknownAttention, match="mask"):
        call(reads=Nothing(), mask=torch.ones(1))
    with pytest.raises(UnknownAttention, match="sliding_window"):
        call(reads=Nothing(), sliding_window=4)
    with pytest.raises(UnknownAttention, match="softcap"):
        call(reads=Nothing(), softcap=30.0)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 3e-3), (torch.bfloat16, 0.1)])
def test_pages_give_what_a_dense_cache_with_the_same_rounding_gives(
    dtype: torch.dtype, near: float
) -> None:
    # Pages in any order, two requests, prefill in two steps and one token of decode.
    model = tiny.model(dtype)
    cache = cache_for(model, pages=16, page_size=8)
    first, second = cache.lease(5), cache.lease(5)
    pages = [Blocks.gather([first.handle[n] for n in (4, 0, 3, 1, 2)]), second.handle]
    tokens = torch.randint(0, 120, (2, 34), generator=torch.Generator().manual_seed(3))
    dense, wide = (DenseReads(form, model.geometry.layers) for form in (K16V8, K16V16))
    for start, end in ((0, 16), (16, 33), (33, 34)):
        count = -(-end // 8)
        table = PageTable.of(
            [mine[:count] for mine in pages], [end, end], pool=cache.pool, page_size=8
        )
        reads = PagedReads(cache, table, [end - start] * 2)
        ours = model.forward(tokens[:, start:end], start, reads)
        theirs = model.forward(tokens[:, start:end], start, dense)
        assert relative_error(ours, theirs) < near
        exact = model.forward(tokens[:, start:end], start, wide)
        assert dtype is torch.bfloat16 or relative_error(exact, theirs) > 3 * near


def test_what_the_model_says_in_tensors_or_of_its_mask_is_refused_too() -> None:
    with pytest.raises(UnknownAttention, match="s_aux"):
        call(reads=Nothing(), s_aux=torch.zeros(4))
    with pytest.raises(UnknownAttention, match="is_causal"):
        call(reads=Nothing(), is_causal=False)
    call(
        reads=Nothing(), is_causal=True, sliding_window=None, softcap=None, s_aux=None, dropout=0.0
    )


@pytest.mark.parametrize("fresh", [1, 3])
def test_every_layer_has_the_scale_that_it_asks_for(fresh: int) -> None:
    cache = cache_for(tiny.model(), pages=1, page_size=8)
    torch.manual_seed(2)
    query, key, value = (torch.randn(1, fresh, heads, 16).to(torch.bfloat16) for heads in (4, 2, 2))
    with cache.lease(1) as pages:
        table = PageTable.of([pages], [fresh + 2], pool=cache.pool, page_size=8)
        start = PageTable.of([pages], [2], pool=cache.pool, page_size=8)
        PagedReads(cache, start, [2]).attend(
            0,
            *(torch.ones(1, 2, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)),
            scale=1.0,
        )
        apart = [
            PagedReads(cache, table, [fresh]).attend(0, query, key, value, scale=scale)
            for scale in (0.25, 2.0)
        ]
        reads = PagedReads(cache, table, [fresh])
        together = [reads.attend(0, query, key, value, scale=scale) for scale in (0.25, 2.0)]
    assert not torch.equal(*apart)
    assert all(map(torch.equal, apart, together))
