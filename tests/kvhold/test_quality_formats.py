"""Formats: what is read back of 16 and 8 bits, and dense caches that round as they keep."""

from __future__ import annotations

import pytest
import torch

from kvhold.quality_formats import (
    K8V8,
    K8V16,
    K16V8,
    K16V16,
    DenseReads,
    Probed,
    Watched,
    dense_attention,
    relative_error,
    rounded,
)


def parts(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((2, tokens, 4, 16), (2, tokens, 2, 16), (2, tokens, 2, 16))
    return [torch.randn(shape, generator=draw) for shape in shapes]


def test_8_bits_have_the_noise_of_e4m3_and_16_bits_that_of_bfloat16() -> None:
    data = torch.randn(50, 100, 2, 64, generator=torch.Generator().manual_seed(0))
    # E4M3 on Gaussian data: 0.0264 to 0.0266 under one scale for all, a little less with one for
    # each 64 elements, whose largest is then exact.
    assert 0.0245 < relative_error(rounded(data, 8), data) < 0.0266
    assert relative_error(rounded(data, 16), data) == pytest.approx(1.65e-3, rel=0.1)
    assert torch.equal(rounded(data, 16), data.bfloat16().float())


def test_every_token_and_head_has_its_own_scale() -> None:
    data = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0))
    data[1, 0] *= 1e4
    data[2, 1] *= 1e-4
    for token in range(4):
        for head in range(2):
            one = relative_error(rounded(data, 8)[token, head], data[token, head])
            assert 0.01 < one < 0.05
    assert torch.equal(rounded(torch.zeros(1, 1, 8), 8), torch.zeros(1, 1, 8))


def test_dense_attention_is_causal_softmax() -> None:
    query, key, value = parts(5)
    found = dense_attention(query[:, 3:], key, value, scale=0.3)
    for row, limit in ((0, 4), (1, 5)):
        for head in range(4):
            scores = (query[:, 3 + row, head, None] * key[:, :limit, head // 2]).sum(-1) * 0.3
            weights = scores.softmax(-1)[..., None]
            expected = (weights * value[:, :limit, head // 2]).sum(1)
            torch.testing.assert_close(found[:, row, head], expected)


def test_reads_in_steps_are_reads_at_once_and_can_be_set_back() -> None:
    query, key, value = parts(12)
    whole = DenseReads(K8V8, 1).attend(0, query, key, value, scale=0.25)
    steps = DenseReads(K8V8, 1)
    for start, end in ((0, 5), (5, 12)):
        found = steps.attend(
            0, query[:, start:end], key[:, start:end], value[:, start:end], scale=0.25
        )
        torch.testing.assert_close(found, whole[:, start:end])
    assert steps.length == 12
    steps.length = 5
    again = steps.attend(0, query[:, 5:], key[:, 5:], value[:, 5:], scale=0.25)
    torch.testing.assert_close(again, whole[:, 5:])


def test_each_format_rounds_what_it_says() -> None:
    query, key, value = parts(9)
    for form in (K16V16, K16V8, K8V16, K8V8):
        reads = DenseReads(form, 1)
        reads.attend(0, query, key, value, scale=0.25)
        keys, values = reads.kept(0)
        assert torch.equal(keys, rounded(key, form.key))
        assert torch.equal(values, rounded(value, form.value))
    assert [form.name for form in (K16V8, K8V16)] == ["K16/V8", "K8/V16"]


def test_a_probe_changes_nothing_and_sees_one_layer_at_a_time() -> None:
    query, key, value = parts(30)
    plain = DenseReads(K16V16, 2)
    probe = Probed(DenseReads(K16V16, 2), (K16V8, K16V16))
    watched = Watched(probe)
    for layer in range(2):
        expected = plain.attend(layer, query, key, value, scale=0.25)
        assert torch.equal(watched.attend(layer, query, key, value, scale=0.25), expected)
        assert torch.equal(watched.outputs[layer], expected)
    assert probe.errors[K16V16] == {0: 0.0, 1: 0.0}
    assert all(0.005 < error < 0.05 for error in probe.errors[K16V8].values())
