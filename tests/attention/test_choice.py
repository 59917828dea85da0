"""Which backend is taken, and that every refusal is said with what to use in its place."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from attention._backend import Batch, Planned, Room, Wanted
from attention._choice import Backends, preference
from attention._errors import MissingPart, Unsupported
from attention._view import LayerView
from kvhold.bench.attention_cases import Case, build
from tiers._layout import ScaleScope


class Stub:
    """A backend that refuses what it is told to."""

    def __init__(self, name: str, refusal: str | None = None) -> None:
        self.name = name
        self._refusal = refusal

    def refusal(self, wanted: Wanted) -> str | None:
        return self._refusal

    def plan(
        self,
        wanted: Wanted,
        views: Sequence[LayerView],
        batch: Batch,
        *,
        sm_scale: float,
        room: Room | None,
    ) -> Planned:
        raise AssertionError("not planned here")


def wanted(group: int = 4, *, prefill: bool = False, cuda: bool = True) -> Wanted:
    found = Wanted.of(build(Case(head_dim=16)).view, 2 * group, prefill=prefill, causal=prefill)
    return replace(found, device=torch.device("cuda:0")) if cuda else found


def test_preference_follows_the_shape() -> None:
    assert preference(wanted(cuda=False)) == ("reference",)
    assert preference(wanted(1))[0] == "flashinfer-cores"
    assert preference(wanted(4))[0] == "triton"
    prefill = wanted(4, prefill=True)
    assert preference(prefill)[0] == "flashinfer"  # few rows
    assert preference(replace(prefill, rows=2048))[0] == "flashinfer"  # of 8 query heads
    assert preference(replace(prefill, rows=2112))[0] == "triton"
    assert preference(replace(prefill, rows=2048, query_heads=32))[0] == "triton"


def test_auto_takes_the_first_that_does_not_refuse_and_says_why() -> None:
    backends = Backends(
        [Stub("flashinfer-cores", "cores: no"), Stub("flashinfer", "tensor: no"), Stub("triton")]
    )
    backend, reason = backends.pick("auto", wanted(1))
    assert backend.name == "triton"
    assert reason.startswith("triton: fastest of those that do this decode, group 1")
    assert "cores: no" in reason
    assert "tensor: no" not in reason  # was not asked
    backend, reason = backends.pick("auto", wanted(1, prefill=True))
    assert backend.name == "triton"
    assert "tensor: no" in reason


# case 60, a combination that is not supported is a clear refusal, never a silent other path
def test_a_named_backend_refuses_and_is_not_replaced() -> None:
    backends = Backends([Stub("triton", "triton: that is not done: use reference")])
    with pytest.raises(Unsupported, match="use reference"):
        backends.pick("triton", wanted())
    backend, reason = backends.pick("reference", wanted(cuda=False))
    assert (backend.name, reason) == ("reference", "reference: asked for")


def test_unknown_backends_are_refused_with_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="expected one of auto, reference, triton, flashinfer"):
        Backends().get("magic")


def test_own_backends_can_be_named() -> None:
    own = Stub("mine")
    assert Backends([own]).pick("mine", wanted())[0] is own


def test_a_part_that_is_not_installed_is_named_on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flashinfer.jit.env", "triton", "attention.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr("attention.kernels", raising=False)  # where another test imported it
    with pytest.raises(MissingPart, match="the flashinfer backends need FlashInfer"):
        Backends().get("flashinfer")
    with pytest.raises(MissingPart, match="the triton backend needs Triton"):
        Backends().get("triton")
    backends = Backends([Stub("reference")])
    backend, reason = backends.pick("auto", wanted())
    assert backend.name == "reference"
    assert "need FlashInfer" in reason
    assert "needs Triton" in reason


def test_on_a_cpu_auto_is_the_reference() -> None:
    backend, reason = Backends().pick("auto", wanted(cuda=False))
    assert backend.name == "reference"
    assert "decode, group 4" in reason
    with pytest.raises(Unsupported, match="pages on cpu: use reference"):
        Backends().pick("triton", wanted(cuda=False))


def test_scopes_reach_the_choice() -> None:
    case = Case(head_dim=16, scope=ScaleScope.TOKEN_HEAD)
    found = Wanted.of(build(case).view, 8, prefill=False, causal=False)
    assert found.scope is ScaleScope.TOKEN_HEAD
