"""One batch of documents under a format: dense and rounded, or over pages that come from the tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from kvhold.quality_formats import K8V8, K8V16, K16V8, K16V16, DenseReads, Format, Probed, Watched
from kvhold.quality_restored import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvhold.model import LanguageModel
    from kvhold.model_attention import Reads
    from kvhold.quality_restored import Tiers
    from transfer._handle import Blocks, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Size of a run.

    Attributes:
        documents: how many, a multiple of `batch`.
        prefix: tokens of each that go through the tiers.
        suffix: tokens of each that are predicted.
        batch: documents at a time.
        chunk: tokens of a prefill step.
        page_size: tokens of a page.
        greedy_documents: documents whose greedy continuation is compared.
        greedy: tokens of it.
        seed: of the bootstrap.
        dtype: of the model; float32 shows the formats alone, with no rounding of its own.
    """

    documents: int = 80
    prefix: int = 256
    suffix: int = 256
    batch: int = 4
    chunk: int = 256
    page_size: int = 32
    greedy_documents: int = 16
    greedy: int = 32
    seed: int = 0
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        """How documents are cut."""
        return Shape(self.batch, self.prefix, self.suffix, self.chunk, self.page_size)


@final
class Reference:
    """A dense run of one batch under a format; 16 bits are what everything is compared with.

    Args:
        model: the model.
        settings: of the run.
        tokens: int64 [documents, prefix + suffix + 1].
        form: how keys and values are rounded.

    Attributes:
        targets: the tokens that are predicted, int64 [documents, suffix].
        outputs: attention outputs of the suffix, by layer.
        isolated: see `Quality.isolated`.
    """

    def __init__(
        self, model: LanguageModel, settings: Settings, tokens: Tensor, form: Format = K16V16
    ) -> None:
        self._model = model
        self._settings = settings
        self._tokens = tokens
        self._reads = DenseReads(form, model.geometry.layers)
        self.targets = tokens[:, settings.prefix + 1 : settings.prefix + settings.suffix + 1]
        self.outputs: dict[int, Tensor] = {}
        self.isolated: dict[str, list[float]] = {}

    def measure(self, *, is_probed: bool = False) -> Tensor:
        """Logits of the suffix, float32 [documents, suffix, vocabulary]."""
        prefix, chunk = self._settings.prefix, self._settings.chunk
        for start in range(0, prefix, chunk):
            end = min(start + chunk, prefix)
            self._model.forward(self._tokens[:, start:end], start, self._reads, last=True)
        probe = Probed(self._reads, (K16V8, K8V16, K8V8)) if is_probed else None
        watched = Watched(probe or self._reads)
        suffix = self._tokens[:, prefix : prefix + self._settings.suffix]
        logits = self._model.forward(suffix, prefix, watched)
        self.outputs = watched.outputs
        if probe is not None:
            self.isolated = {
                form.name: [errors[layer] for layer in sorted(errors)]
                for form, errors in probe.errors.items()
            }
        return logits

    def greedy(self) -> Tensor:
        """The continuation of the prefix and one token, int64 [documents, tokens]."""
        prefix = self._settings.prefix
        self._reads.length = prefix

        def step(tokens: Tensor, at: int) -> Tensor:
            return self._model.forward(tokens, at, self._reads, last=True)

        return torch.cat(list(_continued(step, self._tokens, self._settings)), dim=1)


def _continued(
    step: Callable[[Tensor, int], Tensor], tokens: Tensor, settings: Settings
) -> Iterator[Tensor]:
    current = tokens[:, settings.prefix : settings.prefix + 1]
    for number in range(settings.greedy):
        current = step(current, settings.prefix + number)[:, -1].argmax(dim=-1, keepdim=True)
        yield current


@final
class Restored:
    """A run of one batch over pages that come from the tiers.

    Args:
        tiers: cache and store.
        settings: of the run.
        tokens: int64 [documents, prefix + suffix + 1].

    Attributes:
        never_offloaded: logits of the suffix over the pages before they were stored.
        outputs: attention outputs of the last measurement, by layer.
    """

    def __init__(self, tiers: Tiers, settings: Settings, tokens: Tensor) -> None:
        self.tokens = tokens
        self.never_offloaded = torch.empty(0)
        self.outputs: dict[int, Tensor] = {}
        self._tiers = tiers
        self._settings = settings
        self._leases: list[Lease[Blocks]] = []

    async def _lease(self) -> list[Blocks]:
        count = self._tiers.shape.pages
        self._leases = [await self._tiers.room.take(count) for _ in self.tokens]
        return [lease.handle for lease in self._leases]

    def _give_back(self) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            self._tiers.room.give_back(lease)

    async def offload(self) -> None:
        """Compute the pages, read them once as they are, store them, and drop them poisoned."""
        pages = await self._lease()
        try:
            self._tiers.prefill(pages, self.tokens)
            self.never_offloaded = self._suffix(pages)
            await self._tiers.store(pages, self.tokens)
        finally:
            self._give_back()

    async def measure(self, damage: Callable[[Tiers, list[Blocks]], None] | None = None) -> Tensor:
        """Fetch the prefix into other pages, damage it if asked to, and read it.

        Returns:
            Logits of the suffix, float32 [documents, suffix, vocabulary].
        """
        self._give_back()
        pages = await self._lease()
        await self._tiers.restore(pages, self.tokens)
        if damage is not None:
            damage(self._tiers, pages)
        return self._suffix(pages)

    def _suffix(self, pages: list[Blocks]) -> Tensor:
        prefix, suffix = self._settings.prefix, self._settings.suffix
        watched: list[Watched] = []

        def wrap(reads: Reads) -> Reads:
            watched.append(Watched(reads))
            return watched[-1]

        logits = self._tiers.run(pages, self.tokens[:, prefix : prefix + suffix], prefix, wrap=wrap)
        self.outputs = watched[-1].outputs
        return logits

    def greedy(self) -> Tensor:
        """As `Reference.greedy`, over the restored pages."""
        pages = [lease.handle for lease in self._leases]

        def step(tokens: Tensor, at: int) -> Tensor:
            return self._tiers.run(pages, tokens, at, last=True)

        return torch.cat(list(_continued(step, self.tokens, self._settings)), dim=1)

    async def close(self) -> None:
        """Give the pages back, and let the store drop its own."""
        self._give_back()
        await self._tiers.forget(self.tokens)
