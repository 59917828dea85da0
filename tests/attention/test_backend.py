"""What a plan asks for, buffers at fixed addresses, and the reference as a backend."""

import pytest
import torch

from attention import _reference
from attention._backend import Batch, Buffers, ReferenceBackend, Room, Wanted
from attention._errors import Unsupported
from attention._view import LayerView
from kvhold.bench.attention_cases import Case, build, shuffled_table
from tiers._layout import PageOrder, ScaleScope

CPU = torch.device("cpu")


def batch(*lengths: int, page_size: int = 4, seed: int = 0) -> Batch:
    return Batch(shuffled_table(lengths, page_size, seed), tuple(range(len(lengths) + 1)))


def test_a_combination_is_read_off_the_pages() -> None:
    inputs = build(Case(group=3, head_dim=32))
    wanted = Wanted.of(inputs.view, 6, prefill=False, causal=False)
    assert (wanted.group, wanted.kv_heads, wanted.head_dim, wanted.page_size) == (3, 2, 32, 16)
    assert wanted.equal_strides
    assert wanted.dense
    with pytest.raises(Unsupported, match="7 query heads over 2 KV heads"):
        Wanted.of(inputs.view, 7, prefill=False, causal=False)
    view = inputs.view
    wide = torch.zeros(*view.key.shape[:3], 64, dtype=view.key.dtype)[..., :32]
    gaps = LayerView(wide, view.value, view.order, view.scale, view.scope)
    assert not Wanted.of(gaps, 6, prefill=False, causal=False).equal_strides


def test_buffers_are_rewritten_where_they_are() -> None:
    buffers = Buffers(batch(5, 9), Room(pages=8), CPU)
    before = [part.data_ptr() for part in (*buffers.table, buffers.rows)]
    later = batch(17, 2, seed=3)
    buffers.write(later)
    assert [part.data_ptr() for part in (*buffers.table, buffers.rows)] == before
    count = len(later.table.indices)
    assert buffers.table.indices[:count].tolist() == later.table.indices.tolist()
    assert buffers.table.indptr.tolist() == later.table.indptr.tolist()
    assert buffers.table.last_page_len.tolist() == [1, 2]


def test_batches_that_do_not_fit_the_buffers_are_refused() -> None:
    exact = Buffers(batch(5, 9), None, CPU)
    with pytest.raises(Unsupported, match="6 pages, room for 5"):
        exact.write(batch(9, 9))
    with pytest.raises(Unsupported, match="rewritten with 3 requests"):
        exact.write(batch(1, 1, 1))
    with pytest.raises(Unsupported, match="and 4 rows"):
        exact.write(Batch(batch(5, 9).table, (0, 2, 4)))


def test_empty_batches_have_buffers() -> None:
    buffers = Buffers(batch(), None, CPU)
    assert buffers.rows.tolist() == [0]
    assert Batch(batch().table, (0,)).fresh_max == 0
    assert Batch(batch(4, 4).table, (0, 3, 4)).fresh_max == 3


def test_the_reference_computes_and_is_rewritten() -> None:
    inputs = build(Case(group=2, head_dim=16, page_size=4, lengths=(5, 0, 9)))
    wanted = Wanted.of(inputs.view, 4, prefill=False, causal=False)
    backend = ReferenceBackend()
    assert backend.refusal(wanted) is None
    made = Batch(inputs.table, tuple(inputs.query_indptr))
    plan = backend.plan(wanted, [inputs.view], made, sm_scale=0.25, room=None)
    out, lse = torch.empty_like(inputs.query), torch.empty(3, 4)
    plan.run(0, inputs.query, out, lse)
    expected = _reference.decode(inputs.query, inputs.view, inputs.table, scale=0.25)
    assert torch.equal(out, expected.out.to(out.dtype))
    assert torch.equal(lse, expected.lse)
    swapped = build(Case(group=2, head_dim=16, page_size=4, lengths=(5, 0, 9), seed=8)).table
    plan.update(Batch(swapped, made.rows))
    again = torch.empty_like(out)
    plan.run(0, inputs.query, again, None)
    assert not torch.equal(out, again)
    with pytest.raises(Unsupported, match="plan anew"):
        plan.update(batch(5, 0))


def test_no_graph_replays_the_reference() -> None:
    inputs = build(Case(head_dim=16))
    wanted = Wanted.of(inputs.view, 8, prefill=False, causal=False)
    made = Batch(inputs.table, tuple(inputs.query_indptr))
    with pytest.raises(Unsupported, match="no graph can replay"):
        ReferenceBackend().plan(wanted, [inputs.view], made, sm_scale=1.0, room=Room(9))


def test_what_one_layer_lacks_the_plan_lacks() -> None:
    view = build(Case(group=3, head_dim=32)).view
    wide = torch.zeros(*view.key.shape[:3], 64, dtype=torch.uint8)[..., :32].view(view.value.dtype)
    gaps = LayerView(view.key, wide, view.order, view.scale, view.scope)
    wanted = Wanted.of(view, 6, prefill=False, causal=False, others=[view, gaps])
    assert not wanted.equal_strides
    assert not wanted.dense


# case 18
@pytest.mark.parametrize(("heads", "wide"), [(4, False), (5, True)])
def test_pages_too_wide_for_the_kernels_offsets_are_seen(heads: int, *, wide: bool) -> None:
    step = 2**29
    shape, strides = (1, 4, heads, 32), (32 * 4, 32, step, 1)
    key = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    codes = torch.empty_strided(shape, strides, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.ones(1, device="meta")
    view = LayerView(key, codes, PageOrder.NHD, scale, ScaleScope.TENSOR)
    wanted = Wanted.of(view, heads, prefill=False, causal=False)
    assert wanted.wide == wide
