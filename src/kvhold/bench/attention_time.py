"""How fast K16/V8 attention is on a GPU, beside FlashInfer's own BF16 and FP8 in the same run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from attention._backend import Batch, Wanted
from attention._errors import MissingPart, Unsupported
from attention._view import LayerView
from kvhold.bench.attention_cases import shuffled_table
from tiers._layout import PageOrder, ScaleScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attention._choice import Backends
    from attention._pages import PageTable
    from attention.flashinfer import Library

KV_HEADS: Final = 8
HEAD_DIM: Final = 128
PAGE: Final = 16
WARM: Final = 5
ROUNDS: Final = 40
WORKSPACE: Final = 256 << 20
AHEAD: Final = 40_000_000
"""Cycles that the GPU is kept busy before the first round, so that the host is never waited for."""
SHAPES: Final = ((64, 4096), (8, 32768), (1, 131072))
GROUPS: Final = (1, 4, 8)
PREFILL: Final = (2048, 32768)
"""New tokens, and tokens of the prefix before them."""
FEW: Final = 64
"""New tokens of the other prefill, which fills no GPU by itself."""


class Pages(NamedTuple):
    """One layer's pages in every form that is compared, of the same random values."""

    key: torch.Tensor
    value: torch.Tensor
    view: LayerView
    table: PageTable


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement.

    Attributes:
        what: kernel.
        shape: batch x tokens, group.
        micros: median microseconds.
        spread: microseconds between the quartiles.
        nbytes: bytes of K and V that have to be read.
    """

    what: str
    shape: str
    micros: float
    spread: float
    nbytes: int

    def row(self, ceiling: float) -> dict[str, Any]:
        """As JSON, with bandwidth and its share of `ceiling` bytes per second."""
        rate = self.nbytes / self.micros * 1e6
        return {
            "what": self.what,
            "shape": self.shape,
            "us": round(self.micros, 1),
            "spread_us": round(self.spread, 1),
            "GB/s": round(rate / 1e9),
            "of_copy": round(rate / ceiling, 3),
        }


def clock(run: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Median and interquartile range of the device time of `run`, in microseconds."""
    for _ in range(WARM):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]  # type: ignore[no-untyped-call]
    torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 for start, end in marks)
    return statistics.median(times), times[3 * rounds // 4] - times[rounds // 4]


def copy_rate() -> float:
    """Bytes per second of a device-to-device copy, reads and writes counted."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    micros, _ = clock(lambda: target.copy_(source), 20)
    return 2 * source.numel() / micros * 1e6


def pages_of(batch: int, tokens: int) -> Pages:
    """Random pages in shuffled order."""
    table = shuffled_table((tokens,) * batch, PAGE, seed=1)
    shape = (len(table.indices) + 3, PAGE, KV_HEADS, HEAD_DIM)
    key = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    value = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    scale = torch.full((KV_HEADS,), 0.0125, device="cuda")
    codes = (value.float() / 0.0125).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return Pages(key, value, LayerView(key, codes, PageOrder.NHD, scale, ScaleScope.HEAD), table)


def query_of(rows: int, group: int) -> torch.Tensor:
    """Random queries."""
    shape = (rows, KV_HEADS * group, HEAD_DIM)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def launch_of(
    backends: Backends, name: str, pages: Pages, query: torch.Tensor, rows: tuple[int, ...]
) -> tuple[Callable[[], None], str, torch.Tensor]:
    """A K16/V8 launch, the backend that it is of, and where its output goes."""
    prefill = rows[-1] != len(rows) - 1
    wanted = Wanted.of(pages.view, query.shape[1], prefill=prefill, causal=prefill, rows=rows[-1])
    backend, _ = backends.pick(name, wanted)
    scale = HEAD_DIM**-0.5
    plan = backend.plan(wanted, [pages.view], Batch(pages.table, rows), sm_scale=scale, room=None)
    out = torch.empty_like(query)
    return lambda: plan.run(0, query, out, None), backend.name, out


def ours(
    backends: Backends, name: str, pages: Pages, query: torch.Tensor, rows: tuple[int, ...]
) -> tuple[Callable[[], None], str]:
    """A K16/V8 launch, and the backend that it is of."""
    launch, real, _ = launch_of(backends, name, pages, query, rows)
    return launch, real


def stock(
    library: Library, pages: Pages, query: torch.Tensor, *, fp8: bool, cores: bool
) -> Callable[[], None]:
    """FlashInfer's own batch decode: BF16, or FP8 keys and values."""
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    root = library.root
    wrapper = root.BatchDecodeWithPagedKVCacheWrapper(
        space, "NHD", use_tensor_cores=not cores, backend="fa2"
    )
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    table = pages.table
    wrapper.plan(
        torch.from_numpy(table.indptr),
        torch.from_numpy(table.indices).cuda(),
        torch.from_numpy(table.last_page_len),
        *(query.shape[1], KV_HEADS, HEAD_DIM, PAGE),
        q_data_type=torch.bfloat16,
        kv_data_type=kind,
    )
    cache = (pages.key, pages.value)
    if fp8:
        cache = (pages.key.to(kind), pages.view.value)
    out = torch.empty_like(query)
    return lambda: wrapper.run(query, cache, out=out)


def stock_specs(library: Library) -> list[Any]:
    """How to build FlashInfer's own modules of the comparison."""
    jit = library.root.jit
    made = []
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        types = (torch.bfloat16, kind, torch.bfloat16, torch.int32, HEAD_DIM, HEAD_DIM, 0)
        made.append(jit.gen_batch_decode_module(*types, *(False, False)))
        made.append(jit.gen_batch_prefill_module("fa2", *types, *(False, False, False)))
    return made


FA3: Final = (
    *("fa3", *(torch.bfloat16,) * 3, torch.int32, HEAD_DIM, HEAD_DIM, 0, False, False, False),
)
"""What FlashInfer's paged prefill wrapper asks for at plan with backend "fa3": dtypes of queries, keys
and output, of the table, head sizes, no position encoding, window, cap or 16-bit sums."""


def fa3_spec(library: Library) -> Any:
    """How to build FlashInfer's FA3 prefill in BF16."""
    return library.root.jit.gen_batch_prefill_module(*FA3)


def load_fa3(library: Library) -> object:
    """Load it by the function that the wrapper calls at plan, which remembers it."""
    return library.root.prefill.get_batch_prefill_module(*FA3)


def stock_prefill(
    library: Library, pages: Pages, query: torch.Tensor, backend: str
) -> Callable[[], None]:
    """FlashInfer's own paged prefill in BF16."""
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = library.root.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
    table = pages.table
    wrapper.plan(
        torch.tensor([0, query.shape[0]], dtype=torch.int32),
        torch.from_numpy(table.indptr),
        torch.from_numpy(table.indices).cuda(),
        torch.from_numpy(table.last_page_len),
        *(query.shape[1], KV_HEADS, HEAD_DIM, PAGE),
        causal=True,
        q_data_type=torch.bfloat16,
    )
    out = torch.empty_like(query)
    return lambda: wrapper.run(query, (pages.key, pages.value), out=out)


def decode_figures(
    backends: Backends, library: Library | None, names: tuple[str, ...]
) -> Iterator[Figure]:
    """Every shape, group and kernel."""
    for batch, tokens in SHAPES:
        pages = pages_of(batch, tokens)
        count = batch * tokens * KV_HEADS * HEAD_DIM
        for group in GROUPS:
            query = query_of(batch, group)
            shape = f"{batch} x {tokens}, group {group}"
            if library is not None:
                for fp8 in (False, True):
                    for cores in (True, False):
                        run = stock(library, pages, query, fp8=fp8, cores=cores)
                        what = f"FlashInfer {'FP8' if fp8 else 'BF16'} {'cores' if cores else 'tensor'}"
                        yield Figure(what, shape, *clock(run), count * (2 if fp8 else 4))
            for name in names:
                try:
                    launch, real = ours(backends, name, pages, query, tuple(range(batch + 1)))
                except (Unsupported, MissingPart):
                    continue
                what = f"K16/V8 auto: {real}" if name == "auto" else f"K16/V8 {name}"
                yield Figure(what, shape, *clock(launch), count * 3)
        del pages


def prefill_figures(
    backends: Backends, library: Library | None, kinds: tuple[str, ...]
) -> Iterator[Figure]:
    """New tokens over a restored prefix, one request, causal."""
    many, prefix = PREFILL
    for fresh, group in ((many, 4), (many, 8), (FEW, 4)):
        pages = pages_of(1, prefix + fresh)
        count = (prefix + fresh) * KV_HEADS * HEAD_DIM
        query = query_of(fresh, group)
        shape = f"{fresh} over {prefix}, group {group}"
        for backend in kinds if library is not None else ():
            assert library is not None  # noqa: S101 - narrows the type
            run = stock_prefill(library, pages, query, backend)
            yield Figure(f"FlashInfer BF16 prefill {backend}", shape, *clock(run, 15), count * 4)
        for name in ("auto", "flashinfer", "triton"):
            try:
                launch, real = ours(backends, name, pages, query, (0, fresh))
            except (Unsupported, MissingPart):
                continue
            what = f"K16/V8 prefill {'auto: ' if name == 'auto' else ''}{real}"
            yield Figure(what, shape, *clock(launch, 15), count * 3)
