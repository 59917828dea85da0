"""Plans: one hold on all pages of a batch, from the first run until the fence behind `finish`."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, final

import torch

from attention._backend import Batch, Wanted
from attention._errors import AttentionError, PageTableError, Unsupported
from transfer._work import External

if TYPE_CHECKING:
    from torch import Tensor

    from attention._backend import Planned
    from attention._pages import PageTable
    from attention.cache import PagedKVCache
    from transfer._engine import Engine
    from transfer._operation import Operation


class PlanState(enum.Enum):
    """Where a plan is in its life."""

    PLANNED = "planned"
    """Nothing has run: no page is held."""
    HELD = "held"
    """It ran: its pages are held."""
    FINISHED = "finished"
    """The caller said where its work ends; the pages are held until the stream gets there."""


def check_rows(batch: Batch, *, causal: bool) -> None:
    """Under a causal mask a request has at least as many tokens as are new."""
    if not causal:
        return
    lengths = batch.table.lengths.tolist()
    for request, length in enumerate(lengths):
        fresh = batch.rows[request + 1] - batch.rows[request]
        if fresh > length:
            raise PageTableError(
                f"{batch.table.names[request]}: {fresh} new tokens, length {length} with them"
            )


@final
class Plan:
    """One batch, planned: the same for every layer. Made by `PagedDecoder` or `PagedPrefill`.

    Attributes:
        backend: name of the backend that computes it.
        reason: why that one, and what the faster ones refused.
        state: where it is in its life.
    """

    def __init__(
        self, planned: Planned, batch: Batch, wanted: Wanted, choice: tuple[str, str], owner: Holder
    ) -> None:
        self.backend, self.reason = choice
        self.state = PlanState.PLANNED
        self._planned = planned
        self._batch = batch
        self._wanted = wanted
        self._owner = owner
        self._hold: Operation | None = None

    def __repr__(self) -> str:
        return f"<{self.state.value} plan of {self._batch.table.batch} requests on {self.backend}>"

    @property
    def hold(self) -> Operation | None:
        """The operation that holds the pages; None before the first run, or without an engine."""
        return self._hold

    def begin(self) -> None:
        """Take the hold now, before a captured graph is replayed; the first `run` does it too.

        Raises:
            AttentionError: the plan is finished.
            LeaseError: a page is being written, in no order with the current stream.
        """
        if self.state is PlanState.FINISHED:
            raise AttentionError(f"{self!r} is used after finish(): plan anew")
        if self.state is PlanState.PLANNED:
            self._hold = self._owner.take(self._batch.table)
            self.state = PlanState.HELD

    def finish(self) -> None:
        """Say that the current stream holds all work of this plan; the hold ends behind it.

        Legal at any time, and again: only the first call after a run does anything.
        """
        if self.state is PlanState.HELD:
            self._owner.end(self._hold)
        self.state = PlanState.FINISHED

    def update(self, table: PageTable) -> None:
        """Rewrite the plan in place for the next step, so that a captured graph can be replayed.

        The pages of the last step stay held until the current stream has done it; those of this
        one are held from the next `begin` or `run`.

        Args:
            table: as many requests as before.

        Raises:
            Unsupported: it does not fit the plan.
            PageTableError: it is not of the plan's cache.
            AttentionError: the plan is finished.
        """
        if self.state is PlanState.FINISHED:
            raise AttentionError(f"{self!r} is updated after finish(): plan anew")
        self._owner.check(table)
        batch = Batch(table, self._batch.rows)
        check_rows(batch, causal=self._wanted.causal)
        self._planned.update(batch)
        if self.state is PlanState.HELD:
            self._owner.end(self._hold)
            self._hold = None
            self.state = PlanState.PLANNED
        self._batch = batch

    def run(self, layer: int, query: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Compute one layer; see `PagedDecoder.run`."""
        self._owner.check_layer(layer)
        self.begin()
        self._planned.run(layer, query, out, lse)

    def check(self, query: Tensor) -> None:
        """Refuse a query that is not what was planned.

        Raises:
            Unsupported: another shape, dtype, device or stride.
        """
        wanted = self._wanted
        shape = (self._batch.rows[-1], wanted.query_heads, wanted.head_dim)
        if tuple(query.shape) != shape or query.dtype != wanted.key:
            raise Unsupported(
                f"query is {query.dtype}{list(query.shape)}, planned {wanted.key}{list(shape)}"
            )
        if query.device != wanted.device or query.stride(2) != 1:
            raise Unsupported(
                f"query on {query.device} with strides {query.stride()}, planned on "
                f"{wanted.device} with rows in one piece"
            )

    def check_out(self, out: Tensor) -> None:
        """Refuse a place for results that is not of the planned query's form, without gaps.

        Raises:
            Unsupported: another shape, dtype, device or stride.
        """
        wanted = self._wanted
        shape = (self._batch.rows[-1], wanted.query_heads, wanted.head_dim)
        same = tuple(out.shape) == shape and (out.dtype, out.device) == (wanted.key, wanted.device)
        if not same or not out.is_contiguous():
            raise Unsupported(
                f"out is {out.dtype}{list(out.shape)} on {out.device} with strides {out.stride()}, "
                f"planned {wanted.key}{list(shape)} on {wanted.device} without gaps"
            )


@final
class Holder:
    """Holds pages for work that the host program does in its own stream.

    Args:
        engine: whose holds they are; None when the host program answers for the pages itself.
        cache: whose pages.
    """

    def __init__(self, engine: Engine | None, cache: PagedKVCache) -> None:
        self._engine = engine
        self._cache = cache

    def _stream(self) -> object | None:
        if self._cache.device.type == "cpu":
            return None
        return torch.cuda.current_stream(self._cache.device)

    def check(self, table: PageTable) -> None:
        """Refuse a table of another cache.

        Raises:
            PageTableError: it is one.
        """
        table.check(self._cache.pool, self._cache.page_size)

    def check_layer(self, layer: int) -> None:
        """Refuse a layer that the cache does not have.

        Raises:
            Unsupported: it does not.
        """
        if not 0 <= layer < self._cache.layers:
            raise Unsupported(f"layer {layer} of {self._cache.layers}")

    def take(self, table: PageTable) -> Operation | None:
        """One hold on every page of the table, ordered after the current stream."""
        blocks = table.blocks
        if self._engine is None or blocks is None or not len(blocks):
            return None
        stream = self._stream()
        work = External(reads=(blocks,), on=self._cache.pool.kind)
        after: tuple[object, ...] = () if stream is None else (stream,)
        return self._engine.submit_nowait(work, after=after, name="attention")

    def end(self, hold: Operation | None) -> None:
        """End a hold behind what the current stream has now."""
        if hold is not None:
            hold.finish(self._stream())
