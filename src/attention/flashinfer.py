"""K16/V8 attention on FlashInfer: its JIT, headers, planner, page tables and merge, our value tile.

Two modules, both built by FlashInfer's own JIT the first time a combination is planned:

- ``flashinfer``: tensor cores, decode and prefill, any group, any scope of scales. FlashInfer's FA2
  paged kernel with the loads of V replaced (`attention._patch`, cuda/v8_tensor.cuh).
- ``flashinfer-cores``: CUDA cores, decode only, small groups. FlashInfer's batch decode kernel with
  its device function specialised (cuda/v8_cores.cuh).

The only module that imports FlashInfer, and only when a backend is made. Versions are pinned to
those tested; any other is refused, and so is a header that no longer has the places we change.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import torch

from attention import _patch
from attention._backend import Batch, Buffers, Planned, Room, Wanted
from attention._errors import MissingPart, Unsupported
from tiers._layout import PageOrder, ScaleScope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention._view import LayerView

TESTED: Final = ("0.6.18.post1",)
"""Releases whose headers and planner these modules were run on."""
CAPABILITY: Final = (9, 0)
"""The devices these modules were run on."""
HEAD_DIMS: Final = (64, 128, 192, 256)
PREFILL_HEAD_DIMS: Final = (64, 128, 256)
"""FlashInfer's FA2 prefill has no valid configuration of 128 rows at head_dim 192."""
CORES_HEAD_DIMS: Final = (64, 128, 256)
CORES_GROUPS: Final = (1, 2, 3, 4, 6, 8)
"""Groups that FlashInfer's decode kernel is instantiated for."""
EMPTY_LSE: Final = -4e4
"""FlashInfer's minus infinity is -5e4: below this a row has seen no key."""
FORMATS: Final = {
    torch.float8_e4m3fn: ("__NV_E4M3", "__nv_fp8_e4m3", "e4m3"),
    torch.float8_e5m2: ("__NV_E5M2", "__nv_fp8_e5m2", "e5m2"),
}
PDL: Final = True
"""Programmatic dependent launch: the kernels wait for their inputs by themselves."""
INT_WORKSPACE: Final = 8 << 20
"""Bytes of the planner's integer buffers, as FlashInfer's own wrappers allocate them."""


class ModuleKey(NamedTuple):
    """What a module is built for."""

    cores: bool
    key: torch.dtype
    value: torch.dtype
    head_dim: int
    by_token: bool

    @classmethod
    def of(cls, wanted: Wanted, *, cores: bool) -> ModuleKey:
        """The module that a combination needs."""
        by_token = wanted.scope is ScaleScope.TOKEN_HEAD
        return cls(cores, wanted.key, wanted.value, wanted.head_dim, by_token)


