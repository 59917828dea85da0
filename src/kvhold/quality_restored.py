"""K16/V8 as the tiers give it back: pages are stored, dropped, poisoned, fetched, and only then read."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from attention import PageTable
from kvhold.model_attention import PagedReads
from kvhold.serving_pages import PageRoom, cache_for, poison, provenance_of
from tiers import DiskTier, HostTier, KVStore, Placement, TierError
from transfer import Engine, FileDevice, HostDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from torch import Tensor

    from kvhold.model import LanguageModel
    from kvhold.model_attention import Reads
    from transfer._handle import Blocks

    Wrap = Callable[[Reads], Reads]


@dataclass(frozen=True, slots=True)
class Shape:
    """How documents are cut.

    Attributes:
        batch: documents at a time.
        prefix: tokens that go through the tiers, a multiple of the chunk.
        suffix: tokens that are predicted, each from what was restored.
        chunk: tokens of a prefill step.
        page_size: tokens of a page.
    """

    batch: int
    prefix: int
    suffix: int
    chunk: int
    page_size: int

    @property
    def prefix_pages(self) -> int:
        """Pages of one document's prefix."""
        return self.prefix // self.page_size

    @property
    def pages(self) -> int:
        """Pages of one document."""
        return -(-(self.prefix + self.suffix) // self.page_size)


@final
class Tiers:
    """A page cache with a store of keys in host memory and values in files behind it.

    Args:
        engine: started.
        store: started, for the cache's pages.
        room: the cache's pages.
        model: whose pages.
        shape: how documents are cut.
    """

    def __init__(
        self, engine: Engine, store: KVStore, room: PageRoom, model: LanguageModel, shape: Shape
    ) -> None:
        self.engine = engine
        self.room = room
        self.shape = shape
        self._store = store
        self._model = model
        self._provenance = provenance_of(model, room.cache, chunk=shape.chunk)

    def run(
        self,
        pages: list[Blocks],
        tokens: Tensor,
        start: int,
        *,
        wrap: Wrap | None = None,
        last: bool = False,
    ) -> Tensor:
        """Append tokens to documents of `start` tokens each; logits of all of them.

        Args:
            pages: of each document.
            tokens: int64 [documents, tokens].
            start: tokens before them.
            wrap: what to put around the reads.
            last: give the logits of the last token alone.
        """
        length, cache = start + tokens.shape[1], self.room.cache
        count = -(-length // cache.page_size)
        table = PageTable.of(
            [mine[:count] for mine in pages],
            [length] * len(pages),
            pool=cache.pool,
            page_size=cache.page_size,
        )
        reads: Reads = PagedReads(cache, table, [tokens.shape[1]] * len(pages))
        return self._model.forward(tokens, start, reads if wrap is None else wrap(reads), last=last)

    def prefill(self, pages: list[Blocks], tokens: Tensor) -> None:
        """Compute the prefixes of some documents."""
        for start in range(0, self.shape.prefix, self.shape.chunk):
            end = min(start + self.shape.chunk, self.shape.prefix)
            self.run(pages, tokens[:, start:end], start, last=True)

    async def store(self, pages: list[Blocks], tokens: Tensor) -> None:
        """Store the prefixes, whole or not at all.

        Raises:
            PutFailed: some pages could not be stored.
        """
        for mine, row in zip(pages, tokens[:, : self.shape.prefix].tolist(), strict=True):
            keys = self._provenance.keys(row, extra=b"")
            ticket = await self._store.put(keys, mine[: len(keys)])
            await ticket.resident()

    async def restore(self, pages: list[Blocks], tokens: Tensor) -> None:
        """Fetch the prefixes into pages full of NaN.

        Raises:
            TierError: a page did not come back.
        """
        for mine, row in zip(pages, tokens[:, : self.shape.prefix].tolist(), strict=True):
            keys = self._provenance.keys(row, extra=b"")
            target = mine[: len(keys)]
            poison(self.room.cache, target)
            with self._store.lookup(keys) as hit:
                found = await self._store.fetch(hit, into=target)
            if found != len(keys):
                raise TierError(f"{found} of {len(keys)} pages came back: no measurement")

    async def forget(self, tokens: Tensor) -> None:
        """Let the store drop the prefixes: the next documents need the room."""
        for row in tokens[:, : self.shape.prefix].tolist():
            self._store.remove(self._provenance.keys(row, extra=b""))
        await self._store.drain()


@asynccontextmanager
async def tiers_of(model: LanguageModel, shape: Shape, folder: Path) -> AsyncIterator[Tiers]:
    """Everything that `Tiers` needs, for as long as the block lasts.

    Args:
        model: whose pages.
        shape: how documents are cut.
        folder: where value files go.
    """
    cache = cache_for(
        model,
        pages=2 * shape.batch * shape.pages,
        page_size=shape.page_size,
        device=torch.device("cpu"),
    )
    layout = cache.page_layout
    host = HostTier.of(layout, ("key",), blocks=shape.batch * shape.prefix_pages)
    try:
        async with (
            Engine(HostDevice(), FileDevice()) as engine,
            KVStore(
                engine,
                layout=layout,
                placement=Placement.SPLIT,
                host=host,
                disk=DiskTier(folder),
            ) as store,
        ):
            yield Tiers(engine, store, PageRoom(cache), model, shape)
    finally:
        host.close()
