"""The rig of `kvhold.bench.ttft` on a GPU: random weights in the geometry of Llama-3.1-8B, BF16.

The time of a forward does not depend on what the weights say, so random ones serve; the answers mean
nothing. A store keeps its staging in ordinary memory, which a GPU cannot reach by DMA: pages pass
through page-locked ones in between, and the figures have that copy in them. The first placement
shows the link without it.
"""

from __future__ import annotations

import shutil
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import torch

from kvhold.bench.ttft import SUFFIX, Prompts, Restored, as_data, measure
from kvhold.bench.ttft_command import report_of
from kvhold.bench.ttft_cpu import PLACES, Where, fill
from kvhold.model import LanguageModel
from kvhold.model_attention import NAME, register
from kvhold.serving import Answer, Stepper
from kvhold.serving_pages import PageRoom, cache_for, provenance_of
from tiers import DiskTier, HostTier, KVStore, Placement, TierError
from transfer import Engine, FileDevice, HostDevice
from transfer.cuda import CudaDevice, PinnedPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tiers import Keys
    from transfer import Blocks

PAGE: Final = 16
CHUNK: Final = 512
LINK: Final = "L1 only, page-locked slots, engine alone"


GEOMETRY: Final = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}


def make_model(layers: int = 32, *, device: str = "cuda", **sizes: int) -> LanguageModel:
    """Random weights, the same every time.

    Args:
        layers: fewer for a quick look.
        device: where they are made.
        sizes: other ones than those of Llama-3.1-8B, by their names in `GEOMETRY`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - seconds of import

    register()
    config = LlamaConfig(
        **{**GEOMETRY, **sizes},
        num_hidden_layers=layers,
        rope_theta=500000.0,
        attn_implementation=NAME,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            network = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return LanguageModel(
        network, None, name=f"random weights, Llama-3.1-8B geometry, {layers} layers", revision="0"
    )


@final
class GpuRig:
    """A long prefix in host memory or in the tiers of one placement; see `Rig`.

    Args:
        model: on the GPU.
        engine: with the GPU, host memory and files.
        store: where the prefix goes; None keeps it in page-locked slots of our own.
        room: pages on the GPU.
        between: page-locked pages.
        most: tokens of the longest prefix.
    """

    def __init__(
        self,
        model: LanguageModel,
        engine: Engine,
        store: KVStore | None,
        room: PageRoom,
        between: PinnedPool,
        *,
        most: int,
    ) -> None:
        cache = room.cache
        self.name = model.name
        self.bytes_per_token = sum(part.nbytes for part in cache.page_layout.components()) / PAGE
        self._model = model
        self._engine = engine
        self._store = store
        self._room = room
        self._stepper = Stepper(engine, cache, model, chunk=CHUNK)
        self._provenance = provenance_of(model, cache, chunk=CHUNK)
        self._prompts = Prompts(int(model.network.config.vocab_size), most)
        self._lease = between.lease(most // PAGE)
        self._slots = self._lease.handle
        self._known: dict[bytes, int] = {}

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._room.cache.device)

    async def offload(self) -> None:
        """Fill pages on the GPU, and bring them to where they are to be fetched from.

        Raises:
            PutFailed: some pages could not be stored.
        """
        keys = self._provenance.keys(self._prompts.prefix, extra=b"")
        lease = await self._room.take(len(keys))
        try:
            fill(self._room.cache, lease.handle)
            await self._engine.copy(lease.handle, self._slots, after=self._stream())
        finally:
            self._room.give_back(lease)
        if self._store is None:
            self._known = {digest: number for number, digest in enumerate(keys.digests)}
        else:
            await (await self._store.put(keys, self._slots)).resident()

    async def recompute(self, length: int) -> float:
        """See `Rig.recompute`."""
        tokens = torch.tensor([self._prompts.prompt(length)], device=self._model.device)
        torch.cuda.synchronize()
        began = time.perf_counter()
        await self._stepper.off_loop(self._model.plain, tokens)
        return time.perf_counter() - began

    async def restore(self, length: int) -> Restored:
        """See `Rig.restore`."""
        tokens = self._prompts.prompt(length)
        lease = await self._room.take(-(-len(tokens) // PAGE))
        torch.cuda.synchronize()
        try:
            began = time.perf_counter()
            found = await self._fetch(self._provenance.keys(tokens, extra=b""), lease.handle)
            there = time.perf_counter()
            if found * PAGE != length:
                raise TierError(f"{found} pages of {length} tokens came back: no measurement")
            await self._stepper.prefill(lease.handle, tokens, length, Answer("timed"))
            return Restored(there - began, time.perf_counter() - there)
        finally:
            lease.release()

    async def _fetch(self, keys: Keys, pages: Blocks) -> int:
        """Bring the pages of the prefix to the GPU; how many."""
        if self._store is None:
            found = 0
            while found < len(keys) and self._known.get(keys.digests[found]) == found:
                found += 1
        else:
            with self._store.lookup(keys) as hit:
                found = await self._store.fetch(hit, into=self._slots[: len(hit)])
        await self._engine.copy(self._slots[:found], pages[:found], after=self._stream())
        return found


@asynccontextmanager
async def gpu_rig(
    model: LanguageModel, where: Where | None, most: int, folder: Path
) -> AsyncIterator[GpuRig]:
    """A rig for one placement, with its prefix stored; nothing is left behind.

    Args:
        model: on the GPU.
        where: the placement; None for the link alone.
        most: tokens of the longest prefix, whole pages.
        folder: where files go.
    """
    pages = most // PAGE
    cache = cache_for(model, pages=pages + -(-SUFFIX // PAGE), page_size=PAGE, device=model.device)
    layout = cache.page_layout
    between = PinnedPool(layout, pages, name="page-locked pages")
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(between.close)
        direct = None if where is None else where.direct
        devices = (CudaDevice(0), HostDevice(threads=8), FileDevice(threads=8, direct=direct))
        engine = await stack.enter_async_context(Engine(*devices))
        store = None
        if where is not None:
            split = where.placement is Placement.SPLIT
            names = ("key",) if split else tuple(part.name for part in layout.components())
            host = HostTier.of(layout, names, blocks=pages)
            stack.callback(host.close)
            disk = DiskTier(folder) if split else None
            store = await stack.enter_async_context(
                KVStore(engine, layout=layout, placement=where.placement, host=host, disk=disk)
            )
        rig = GpuRig(model, engine, store, PageRoom(cache), between, most=most)
        await rig.offload()
        yield rig


async def run_gpu(
    lengths: tuple[int, ...],
    *,
    rounds: int,
    folder: Path,
    progress: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
    layers: int = 32,
) -> dict[str, Any]:
    """All placements one after the other.

    Args:
        lengths: tokens of the prefixes, whole pages.
        rounds: how many are counted.
        folder: where files go.
        progress: called with the placement's name whenever a length of it is done.
        keep: called with the report so far when a placement is done.
        layers: of the model.
    """
    model = make_model(layers)
    places: list[Where | None] = [None, *PLACES]
    placements: dict[str, Any] = {}
    report: dict[str, Any] = {}
    for where in places:
        name = LINK if where is None else f"{where.name}, by way of page-locked pages"
        async with gpu_rig(model, where, max(lengths), folder / "ttft") as rig:
            step = partial(progress, name)
            points = await measure(rig, lengths, rounds=rounds, progress=step)
            placements[name] = as_data(points)
            report = report_of(rig, placements, rounds=rounds)
        report["gpu"] = torch.cuda.get_device_name(0)
        keep(report)
        torch.cuda.empty_cache()
    return report