@final
class Library:
    """The installed FlashInfer.

    Args:
        widen_rows: rows of V that a thread widens at a time on tensor cores. 2 measured best on an
            H200: 248 us where 1 takes 288 and 4 takes 250.
        wide_merge: join the splits with blocks of 512 threads instead of 128 where there are fewer
            rows and heads than processors. Off until it has been measured.
        early_trigger: on CUDA cores, let the next kernel be launched as soon as all blocks run,
            instead of when they are done. Off until it has been measured.

    Attributes:
        root: the imported package.
        version: its version.

    Raises:
        MissingPart: it is not installed.
        Unsupported: it is of a version that was not tested.
    """

    def __init__(
        self, *, widen_rows: int = 2, wide_merge: bool = False, early_trigger: bool = False
    ) -> None:
        self._widen_rows = widen_rows
        self._wide_merge = wide_merge
        self._early_trigger = early_trigger
        try:
            self.root = importlib.import_module("flashinfer")
            self._env = importlib.import_module("flashinfer.jit.env")
            self._core = importlib.import_module("flashinfer.jit.core")
            self._templates = importlib.import_module("flashinfer.jit.attention.modules")
            self._write = importlib.import_module("flashinfer.jit.utils").write_if_different
        except ImportError as error:
            raise MissingPart(f"the flashinfer backends need FlashInfer: {error}") from error
        self.version: str = self.root.__version__
        if self.version not in TESTED:
            raise Unsupported(
                f"FlashInfer {self.version} was not tested, {', '.join(TESTED)} were: use triton"
            )
        self._modules: dict[ModuleKey, Any] = {}

    @property
    def native(self) -> bool:
        """Whether this release itself takes separate K and V types; no tested one does."""
        plan = self.root.BatchDecodeWithPagedKVCacheWrapper.plan
        return "v_data_type" in inspect.signature(plan).parameters

    def module(self, key: ModuleKey) -> Any:
        """The module for a combination, built and loaded once."""
        if key not in self._modules:
            self._modules[key] = self.spec(key).build_and_load()
        return self._modules[key]

    def spec(self, key: ModuleKey) -> Any:
        """FlashInfer's description of how to build a module; its sources are written."""
        return self._cores_spec(key) if key.cores else self._tensor_spec(key)

    def _name(self, key: ModuleKey, *sources: str) -> str:
        parts = (
            "kvhold",
            "cores" if key.cores else "tensor",
            str(key.key).removeprefix("torch."),
            FORMATS[key.value][2],
            str(key.head_dim),
            "token" if key.by_token else "head",
            _patch.digest(self.version, *sources),
        )
        return "_".join(parts)

    def _cores_spec(self, key: ModuleKey) -> Any:
        variant = "\n".join(
            (
                f"#define KVHOLD_V_TYPE {FORMATS[key.value][1]}",
                f"#define KVHOLD_EARLY_TRIGGER {int(self._early_trigger)}",
                f"#define KVHOLD_WIDE_MERGE {int(self._wide_merge)}",
                _patch.cuda_source("variant.cuh"),
                _patch.cuda_source("merge.cuh"),
                _patch.cuda_source("v8_cores.cuh"),
            )
        )
        return self._templates.gen_customize_batch_decode_module(
            self._name(key, variant),
            *(key.key, key.key, key.key, torch.int32, key.head_dim, key.head_dim),
            *(["head_scale"], ["float"], ["sm_scale"], ["double"]),
            *("KvholdV8", variant),
        )

    def _tensor_spec(self, key: ModuleKey) -> Any:
        stock = Path(self._env.FLASHINFER_INCLUDE_DIR) / "flashinfer/attention/prefill.cuh"
        header = (
            f"#define KVHOLD_V_FORMAT {FORMATS[key.value][0]}\n"
            f"#define KVHOLD_TOKEN_SCALE {int(key.by_token)}\n"
            f"#define KVHOLD_WIDEN_ROWS {self._widen_rows}\n"
            f"#define KVHOLD_WIDE_MERGE {int(self._wide_merge)}\n"
            + _patch.tensor_header(stock.read_text(encoding="utf-8"))
        )
        tile, variant = _patch.cuda_source("v8_tensor.cuh"), _patch.cuda_source("variant.cuh")
        merge = _patch.cuda_source("merge.cuh")
        name = self._name(key, header, tile, merge, variant)
        self._templates.gen_customize_batch_prefill_module(
            "fa2",
            name,
            *(key.key, key.key, key.key, torch.int32, key.head_dim, key.head_dim),
            *(["head_scale", "token_scale"], ["float", "float"], ["sm_scale"], ["double"]),
            *("KvholdV8", variant),
        )
        folder = Path(self._env.FLASHINFER_GEN_SRC_DIR) / name
        self._write(folder / "kvhold_prefill.cuh", header)
        self._write(folder / "v8_merge.cuh", merge)
        self._write(folder / "v8_tensor.cuh", tile)
        sources = [folder / "batch_prefill.cu", folder / "batch_prefill_jit_binding.cu"]
        for mask in (0, 1):
            rendered = folder / f"batch_prefill_paged_kernel_mask_{mask}.cu"
            own = folder / f"kvhold_mask_{mask}.cu"
            self._write(own, _patch.kernel_source(rendered.read_text(encoding="utf-8")))
            sources.append(own)
        return self._core.gen_jit_spec(f"{name}_v8", sources)


@final
class FlashInferBackend:
    """One of the two modules.

    Args:
        cores: CUDA cores instead of tensor cores.
        library: the installed FlashInfer, to share modules between backends.
    """

    def __init__(self, *, cores: bool = False, library: Library | None = None) -> None:
        self.library = Library() if library is None else library
        self.name = "flashinfer-cores" if cores else "flashinfer"
        self._cores = cores

    def refusal(self, wanted: Wanted) -> str | None:
        """Everything that was not tested is refused, with what to use in its place."""
        device = wanted.device
        if device.type != "cuda":
            return f"{self.name}: pages on {device.type}: use reference"
        found = torch.cuda.get_device_capability(device)
        if found != CAPABILITY:
            return f"{self.name}: compute capability {found}, tested {CAPABILITY}: use triton"
        return refused_shape(wanted, cores=self._cores)

    def plan(
        self,
        wanted: Wanted,
        views: Sequence[LayerView],
        batch: Batch,
        *,
        sm_scale: float,
        room: Room | None,
    ) -> Planned:
        """Build or load the module and let FlashInfer's planner schedule the batch."""
        module = self.library.module(ModuleKey.of(wanted, cores=self._cores))
        return _Plan(module, wanted, views, batch, sm_scale=sm_scale, room=room, cores=self._cores)


def refused_shape(wanted: Wanted, *, cores: bool) -> str | None:
    """Why a module does not compute a combination on a device that it runs on."""
    by_token = wanted.scope is ScaleScope.TOKEN_HEAD
    doubts: tuple[tuple[bool, str], ...]
    if cores:
        doubts = (
            (wanted.prefill, "decode only: use flashinfer"),
            (
                wanted.group not in CORES_GROUPS,
                f"group {wanted.group} of {CORES_GROUPS}: use flashinfer",
            ),
            (by_token, "a scale per token: use flashinfer"),
            (not wanted.equal_strides, "K and V strides differ: use flashinfer"),
            (
                wanted.head_dim not in CORES_HEAD_DIMS,
                f"head_dim {wanted.head_dim} of {CORES_HEAD_DIMS}: use triton",
            ),
        )
    else:
        doubts = (
            (
                wanted.head_dim not in HEAD_DIMS,
                f"head_dim {wanted.head_dim} of {HEAD_DIMS}: use triton",
            ),
            (
                wanted.prefill and wanted.head_dim not in PREFILL_HEAD_DIMS,
                f"prefill at head_dim {wanted.head_dim} of {PREFILL_HEAD_DIMS}: use triton",
            ),
            (by_token and not wanted.dense, "a scale per token over pages with gaps: use triton"),
        )
    doubts += ((wanted.wide, "a page reaches further than 32 bits count: use reference"),)
    name = "flashinfer-cores" if cores else "flashinfer"
    return next((f"{name}: {reason}" for applies, reason in doubts if applies), None)


