"""The Triton backend without a GPU: what it refuses, and a plan run by the interpreter."""

import os
from types import SimpleNamespace

import pytest
import torch

from attention import _reference
from attention._backend import Batch, Room, Wanted
from attention._errors import Unsupported
from attention._triton import TritonBackend
from kvhold.bench.attention_cases import Case, build, lse_error, relative_error

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is there: tests/gpu runs the kernels"
)


def test_it_needs_a_gpu_that_converts_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend()
    wanted = Wanted.of(build(Case(head_dim=16)).view, 8, prefill=False, causal=False)
    assert backend.refusal(wanted) == "triton: pages on cpu: use reference"
    device = torch.device("cuda:0")
    cuda = SimpleNamespace(device=device, wide=False)
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert (backend.refusal(cuda) is not None) == refused  # type: ignore[arg-type]
    cuda.wide = True
    assert "32 bits" in str(backend.refusal(cuda))  # type: ignore[arg-type]


@interpreted
@pytest.mark.parametrize("room", [None, Room(pages=12)])
def test_decode_plans_run_and_are_rewritten(
    monkeypatch: pytest.MonkeyPatch, room: Room | None
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(multi_processor_count=4),
    )
    case = Case(key=torch.float16, head_dim=32, page_size=8, lengths=(0, 33, 9))
    inputs = build(case)
    wanted = Wanted.of(inputs.view, 8, prefill=False, causal=False)
    first = Batch(inputs.table, tuple(inputs.query_indptr))
    plan = TritonBackend().plan(wanted, [inputs.view], first, sm_scale=32**-0.5, room=room)
    out, lse = torch.full_like(inputs.query, torch.nan), torch.empty(3, 8)
    plan.run(0, inputs.query, out, lse)
    expected = _reference.decode(inputs.query, inputs.view, inputs.table)
    assert relative_error(out, expected.out) < 2e-3
    assert lse_error(lse, expected.lse) < 1e-3
    plan.update(first)
    again = torch.full_like(out, torch.nan)
    plan.run(0, inputs.query, again, None)
    assert torch.equal(out, again)
    with pytest.raises(Unsupported, match="plan anew"):
        plan.update(Batch(build(Case(lengths=(1,))).table, (0, 1)))


@interpreted
def test_prefill_plans_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(key=torch.float16, head_dim=32, page_size=8, lengths=(33, 9), fresh=(4, 9), group=2)
    inputs = build(case)
    wanted = Wanted.of(inputs.view, 4, prefill=True, causal=True)
    made = Batch(inputs.table, tuple(inputs.query_indptr))
    plan = TritonBackend().plan(wanted, [inputs.view], made, sm_scale=32**-0.5, room=None)
    out = torch.full_like(inputs.query, torch.nan)
    plan.run(0, inputs.query, out, None)
    expected = _reference.prefill(inputs.query, inputs.query_indptr, inputs.view, inputs.table)
    assert relative_error(out, expected.out) < 2e-3


@interpreted
def test_a_batch_without_rows_launches_nothing() -> None:
    inputs = build(Case(key=torch.float16, head_dim=32, lengths=(3,), fresh=(0,)))
    wanted = Wanted.of(inputs.view, 8, prefill=True, causal=True)
    made = Batch(inputs.table, (0, 0))
    plan = TritonBackend().plan(wanted, [inputs.view], made, sm_scale=1.0, room=None)
    out = torch.empty_like(inputs.query)
    plan.run(0, inputs.query, out, None)
    assert out.numel() == 0
