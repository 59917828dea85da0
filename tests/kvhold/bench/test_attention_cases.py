"""Inputs of the attention sweep: poisoned where nothing may be read, and judged without mercy."""

import math

import pytest
import torch

from kvhold.bench.attention_cases import Case, build, lse_error, relative_error, shuffled_table
from tiers._layout import PageOrder, ScaleScope


@pytest.mark.parametrize("order", list(PageOrder))
@pytest.mark.parametrize("scope", [ScaleScope.HEAD, ScaleScope.TOKEN_HEAD])
def test_unused_slots_are_poisoned_and_used_ones_are_not(
    order: PageOrder, scope: ScaleScope
) -> None:
    case = Case(order=order, scope=scope, head_dim=16, page_size=4, lengths=(0, 5, 8))
    view, table, _, _ = build(case)
    live = torch.zeros(view.pages * 4, dtype=torch.bool)
    live[torch.from_numpy(table.slots(table.lengths))] = True
    keys = view.by_token(view.key).reshape(-1, 2, 16)
    values = view.by_token(view.value).to(torch.float32).reshape(-1, 2, 16)
    assert torch.isfinite(keys[live]).all()
    assert torch.isnan(keys[~live]).all()
    assert torch.isfinite(values[live]).all()
    assert torch.isnan(values[~live]).all()
    if scope is ScaleScope.TOKEN_HEAD:
        assert torch.isnan(view.by_token(view.scale).reshape(-1, 2)[~live]).all()


def test_the_same_seed_makes_the_same_inputs() -> None:
    one, same, other = (build(Case(head_dim=16, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(one.query, same.query)
    assert one.table.indices.tolist() == same.table.indices.tolist()
    assert not torch.equal(one.query, other.query)


def test_pages_are_shuffled_and_some_are_nobodys() -> None:
    table = shuffled_table((64, 0, 33), 4, 1)
    assert table.lengths.tolist() == [64, 0, 33]
    assert sorted(table.indices.tolist()) != table.indices.tolist()
    assert len(set(table.indices.tolist())) == 16 + 9


def test_errors_are_the_worst_row_and_nan_is_infinite() -> None:
    reference = torch.ones(2, 3, 4)
    reference[0, 0] = 0
    out = reference.clone()
    assert relative_error(out, reference) == 0
    out[1, 2, 0] = 1.2
    assert relative_error(out, reference) == pytest.approx(0.1)
    out[0, 0, 0] = 1e-3
    assert relative_error(out[:1, :1], reference[:1, :1]) == pytest.approx(1e-3)
    out[1, 1, 1] = math.nan
    assert relative_error(out, reference) == math.inf


def test_minus_infinity_must_meet_minus_infinity() -> None:
    reference = torch.tensor([1.0, -math.inf])
    assert lse_error(torch.tensor([1.5, -math.inf]), reference) == 0.5
    assert lse_error(torch.tensor([1.0, -5e4]), reference) == math.inf
    assert lse_error(torch.tensor([-math.inf, -math.inf]), reference) == math.inf
    assert lse_error(torch.tensor([math.nan, -math.inf]), reference) == math.inf
