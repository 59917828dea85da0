"""How far two next-token distributions are apart, and how sure that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[np.float64]

ROWS = 256
"""Rows of logits whose softmax is in memory at a time."""


class Interval(NamedTuple):
    """A mean over documents, with its 95 % bootstrap interval.

    Attributes:
        mean: over documents.
        low: 2.5th percentile of resampled means.
        high: 97.5th percentile.
    """

    mean: float
    low: float
    high: float


class Distance(NamedTuple):
    """One document under a format, against the same document under 16 bits; means over tokens.

    Attributes:
        nll: negative log-likelihood in nats per token.
        change: that, less the 16-bit run's.
        kl: divergence of the format's distribution from the 16-bit one, in nats.
        agreement: share of tokens whose most likely token is the same.
    """

    nll: float
    change: float
    kl: float
    agreement: float


def distances(logits: Tensor, reference: Tensor, targets: Tensor) -> list[Distance]:
    """Compare two runs over some documents.

    KL is sum over tokens of p log(p / q), p the reference's distribution; in float64 where it is summed.

    Args:
        logits: float32 [documents, tokens, vocabulary] of the format.
        reference: the same of the 16-bit run.
        targets: int64 [documents, tokens], the token that really follows.
    """
    return [
        _distance(one, other, target)
        for one, other, target in zip(logits, reference, targets, strict=True)
    ]


def _distance(logits: Tensor, reference: Tensor, targets: Tensor) -> Distance:
    sums = np.zeros(4)
    for start in range(0, len(targets), ROWS):
        rows = slice(start, start + ROWS)
        ours = torch.log_softmax(logits[rows], dim=-1)
        theirs = torch.log_softmax(reference[rows], dim=-1)
        wanted = targets[rows, None]
        nll = -ours.gather(1, wanted).double().sum()
        before = -theirs.gather(1, wanted).double().sum()
        kl = (theirs.exp() * (theirs - ours)).sum(dim=-1).double().sum()
        same = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum()
        sums += [float(nll), float(nll - before), float(kl), float(same)]
    nll_mean, change, kl_mean, agreement = (sums / len(targets)).tolist()
    return Distance(nll_mean, change, kl_mean, agreement)


@final
class Bootstrap:
    """Intervals by resampling documents; the same samples for every figure, so that ratios pair.

    Args:
        documents: how many there are.
        seed: of the samples.
        rounds: how many samples.
    """

    def __init__(self, documents: int, *, seed: int, rounds: int = 4000) -> None:
        random = np.random.default_rng(seed)
        self._samples = random.integers(0, documents, size=(rounds, documents))

    def mean(self, values: list[float]) -> Interval:
        """The mean of a figure over documents."""
        data = np.asarray(values, dtype=np.float64)
        return _interval(float(data.mean()), data[self._samples].mean(axis=1))

    def ratio(self, above: list[float], below: list[float]) -> Interval:
        """The ratio of two means over the same documents."""
        top, bottom = np.asarray(above), np.asarray(below)
        means = top[self._samples].mean(axis=1) / bottom[self._samples].mean(axis=1)
        return _interval(float(top.mean() / bottom.mean()), means)


def _interval(value: float, resampled: Floats) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5]).tolist()
    return Interval(value, low, high)


def divergence(tokens: Tensor, reference: Tensor) -> list[int]:
    """How many leading tokens of each row agree.

    Args:
        tokens: int64 [documents, tokens].
        reference: the same of the 16-bit run.
    """
    same = (tokens == reference).int()
    leading: list[int] = same.cumprod(dim=1).sum(dim=1).tolist()
    return leading
