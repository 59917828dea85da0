"""How a model of transformers reads our pages: one attention function, registered by name.

The model's own projections, positions and layers run unchanged. Where it would attend over keys and
values of its own cache, it calls `attend`, and that asks the `Reads` object that came with the
call. So a change of format or of memory is a change of one object, and nothing of the model knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, final

import torch

from attention import PagedDecoder, PagedPrefill
from attention import _reference as reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention import PagedKVCache, PageTable
    from attention._plan import Plan

NAME: Final = "kvhold"
"""What `attn_implementation` calls the function."""


class Reads(Protocol):
    """Where a step's attention writes its new keys and values, and what it reads."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """Take the new tokens in, and attend over everything up to each of them.

        Args:
            layer: layer number.
            query: [batch, tokens, query_heads, head_dim].
            key: [batch, tokens, kv_heads, head_dim], positions applied.
            value: as `key`.
            scale: factor of the scores.

        Returns:
            [batch, tokens, query_heads, head_dim] of the query's dtype.
        """
        ...


class UnknownAttention(ValueError):
    """The model asks for attention that pages do not give: a window, a cap, sinks."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    reads: Reads | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; heads come before tokens there.

    Raises:
        UnknownAttention: the call has no `reads`, or the model wants other than causal attention.
    """
    if reads is None or attention_mask is not None:
        raise UnknownAttention("the model was called without reads=, or with a mask of its own")
    wanted = [name for name in ("sliding_window", "softcap", "s_aux") if _asked(options.get(name))]
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        wanted.append("is_causal=False")
    if wanted:
        raise UnknownAttention(
            f"the model asks for {', '.join(wanted)}; pages give causal attention"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tokens_first = [part.transpose(1, 2) for part in (query, key, value)]
    return reads.attend(module.layer_idx, *tokens_first, scale=scale), None


def _asked(option: object) -> bool:
    """Whether an option asks for something; a tensor does, whatever is in it."""
    return isinstance(option, torch.Tensor) or bool(option)


def register() -> None:
    """Make the function known to transformers; may be repeated."""
    from transformers import AttentionInterface  # noqa: PLC0415 - an optional dependency

    AttentionInterface.register(NAME, attend)


@final
class PagedReads:
    """A step of some requests over pages: new tokens are appended, then everything is read.

    The caller holds the pages until the step is over.

    Args:
        cache: the pages.
        table: the requests' pages, the new tokens included.
        fresh: new tokens of each request; the same number for all of them.
        backend: as for `attention.PagedPrefill`; queries of another dtype than the keys' are
            computed in float32 by plain torch.
    """

    def __init__(
        self, cache: PagedKVCache, table: PageTable, fresh: Sequence[int], *, backend: str = "auto"
    ) -> None:
        self._cache = cache
        self._table = table
        self._fresh = list(fresh)
        self._slots = cache.slots(table, self._fresh)
        self._starts = [sum(self._fresh[:n]) for n in range(len(self._fresh) + 1)]
        self._backend = backend
        self._plans: dict[tuple[int, float], tuple[PagedDecoder | PagedPrefill, Plan]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """See `Reads.attend`."""
        cache = self._cache
        rows = query.flatten(0, 1)
        cache.append(layer, key.flatten(0, 1).to(cache.key_dtype), value.flatten(0, 1), self._slots)
        if query.dtype == cache.key_dtype:
            kernel, plan = self._planned(query.shape[2], scale)
            return kernel.run(plan, layer, rows.contiguous()).view(query.shape)
        found = reference.prefill(
            rows, self._starts, cache.layer(layer), self._table, scale=scale, dtype=torch.float32
        )
        return found.out.to(query.dtype).view(query.shape)

    def _planned(self, heads: int, scale: float) -> tuple[PagedDecoder | PagedPrefill, Plan]:
        """One plan for all layers of the step that attend alike, made by the first of them."""
        key = heads, scale
        if key not in self._plans:
            if set(self._fresh) == {1}:
                decoder = PagedDecoder(None, self._cache, backend=self._backend)
                plan = decoder.plan(self._table, query_heads=heads, sm_scale=scale)
                self._plans[key] = decoder, plan
            else:
                prefill = PagedPrefill(None, self._cache, backend=self._backend)
                plan = prefill.plan(self._table, self._fresh, query_heads=heads, sm_scale=scale)
                self._plans[key] = prefill, plan
        return self._plans[key]
