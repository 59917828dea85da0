"""The rig of `kvhold.bench.ttft` on a CPU: the packaged model, host memory and files."""

from __future__ import annotations

import shutil
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import torch

from kvhold.bench.ttft import SUFFIX, Prompts, Restored
from kvhold.serving import Answer, Stepper
from kvhold.serving_pages import PageRoom, cache_for, provenance_of
from tiers import DiskTier, HostTier, KVStore, Placement, TierError
from transfer import Engine, FileDevice, HostDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from attention import PagedKVCache
    from kvhold.model import LanguageModel
    from tiers import PageLayout
    from transfer import Blocks

PAGE: Final = 32
CHUNK: Final = 128


@dataclass(frozen=True, slots=True)
class Where:
    """A placement to be measured.

    Attributes:
        name: for people.
        placement: of the store.
        direct: whether files bypass the page cache; None without files.
    """

    name: str
    placement: Placement
    direct: bool | None


PLACES: Final = (
    Where("L1 only", Placement.WHOLE_HOST, None),
    Where("L1 + L2 in the page cache", Placement.SPLIT, direct=False),
    Where("L1 + L2 by O_DIRECT", Placement.SPLIT, direct=True),
)


def fill(cache: PagedKVCache, pages: Blocks) -> None:
    """Random numbers of an ordinary size: what is timed does not depend on what they say."""
    draw = torch.Generator(device=cache.device).manual_seed(0)
    ids = torch.from_numpy(pages.ids).to(cache.device)
    for layer in range(cache.layers):
        view = cache.layer(layer)
        shape = (len(ids), *view.key.shape[1:])
        keys = torch.randn(shape, generator=draw, device=cache.device)
        view.key[ids] = keys.to(view.key.dtype)
        codes = torch.randint(0, 0x70, shape, generator=draw, device=cache.device)
        view.value.view(torch.uint8)[ids] = codes.to(torch.uint8)
        view.scale[ids] = 1 / 448


@final
class CpuRig:
    """A long prefix in the tiers of one placement; see `Rig`.

    Args:
        model: the model.
        store: where the prefixes go.
        room: pages.
        stepper: runs the suffix.
        most: tokens of the longest prefix.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: KVStore,
        room: PageRoom,
        stepper: Stepper,
        *,
        most: int,
    ) -> None:
        layout = room.cache.page_layout
        self.name = model.name
        self.bytes_per_token = sum(part.nbytes for part in layout.components()) / PAGE
        self._model = model
        self._store = store
        self._room = room
        self._stepper = stepper
        self._provenance = provenance_of(model, room.cache, chunk=CHUNK)
        self._prompts = Prompts(int(model.network.config.vocab_size), most)

    async def offload(self) -> None:
        """Put the longest prefix into the tiers, and so all shorter ones.

        Raises:
            PutFailed: some pages could not be stored.
        """
        keys = self._provenance.keys(self._prompts.prefix, extra=b"")
        lease = await self._room.take(len(keys))
        try:
            fill(self._room.cache, lease.handle)
            ticket = await self._store.put(keys, lease.handle)
        finally:
            self._room.give_back(lease)
        await ticket.resident()

    async def recompute(self, length: int) -> float:
        """See `Rig.recompute`."""
        began = time.perf_counter()
        await self._stepper.off_loop(
            self._model.plain, torch.tensor([self._prompts.prompt(length)])
        )
        return time.perf_counter() - began

    async def restore(self, length: int) -> Restored:
        """See `Rig.restore`."""
        tokens = self._prompts.prompt(length)
        lease = await self._room.take(-(-len(tokens) // PAGE))
        try:
            began = time.perf_counter()
            keys = self._provenance.keys(tokens, extra=b"")
            with self._store.lookup(keys, max_tokens=len(tokens) - 1) as hit:
                found = await self._store.fetch(hit, into=lease.handle[: len(hit)])
            there = time.perf_counter()
            if found * PAGE != length:
                raise TierError(f"{found} pages of {length} tokens came back: no measurement")
            await self._stepper.prefill(lease.handle, tokens, length, Answer("timed"))
            return Restored(there - began, time.perf_counter() - there)
        finally:
            lease.release()


@asynccontextmanager
async def cpu_rig(
    model: LanguageModel, where: Where, most: int, folder: Path
) -> AsyncIterator[CpuRig]:
    """A rig for one placement, with its prefix stored; nothing is left behind.

    Args:
        model: the model.
        where: the placement.
        most: tokens of the longest prefix, whole pages.
        folder: where files go.
    """
    pages = most // PAGE
    cache = cache_for(model, pages=pages + -(-SUFFIX // PAGE), page_size=PAGE)
    layout = cache.page_layout
    names = ("key",) if where.placement is Placement.SPLIT else _all_names(layout)
    host = HostTier.of(layout, names, blocks=pages)
    disk = DiskTier(folder) if where.direct is not None else None
    try:
        async with (
            Engine(HostDevice(), FileDevice(direct=where.direct)) as engine,
            KVStore(
                engine, layout=layout, placement=where.placement, host=host, disk=disk
            ) as store,
        ):
            stepper = Stepper(engine, cache, model, chunk=CHUNK)
            rig = CpuRig(model, store, PageRoom(cache), stepper, most=most)
            await rig.offload()
            yield rig
    finally:
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


def _all_names(layout: PageLayout) -> tuple[str, ...]:
    return tuple(part.name for part in layout.components())
