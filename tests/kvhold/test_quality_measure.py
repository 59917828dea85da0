"""Distances between distributions against their definitions, and intervals that resample documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvhold.quality_measure import Bootstrap, distances, divergence


def test_distances_follow_their_definitions() -> None:
    draw = torch.Generator().manual_seed(4)
    reference = torch.randn(3, 300, 17, generator=draw)
    logits = reference + 0.3 * torch.randn(3, 300, 17, generator=draw)
    targets = torch.randint(0, 17, (3, 300), generator=draw)
    found = distances(logits, reference, targets)

    def softmax(x: np.ndarray) -> np.ndarray:
        powers = np.exp(x - x.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))

    p, q = (softmax(x.double().numpy()) for x in (reference, logits))
    rows, places = np.indices(targets.shape)
    nll, before = (-np.log(x[rows, places, targets.numpy()]).mean(1) for x in (q, p))
    kl = (p * np.log(p / q)).sum(-1).mean(1)
    same = (p.argmax(-1) == q.argmax(-1)).mean(1)
    np.testing.assert_allclose([one.nll for one in found], nll, rtol=1e-5)
    np.testing.assert_allclose([one.change for one in found], nll - before, rtol=1e-4)
    np.testing.assert_allclose([one.kl for one in found], kl, rtol=1e-4)
    assert [one.agreement for one in found] == pytest.approx(same.tolist())
    assert 0 < min(one.agreement for one in found) < 1


def test_a_run_is_no_distance_from_itself() -> None:
    logits = torch.randn(2, 10, 5)
    for one in distances(logits, logits, torch.zeros(2, 10, dtype=torch.int64)):
        assert (one.change, one.kl, one.agreement) == (0.0, 0.0, 1.0)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        values = random.normal(3.0, 1.0, size=40).tolist()
        found = Bootstrap(40, seed=seed, rounds=400).mean(values)
        assert found.low < found.mean < found.high
        hits += found.low <= 3.0 <= found.high
    assert 0.88 < hits / 200 < 0.99


def test_a_ratio_pairs_the_documents() -> None:
    # Documents differ by far more than the ratio does: unpaired, the interval would be wide.
    below = np.random.default_rng(1).lognormal(0, 2, size=50)
    found = Bootstrap(50, seed=1).ratio((5 * below).tolist(), below.tolist())
    assert found.mean == pytest.approx(5)
    assert found.high - found.low < 1e-6


def test_equal_seeds_give_equal_intervals_and_others_do_not() -> None:
    values = [float(n * n) for n in range(20)]
    one, same, other = (Bootstrap(20, seed=seed).mean(values) for seed in (5, 5, 6))
    assert one == same
    assert one.mean == other.mean
    assert one.low != other.low


def test_divergence_counts_leading_agreement() -> None:
    reference = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    tokens = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    assert divergence(tokens, reference) == [3, 1, 0]
