"""`kvhold quality`: what K16/V8 through the tiers does to a model's next-token distributions.

Every attention read of the measured tokens goes to pages that were stored, dropped, poisoned and
fetched. The 16-bit run, K8/V8 and K8/V16 are computed beside it on the same documents, and so is the
same K16/V8 run without the tiers, which has to agree in every bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, final

import torch

from kvhold.quality_damage import DAMAGES
from kvhold.quality_formats import K8V8, K8V16, K16V8, relative_error
from kvhold.quality_measure import Distance, distances, divergence
from kvhold.quality_restored import Tiers, tiers_of
from kvhold.quality_runs import Reference, Restored, Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from kvhold.model import LanguageModel

    Progress = Callable[[int, int], None]

RESTORED: Final = "K16/V8 restored"
SIMULATED: Final = (K8V8, K8V16)


@dataclass(slots=True)
class Found:
    """One format over all documents.

    Attributes:
        distances: of each document.
        attention: relative RMS error of the attention output by layer, summed over batches.
        greedy: leading tokens of each continuation that agree with the 16-bit run's.
    """

    distances: list[Distance]
    attention: list[float]
    greedy: list[int]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A damage done on purpose to restored pages.

    Attributes:
        what: was damaged.
        bits_differ: whether the logits changed in any bit.
        kl: against 16 bits, with the damage.
    """

    what: str
    bits_differ: bool
    kl: float


@final
class Quality:
    """One measurement.

    Args:
        model: the model.
        documents: token lists of prefix + suffix + 1 tokens.
        settings: size of the run.
        progress: called with batches done, and batches in all.

    Attributes:
        found: by format.
        isolated: relative RMS error of one layer's read with the 16-bit run's query, by format.
        batches: batches measured.
        equal: batches whose restored logits equal the never-offloaded ones in every bit.
        mutations: damages, and what they did.
        simulation: KL of restored K16/V8 from its dense simulation, which shares no code of pages
            with it. It is not 0: sums in another order tip some roundings over, and the deeper the
            model, the more of them (docs/quality.md).
    """

    def __init__(
        self,
        model: LanguageModel,
        documents: list[list[int]],
        *,
        settings: Settings,
        progress: Progress,
    ) -> None:
        self._model = model
        self._tokens = torch.tensor(documents)
        self._settings = settings
        self._progress = progress
        layers = model.geometry.layers
        names = [RESTORED, *(form.name for form in SIMULATED)]
        self.found = {name: Found([], [0.0] * layers, []) for name in names}
        self.reference_nll: list[float] = []
        self.isolated: dict[str, list[float]] = {}
        self.batches = 0
        self.equal = 0
        self.mutations: list[Mutation] = []
        self.simulation = 0.0

    async def run(self, folder: Path) -> None:
        """Measure every batch.

        Args:
            folder: where value files go; nothing is left there.

        Raises:
            TierError: pages could not be stored, or did not come back.
        """
        size = self._settings.batch
        total = len(self._tokens) // size
        self._progress(0, total)
        async with tiers_of(self._model, self._settings.shape, folder) as tiers:
            for number in range(total):
                await self._batch(tiers, self._tokens[number * size : (number + 1) * size])
                self.batches += 1
                self._progress(self.batches, total)

    async def _batch(self, tiers: Tiers, tokens: Tensor) -> None:
        """One batch through every format."""
        is_first = not self.batches
        is_greedy = self.batches * self._settings.batch < self._settings.greedy_documents
        reference = Reference(self._model, self._settings, tokens)
        logits = reference.measure(is_probed=is_first)
        continued = reference.greedy() if is_greedy else None
        if is_first:
            self.isolated = reference.isolated
        zero = distances(logits, logits, reference.targets)
        self.reference_nll += [one.nll for one in zero]
        for form in SIMULATED:
            other = Reference(self._model, self._settings, tokens, form)
            self._compare(form.name, other.measure(), other.outputs, reference, logits)
            if continued is not None:
                self.found[form.name].greedy += divergence(other.greedy(), continued)
        with_tiers = Restored(tiers, self._settings, tokens)
        await with_tiers.offload()
        try:
            found = await with_tiers.measure()
            self._compare(RESTORED, found, with_tiers.outputs, reference, logits)
            self.equal += bool(torch.equal(found, with_tiers.never_offloaded))
            if continued is not None:
                self.found[RESTORED].greedy += divergence(with_tiers.greedy(), continued)
            if is_first:
                await self._first(with_tiers, found, reference, logits)
        finally:
            await with_tiers.close()

    async def _first(
        self, restored: Restored, found: Tensor, reference: Reference, logits: Tensor
    ) -> None:
        """What is done once: an independent simulation, and damages."""
        dense = Reference(self._model, self._settings, restored.tokens, K16V8)
        apart = distances(found, dense.measure(), reference.targets)
        self.simulation = sum(one.kl for one in apart) / len(apart)
        for what, damage in DAMAGES.items():
            damaged = await restored.measure(damage)
            away = distances(damaged, logits, reference.targets)
            self.mutations.append(
                Mutation(
                    what,
                    not torch.equal(damaged, found),
                    sum(one.kl for one in away) / len(away),
                )
            )

    def _compare(
        self,
        name: str,
        logits: Tensor,
        outputs: dict[int, Tensor],
        reference: Reference,
        expected: Tensor,
    ) -> None:
        found = self.found[name]
        found.distances += distances(logits, expected, reference.targets)
        for layer, out in outputs.items():
            found.attention[layer] += relative_error(out, reference.outputs[layer])

    @property
    def settings(self) -> dict[str, object]:
        """Of the run, as data."""
        return asdict(self._settings)