@final
class _Plan:
    """FlashInfer's schedule for a batch, and the buffers that it lives in."""

    def __init__(
        self,
        module: Any,
        wanted: Wanted,
        views: Sequence[LayerView],
        batch: Batch,
        *,
        sm_scale: float,
        room: Room | None,
        cores: bool,
    ) -> None:
        self._module = module
        self._wanted = wanted
        self._cores = cores
        self._graph = room is not None
        self._sm_scale = sm_scale
        self._rows = batch.rows[-1]
        self._layers = [(view, *_scale_tensors(view, wanted)) for view in views]
        self._buffers = Buffers(batch, room, wanted.device)
        self._space = torch.zeros(16, dtype=torch.uint8, device=wanted.device)
        size = (INT_WORKSPACE,)
        self._ints = torch.empty(size, dtype=torch.uint8, device=wanted.device)
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._copied: torch.cuda.Event | None = None
        self._schedule: Any = None
        self._empty = False
        if self._rows:
            self._plan(batch, first=True)

    def update(self, batch: Batch) -> None:
        self._buffers.write(batch)
        if self._rows:
            self._plan(batch, first=False)

    def _plan(self, batch: Batch, *, first: bool) -> None:
        """Schedule on the host; the copy of the schedule is queued on the current stream."""
        arguments = self._arguments(batch)
        need, ints = map(int, self._module.workspace_size(self._ints, *arguments))
        if ints > INT_WORKSPACE:
            raise Unsupported(f"flashinfer: {ints} bytes of schedule, {INT_WORKSPACE} allocated")
        if need > self._space.numel():
            if not first and self._graph:
                raise Unsupported(f"{need} bytes of workspace, {self._space.numel()} planned")
            self._space = torch.zeros(need, dtype=torch.uint8, device=self._wanted.device)
        if self._copied is not None:
            # The planner rewrites page-locked memory that an earlier copy may still read.
            self._copied.synchronize()
        self._schedule = self._module.plan(self._space, self._ints, self._pinned, *arguments)
        self._copied = torch.cuda.current_stream(self._wanted.device).record_event()
        self._empty = bool((batch.table.lengths == 0).any())

    def _arguments(self, batch: Batch) -> tuple[object, ...]:
        """What the planner is told after its buffers."""
        wanted, table = self._wanted, batch.table
        indptr = torch.from_numpy(table.indptr)
        shape = (wanted.query_heads, wanted.kv_heads, wanted.page_size, self._graph)
        dims = (wanted.head_dim, wanted.head_dim)
        if self._cores:
            kinds = [torch.empty(0, dtype=wanted.key)] * 2
            return (indptr, table.batch, *shape, -1, 0.0, *dims, *kinds)
        rows = torch.tensor(batch.rows, dtype=torch.int32)
        lengths = torch.from_numpy(table.lengths).to(torch.int32)
        counts = (self._rows, table.batch)
        tail = (wanted.causal, -1, -1, False, 0, 0)
        return (rows, indptr, lengths, *counts, *shape, *dims, *tail)

    def run(self, layer: int, query: Tensor, out: Tensor, lse: Tensor | None) -> None:
        if not self._rows:
            return
        view, heads, tokens = self._layers[layer]
        order = 0 if view.order is PageOrder.NHD else 1
        codes = view.value.view(torch.uint8)
        spaces = (self._space, self._ints, self._schedule, query, view.key, codes)
        if self._cores:
            table = (*self._buffers.table, out, lse, order)
            self._module.run(*spaces, *table, -1, PDL, heads, self._sm_scale)
        else:
            mask = int(self._wanted.causal)
            self._module.paged_run(
                *(*spaces, self._buffers.rows, *self._buffers.table, out, lse),
                *(mask, order, -1, PDL, heads, tokens, self._sm_scale),
            )
        if lse is not None and (self._empty or self._graph):
            lse.masked_fill_(lse < EMPTY_LSE, -torch.inf)


def _scale_tensors(view: LayerView, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Scales as the kernels take them: one per query head, and those per token or a stand-in."""
    if view.scope is ScaleScope.TOKEN_HEAD:
        ones = torch.ones(wanted.query_heads, dtype=torch.float32, device=view.scale.device)
        return ones, view.scale
    heads = view.scale.expand(view.kv_heads).repeat_interleave(wanted.group)
    return heads.contiguous(), view.scale
