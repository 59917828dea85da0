"""Runs of one batch: the same tokens in, the same logits out, however they are cut."""

from __future__ import annotations

import torch
from tests.kvhold import tiny

from kvhold.quality_formats import K8V8, K16V16
from kvhold.quality_runs import Reference, Settings

TOKENS = torch.randint(0, 120, (2, 61), generator=torch.Generator().manual_seed(8))


def settings(chunk: int) -> Settings:
    return Settings(documents=2, batch=2, prefix=40, suffix=20, chunk=chunk, page_size=8, greedy=6)


def test_targets_are_the_tokens_behind_those_that_are_run() -> None:
    run = Reference(tiny.model(torch.float32), settings(40), TOKENS)
    logits = run.measure()
    assert logits.shape == (2, 20, 128)
    assert torch.equal(run.targets, TOKENS[:, 41:61])
    assert sorted(run.outputs) == [0, 1, 2]
    assert run.outputs[0].shape == (2, 20, 4, 16)


def test_how_the_prefix_is_cut_does_not_matter() -> None:
    model = tiny.model(torch.float32)
    one, other = (Reference(model, settings(chunk), TOKENS, K16V16) for chunk in (40, 16))
    torch.testing.assert_close(one.measure(), other.measure(), rtol=1e-2, atol=1e-2)


def test_the_greedy_continuation_is_the_most_likely_token_each_time() -> None:
    model = tiny.model(torch.float32)
    run = Reference(model, settings(40), TOKENS, K8V8)
    first = run.measure()[:, 0].argmax(-1)
    found = run.greedy()
    assert found.shape == (2, 6)
    assert torch.equal(found[:, 0], first)
    longer = torch.cat([TOKENS[:, :41], found, found], dim=1)
    again = Reference(model, settings(40), longer[:, :61], K8V8)
    torch.testing.assert_close(again.measure()[:, :6].argmax(-1), found)


def test_probing_changes_no_logit() -> None:
    model = tiny.model(torch.float32)
    plain, probed = (Reference(model, settings(40), TOKENS) for _ in range(2))
    assert torch.equal(plain.measure(), probed.measure(is_probed=True))
    assert plain.isolated == {}
    assert all(len(errors) == 3 for errors in probed.isolated.values())
