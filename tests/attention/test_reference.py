"""The oracle against loops in Python floats, which know nothing of tensors."""

import math

import pytest
import torch

from attention._reference import attend, decode, gather, merge, prefill
from attention._view import LayerView
from kvhold.bench.attention_cases import Case, build, lse_error, relative_error
from tiers._layout import PageOrder, ScaleScope

ORDERS = (PageOrder.NHD, PageOrder.HND)


def by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with one Python float at a time."""
    rows, heads, dim = query.shape
    length, kv_heads = key.shape[:2]
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for row in range(rows):
        seen = min(length, row + length - rows + 1) if causal else length
        for head in range(heads):
            mine = head // (heads // kv_heads)
            scores = [
                sum(
                    float(a) * float(b) for a, b in zip(query[row, head], key[j, mine], strict=True)
                )
                / math.sqrt(dim)
                for j in range(max(seen, 0))
            ]
            if not scores:
                continue
            total = sum(math.exp(s) for s in scores)
            lse[row, head] = math.log2(total)
            for j, score in enumerate(scores):
                out[row, head] += math.exp(score) / total * value[j, mine].to(torch.float64)
    return out, lse


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_what_the_formula_says(group: int, causal: bool) -> None:
    torch.manual_seed(group)
    query = torch.randn(3, 2 * group, 16, dtype=torch.float64)
    key, value = (torch.randn(7, 2, 16, dtype=torch.float64) for _ in range(2))
    found = attend(query, key, value, causal=causal)
    out, lse = by_hand(query, key, value, causal=causal)
    assert relative_error(found.out, out) < 1e-12
    assert lse_error(found.lse, lse) < 1e-12


def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity() -> None:
    query = torch.randn(3, 2, 16)
    key, value = torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    found = attend(query, key, value, causal=True)
    assert (found.out[:2] == 0).all()
    assert (found.lse[:2] == -math.inf).all()
    torch.testing.assert_close(found.out[2], value[0])
    none = attend(query, key[:0], value[:0])
    assert (none.out == 0).all()
    assert (none.lse == -math.inf).all()


def test_rows_beyond_one_piece_are_the_same_rows() -> None:
    torch.manual_seed(5)
    query = torch.randn(300, 1, 16, dtype=torch.float64)
    key, value = (torch.randn(310, 1, 16, dtype=torch.float64) for _ in range(2))
    whole = attend(query, key, value, causal=True)
    last = attend(query[-1:], key, value, causal=True)
    torch.testing.assert_close(whole.out[-1:], last.out)
    early = attend(query[:1], key[:11], value[:11], causal=True)
    torch.testing.assert_close(whole.out[:1], early.out)


# case 61, NaN in unused slots and in pages of nobody never shows
# case 59, every scope of scales, on decode and on prefix + new tokens
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scope", [ScaleScope.TENSOR, ScaleScope.HEAD, ScaleScope.TOKEN_HEAD])
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_are_read_in_table_order(order: PageOrder, scope: ScaleScope, page_size: int) -> None:
    case = Case(order=order, scope=scope, page_size=page_size, head_dim=16, lengths=(0, 13, 4, 1))
    inputs = build(case)
    found = decode(inputs.query, inputs.view, inputs.table, dtype=torch.float64)
    for request in range(4):
        key, value = gather(inputs.view, inputs.table, request, torch.float64)
        assert key.shape[0] == case.lengths[request]
        out, lse = by_hand(inputs.query[request : request + 1], key, value, causal=False)
        assert relative_error(found.out[request : request + 1], out) < 1e-12
        assert lse_error(found.lse[request : request + 1], lse) < 1e-12
    rows = Case(
        order=order,
        scope=scope,
        page_size=page_size,
        head_dim=16,
        lengths=(0, 13, 4, 1),
        fresh=(0, 5, 4, 1),
    )
    inputs = build(rows)
    both = prefill(inputs.query, inputs.query_indptr, inputs.view, inputs.table)
    assert torch.isfinite(both.out).all()
    assert torch.isfinite(both.lse).all()


@pytest.mark.parametrize("order", ORDERS)
def test_values_are_gathered_by_slot_and_scaled(order: PageOrder) -> None:
    case = Case(order=order, scope=ScaleScope.TOKEN_HEAD, page_size=4, head_dim=16, lengths=(6,))
    inputs = build(case)
    view, pages = inputs.view, inputs.table.pages_of(0)
    _, value = gather(view, inputs.table, 0)
    for token in range(6):
        page, place = int(pages[token // 4]), token % 4
        for head in range(2):
            at = (page, place, head) if order is PageOrder.NHD else (page, head, place)
            expected = view.value[at].to(torch.float32) * view.scale[at]
            assert torch.equal(value[token, head], expected)


def test_damage_shows() -> None:
    """Controls: one page of V, one page of K and the scale all move the output."""
    inputs = build(Case(page_size=4, head_dim=16, lengths=(13,), scope=ScaleScope.TENSOR))
    view, table = inputs.view, inputs.table
    whole = decode(inputs.query, view, table)
    page = int(table.pages_of(0)[1])
    double = LayerView(view.key, view.value, view.order, view.scale * 2, view.scope)
    doubled = decode(inputs.query, double, table)
    torch.testing.assert_close(doubled.out, whole.out * 2)
    view.value.view(torch.uint8)[page] ^= 0x80
    value_damaged = decode(inputs.query, view, table)
    assert relative_error(value_damaged.out, whole.out) > 1e-2
    assert lse_error(value_damaged.lse, whole.lse) == 0
    view.value.view(torch.uint8)[page] ^= 0x80
    view.key[page] += 1
    assert lse_error(decode(inputs.query, view, table).lse, whole.lse) > 1e-2


def test_merging_parts_is_attention_over_the_union() -> None:
    torch.manual_seed(1)
    query = torch.randn(2, 4, 16, dtype=torch.float64)
    key, value = (torch.randn(9, 2, 16, dtype=torch.float64) for _ in range(2))
    whole = attend(query, key, value)
    cuts = [(0, 4), (4, 4), (4, 9)]
    parts = [attend(query, key[a:b], value[a:b]) for a, b in cuts]
    merged = merge(*parts)
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)
    nothing = merge(parts[1], parts[1])
    assert (nothing.out == 0).all()
    assert (nothing.lse == -math.inf).all()
