"""The FlashInfer backends without a GPU: refusals, pinned versions, names, and what is compiled."""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attention import flashinfer
from attention._backend import Batch, Wanted
from attention._errors import MissingPart, Unsupported
from attention._view import LayerView
from attention.flashinfer import FlashInferBackend, Library, ModuleKey, refused_shape
from kvhold.bench.attention_cases import Case, Inputs, build
from tiers._layout import PageOrder, ScaleScope


def wanted(case: Case | None = None, *, prefill: bool = False) -> Wanted:
    case = case or Case(head_dim=128)
    found = Wanted.of(build(case).view, case.group * case.kv_heads, prefill=prefill, causal=prefill)
    return replace(found, device=torch.device("cuda:0"))


def installed(monkeypatch: pytest.MonkeyPatch, version: str, *, native: bool = False) -> ModuleType:
    """Stand a FlashInfer of some version in for the real one."""

    def plan(self: object, *, kv_data_type: object = None) -> None: ...
    def split(self: object, *, k_data_type: object = None, v_data_type: object = None) -> None: ...

    root: Any = ModuleType("flashinfer")
    root.__version__ = version
    root.BatchDecodeWithPagedKVCacheWrapper = SimpleNamespace(plan=split if native else plan)
    utils: Any = ModuleType("flashinfer.jit.utils")
    utils.write_if_different = lambda path, text: None
    modules = {
        "flashinfer": root,
        "flashinfer.jit": ModuleType("flashinfer.jit"),
        "flashinfer.jit.env": ModuleType("flashinfer.jit.env"),
        "flashinfer.jit.core": ModuleType("flashinfer.jit.core"),
        "flashinfer.jit.attention": ModuleType("flashinfer.jit.attention"),
        "flashinfer.jit.attention.modules": ModuleType("flashinfer.jit.attention.modules"),
        "flashinfer.jit.utils": utils,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    made: ModuleType = root
    return made


# case 60, the probe of the installed library tells the truth, and unknown ones are refused
def test_only_tested_versions_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, flashinfer.TESTED[0])
    assert Library().version == flashinfer.TESTED[0]
    assert not Library().native
    installed(monkeypatch, "0.6.17")
    with pytest.raises(Unsupported, match=r"FlashInfer 0\.6\.17 was not tested, .* use triton"):
        Library()


def test_a_release_that_takes_both_types_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, flashinfer.TESTED[0], native=True)
    assert Library().native


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MissingPart, match="need FlashInfer"):
        FlashInferBackend()


def test_refusals_of_cuda_cores_name_the_fallback() -> None:
    good = wanted(Case(head_dim=128, group=4))
    assert refused_shape(good, cores=True) is None
    for case, words in (
        (Case(head_dim=128, group=5), "group 5 of"),
        (Case(head_dim=128, scope=ScaleScope.TOKEN_HEAD), "a scale per token"),
        (Case(head_dim=192), "head_dim 192 of"),
    ):
        found = refused_shape(wanted(case), cores=True)
        assert found is not None
        assert words in found
        assert found.split(": use ")[1] in {"flashinfer", "triton"}
    assert refused_shape(replace(good, prefill=True), cores=True) == (
        "flashinfer-cores: decode only: use flashinfer"
    )
    assert "32 bits" in str(refused_shape(replace(good, wide=True), cores=True))
    assert "32 bits" in str(refused_shape(replace(good, wide=True), cores=False))
    assert "strides differ" in str(refused_shape(replace(good, equal_strides=False), cores=True))


def test_refusals_of_tensor_cores_name_the_fallback() -> None:
    for group in (1, 5, 7, 16):
        assert refused_shape(wanted(Case(head_dim=64, group=group)), cores=False) is None
    assert refused_shape(wanted(Case(head_dim=80)), cores=False) == (
        "flashinfer: head_dim 80 of (64, 128, 192, 256): use triton"
    )
    wide = wanted(Case(head_dim=192))
    assert refused_shape(wide, cores=False) is None
    assert refused_shape(replace(wide, prefill=True), cores=False) == (
        "flashinfer: prefill at head_dim 192 of (64, 128, 256): use triton"
    )
    by_token = wanted(Case(head_dim=128, scope=ScaleScope.TOKEN_HEAD))
    assert refused_shape(by_token, cores=False) is None
    gaps = refused_shape(replace(by_token, dense=False), cores=False)
    assert gaps == "flashinfer: a scale per token over pages with gaps: use triton"


