"""PagedDecoder and PagedPrefill: plan once for all layers, run in the caller's stream, finish.

A plan holds its pages with one hold, however many they are: from its first run until the fence
behind `Plan.finish`. In between no page can be given to someone else, whoever releases its lease,
and the caller's stream is never waited for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import torch

from attention._backend import Batch, Room, Wanted
from attention._choice import AUTO, Backends
from attention._errors import PageTableError, Unsupported
from attention._plan import Holder, Plan, check_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention._pages import PageTable
    from attention.cache import PagedKVCache
    from transfer._engine import Engine


class _Paged:
    """What decoding and prefill share."""

    def __init__(
        self,
        engine: Engine | None,
        cache: PagedKVCache,
        *,
        backend: str = AUTO,
        backends: Backends | None = None,
    ) -> None:
        self.cache = cache
        self._backend = backend
        self._backends = Backends() if backends is None else backends
        self._holder = Holder(engine, cache)
        self._views = tuple(cache.layer(layer) for layer in range(cache.layers))

    def _plan(
        self,
        batch: Batch,
        *,
        query_heads: int,
        sm_scale: float | None,
        room: Room | None,
        prefill: bool,
        causal: bool,
    ) -> Plan:
        cache = self.cache
        batch.table.check(cache.pool, cache.page_size)
        wanted = Wanted.of(
            self._views[0],
            query_heads,
            prefill=prefill,
            causal=causal,
            rows=batch.rows[-1],
            others=self._views[1:],
        )
        backend, reason = self._backends.pick(self._backend, wanted)
        scale = 1.0 / math.sqrt(cache.head_dim) if sm_scale is None else sm_scale
        if not 0.0 < scale < math.inf:
            raise Unsupported(f"sm_scale is {scale}: the kernels take a positive, finite one")
        planned = backend.plan(wanted, self._views, batch, sm_scale=scale, room=room)
        return Plan(planned, batch, wanted, (backend.name, reason), self._holder)

    def run(self, plan: Plan, layer: int, query: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Compute one layer on the current stream, without waiting for it.

        Args:
            plan: a plan of this object.
            layer: layer number.
            query: [rows, query_heads, head_dim] of the cache's key dtype.
            out: as query and without gaps, to be written; allocated when None.

        Returns:
            out, of the query's shape and dtype; 0 for a row that sees no key.

        Raises:
            Unsupported: the query, `out` or the layer is not what was planned.
            AttentionError: the plan is finished.
            LeaseError: on the first run, a page is being written in no order with this stream.
        """
        plan.check(query)
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        else:
            plan.check_out(out)
        plan.run(layer, query, out, None)
        return out

    def run_with_lse(self, plan: Plan, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """As `run`, with the log-sum-exp of the scores, for merging with attention over more keys.

        Returns:
            out, and lse float32 [rows, query_heads] in base 2: log2 of the sum of exp(score), as
            FlashInfer has it; times ln 2 it is the natural one. -inf for a row that sees no key.
        """
        plan.check(query)
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        plan.run(layer, query, result, lse)
        return result, lse


@final
class PagedDecoder(_Paged):
    """One new token for each request, over its pages.

    Args:
        engine: holds the pages; None when the host program answers for them itself.
        cache: the pages.
        backend: ``"auto"``, ``"flashinfer"``, ``"flashinfer-cores"``, ``"triton"`` or
            ``"reference"``.
        backends: to share loaded modules between objects.
    """

    def plan(
        self,
        table: PageTable,
        *,
        query_heads: int,
        sm_scale: float | None = None,
        room: Room | None = None,
        k_data_type: torch.dtype | None = None,
        v_data_type: torch.dtype | None = None,
    ) -> Plan:
        """Plan a batch for all layers.

        Args:
            table: the requests' pages; row i of the query belongs to request i.
            query_heads: a multiple of the cache's KV heads.
            sm_scale: factor of the scores, positive; 1 / sqrt(head_dim) when None.
            room: bounds within which `Plan.update` may rewrite the plan under a captured graph.
            k_data_type: what the caller takes the keys to be; checked, as FlashInfer's proposed
                interface has it.
            v_data_type: likewise for the values.

        Raises:
            Unsupported: no backend, or not the one asked for, computes this.
            PageTableError: the table is not of this cache.
        """
        for name, given, real in (
            ("k_data_type", k_data_type, self.cache.key_dtype),
            ("v_data_type", v_data_type, self.cache.value_dtype),
        ):
            if given is not None and given != real:
                raise Unsupported(f"{name} is {given}, the cache holds {real}")
        batch = Batch(table, tuple(range(table.batch + 1)))
        return self._plan(
            batch,
            query_heads=query_heads,
            sm_scale=sm_scale,
            room=room,
            prefill=False,
            causal=False,
        )


@final
class PagedPrefill(_Paged):
    """Several new tokens of each request over its pages, which hold the new tokens too.

    Args: as `PagedDecoder`.
    """

    def plan(
        self,
        table: PageTable,
        fresh: Sequence[int],
        *,
        query_heads: int,
        causal: bool = True,
        sm_scale: float | None = None,
        room: Room | None = None,
    ) -> Plan:
        """Plan a batch for all layers.

        Args:
            table: the requests' pages, the new tokens included.
            fresh: new tokens of each request, its last ones; the query has their rows in order.
            query_heads: a multiple of the cache's KV heads.
            causal: whether a new token sees no token after it.
            sm_scale: factor of the scores, positive; 1 / sqrt(head_dim) when None.
            room: bounds within which `Plan.update` may rewrite the plan under a captured graph.

        Raises:
            Unsupported: no backend, or not the one asked for, computes this.
            PageTableError: the table is not of this cache, or has fewer tokens than are new.
        """
        if len(fresh) != table.batch or any(count < 0 for count in fresh):
            raise PageTableError(f"{table.batch} requests, new tokens {list(fresh)}")
        rows = [0]
        for count in fresh:
            rows.append(rows[-1] + count)
        batch = Batch(table, tuple(rows))
        check_rows(batch, causal=causal)
        return self._plan(
            batch,
            query_heads=query_heads,
            sm_scale=sm_scale,
            room=room,
            prefill=True,
            causal=causal,
        )