def test_devices_that_were_not_tested_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, flashinfer.TESTED[0])
    backend = FlashInferBackend()
    cpu = replace(wanted(), device=torch.device("cpu"))
    assert backend.refusal(cpu) == "flashinfer: pages on cpu: use reference"
    for capability, refused in (((9, 0), False), ((8, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert (backend.refusal(wanted()) is not None) == refused


class Recorder:
    """A module that records what FlashInfer's planner and kernels are given."""

    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def workspace_size(self, *arguments: Any) -> list[int]:
        return [4096, 1024]

    def plan(self, *arguments: Any) -> str:
        self.planned.append(arguments)
        return f"schedule {len(self.planned)}"

    def paged_run(self, *arguments: Any) -> None:
        self.ran.append(arguments)

    run = paged_run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a plan be made on the CPU: page-locked memory and events are stood in for."""
    empty = torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*arguments, **keywords)
        return made

    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)


def planned(case: Case, *, cores: bool) -> tuple[Recorder, Any, Inputs]:
    inputs = build(case)
    prefill = case.fresh is not None
    asked = Wanted.of(inputs.view, case.group * case.kv_heads, prefill=prefill, causal=prefill)
    module = Recorder()
    batch = Batch(inputs.table, tuple(inputs.query_indptr))
    plan = flashinfer._Plan(
        module, asked, [inputs.view], batch, sm_scale=0.5, room=None, cores=cores
    )
    return module, plan, inputs


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("order", list(PageOrder))
def test_what_the_tensor_core_kernel_is_given(order: PageOrder) -> None:
    case = Case(order=order, head_dim=128, lengths=(5, 40), fresh=(5, 2), group=3)
    module, plan, inputs = planned(case, cores=False)
    _, _, _, rows, indptr, lengths, *counts = module.planned[0]
    assert rows.tolist() == [0, 5, 7]
    assert indptr.tolist() == inputs.table.indptr.tolist()
    assert lengths.tolist() == [5, 40]
    assert lengths.dtype == torch.int32
    assert counts == [7, 2, 6, 2, 16, False, 128, 128, True, -1, -1, False, 0, 0]
    out = torch.empty_like(inputs.query)
    plan.run(0, inputs.query, out, None)
    given = module.ran[0]
    assert given[2] == "schedule 1"
    assert given[5].dtype == torch.uint8  # codes are passed as bytes, the strides are V's own
    assert given[5].stride() == inputs.view.value.stride()
    mask, layout, window, pdl, heads, tokens, scale = given[12:]
    assert (mask, layout, window, pdl, scale) == (1, int(order is PageOrder.HND), -1, True, 0.5)
    assert heads.tolist() == inputs.view.scale.repeat_interleave(3).tolist()
    assert tokens is inputs.view.scale


@pytest.mark.usefixtures("no_gpu")
def test_what_the_cuda_core_kernel_is_given() -> None:
    module, plan, inputs = planned(Case(head_dim=64, lengths=(5, 40), group=2), cores=True)
    assert [*module.planned[0][4:12]] == [2, 4, 2, 16, False, -1, 0.0, 64]
    plan.run(0, inputs.query, torch.empty_like(inputs.query), None)
    layout, window, pdl, heads, scale = module.ran[0][11:]
    assert (layout, window, pdl, scale) == (0, -1, True, 0.5)
    assert len(heads) == 4


@pytest.mark.usefixtures("no_gpu")
def test_token_scales_go_to_the_kernel_and_not_to_the_heads() -> None:
    case = Case(head_dim=64, lengths=(5,), scope=ScaleScope.TOKEN_HEAD)
    module, plan, inputs = planned(case, cores=False)
    plan.run(0, inputs.query, torch.empty_like(inputs.query), None)
    heads, tokens = module.ran[0][16:18]
    assert heads.tolist() == [1.0] * 8
    assert tokens is inputs.view.scale


@pytest.mark.usefixtures("no_gpu")
def test_rows_without_a_key_get_minus_infinity() -> None:
    module, plan, inputs = planned(Case(head_dim=64, lengths=(0, 5)), cores=False)
    lse = torch.full((2, 8), -5e4)
    lse[1] = 3.0
    plan.run(0, inputs.query, torch.empty_like(inputs.query), lse)
    assert (lse[0] == -torch.inf).all()
    assert (lse[1] == 3.0).all()
    assert len(module.ran) == 1


@pytest.mark.usefixtures("no_gpu")
def test_a_batch_without_rows_launches_nothing() -> None:
    module, plan, inputs = planned(Case(head_dim=64, lengths=(3,), fresh=(0,)), cores=False)
    plan.run(0, inputs.query, torch.empty_like(inputs.query), None)
    assert (module.planned, module.ran) == ([], [])


def test_modules_are_told_apart_by_all_that_changes_them() -> None:
    base = wanted(Case(head_dim=128))
    keys = {
        ModuleKey.of(base, cores=False),
        ModuleKey.of(base, cores=True),
        ModuleKey.of(replace(base, key=torch.float16), cores=False),
        ModuleKey.of(replace(base, value=torch.float8_e5m2), cores=False),
        ModuleKey.of(replace(base, head_dim=64), cores=False),
        ModuleKey.of(replace(base, scope=ScaleScope.TOKEN_HEAD), cores=False),
    }
    assert len(keys) == 6
    assert ModuleKey.of(replace(base, scope=ScaleScope.TENSOR), cores=False) in keys


COMPILER = shutil.which("nvcc")
QUICK = {"wide_merge": True, "early_trigger": True}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="no nvcc")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer")
@pytest.mark.parametrize(
    ("key", "source", "how"),
    [
        (ModuleKey(False, torch.bfloat16, torch.float8_e4m3fn, 128, False), "kvhold_mask_1.cu", {}),
        (ModuleKey(False, torch.float16, torch.float8_e5m2, 64, True), "kvhold_mask_0.cu", {}),
        (ModuleKey(True, torch.bfloat16, torch.float8_e4m3fn, 128, False), "decode_kernel.cu", {}),
        (
            ModuleKey(True, torch.bfloat16, torch.float8_e4m3fn, 128, False),
            "decode_kernel.cu",
            QUICK,
        ),
        (ModuleKey(True, torch.float16, torch.float8_e5m2, 256, False), "decode_kernel.cu", QUICK),
        (
            ModuleKey(False, torch.bfloat16, torch.float8_e4m3fn, 192, False),
            "kvhold_mask_0.cu",
            QUICK,
        ),
    ],
)
def test_modules_compile(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: ModuleKey,
    source: str,
    how: dict[str, bool],
) -> None:
    """Compile only: linking needs a driver library, running a GPU."""
    assert COMPILER is not None
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    spec = Library(**how).spec(key)
    spec.build_dir.mkdir(parents=True, exist_ok=True)
    commands = [c for c in spec.get_compile_commands() if c["file"].endswith(source)]
    assert len(commands) == 1
    done = subprocess.run(
        commands[0]["command"].split(),
        cwd=commands[0]["directory"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_strided_views_are_told_from_dense_ones() -> None:
    view = build(Case(head_dim=64)).view
    wide = torch.zeros(*view.value.shape[:3], 128, dtype=torch.uint8)[..., :64]
    gaps = LayerView(view.key, wide.view(view.value.dtype), view.order, view.scale, view.scope)
    assert not Wanted.of(gaps, 8, prefill=False, causal=False).dense
