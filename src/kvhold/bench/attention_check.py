"""Every combination on a GPU against the float32 oracle on the dequantised values.

A cell is one combination on one backend: it is right, wrong, or refused at plan. Outputs are
poisoned before each run, unused slots and pages hold NaN.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from attention import _reference
from attention._backend import Batch, Room, Wanted
from attention._errors import Unsupported
from attention._view import LayerView
from kvhold.bench.attention_cases import Case, Inputs, build, lse_error, relative_error
from tiers._layout import PageOrder, ScaleScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attention._choice import Backends

OUT_MAX: Final = 3e-3
"""Largest relative error of a row and head."""
LSE_MAX: Final = 2e-3
"""Largest absolute error of the log-sum-exp, base 2."""
BACKENDS: Final = ("flashinfer", "flashinfer-cores", "triton")
GROUPS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16)
PAGES: Final = (1, 16, 32)
DTYPES: Final = (torch.bfloat16, torch.float16)
HEAD_DIMS: Final = (128, 64, 256, 192)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMS: Final = (
    (torch.bfloat16, E4M3, ScaleScope.HEAD),
    (torch.bfloat16, E4M3, ScaleScope.TENSOR),
    (torch.bfloat16, E5M2, ScaleScope.TOKEN_HEAD),
    (torch.float16, E5M2, ScaleScope.HEAD),
    (torch.float16, E5M2, ScaleScope.TENSOR),
    (torch.float16, E4M3, ScaleScope.TOKEN_HEAD),
)
"""Types of keys and values and scopes of scales: every pair of two of them, by few modules."""
LENGTHS: Final = (0, 1, 15, 16, 17, 31, 33, 127, 128, 129, 1000, 2049, 4097, 8193)
FRESH: Final = (0, 1, 2, 16, 17, 3, 33, 1, 128, 40, 7, 65, 1, 129)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination on one backend.

    Attributes:
        backend: its name.
        case: the inputs.
        graph: whether a captured graph is replayed after the plan was rewritten.
    """

    backend: str
    case: Case
    graph: bool

    @property
    def name(self) -> str:
        """What identifies the cell in a file of results."""
        case = self.case
        parts = (
            self.backend,
            case.order.value,
            f"g{case.group}",
            f"d{case.head_dim}",
            f"p{case.page_size}",
            str(case.key).removeprefix("torch."),
            str(case.value).removeprefix("torch.float8_"),
            case.scope.value,
            "prefill" if case.fresh else "decode",
            "graph" if self.graph else "eager",
        )
        return " ".join(parts)


def cells() -> Iterator[Cell]:
    """All pairs of the dimensions at every head_dim first, then the full product at 128."""
    for head_dim in HEAD_DIMS:
        dimensions: list[tuple[Any, ...]] = [
            FORMS, tuple(PageOrder), PAGES, GROUPS, (None, FRESH), (False, True)
        ]  # fmt: skip
        for form, order, page, group, fresh, graph in pairwise(dimensions):
            key, value, scope = form
            case = Case(
                key=key,
                value=value,
                order=order,
                page_size=page,
                group=group,
                fresh=fresh,
                scope=scope,
                head_dim=head_dim,
                lengths=LENGTHS,
                seed=head_dim + group,
            )
            yield from (Cell(backend, case, graph) for backend in BACKENDS)
    for key, order, page, group, fresh, graph in itertools.product(
        DTYPES, PageOrder, PAGES, GROUPS, (None, FRESH), (False, True)
    ):
        case = Case(
            key=key,
            order=order,
            page_size=page,
            group=group,
            fresh=fresh,
            lengths=LENGTHS,
            seed=group,
        )
        yield from (Cell(backend, case, graph) for backend in BACKENDS)


def pairwise(dimensions: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Rows in which every pair of values of two dimensions occurs; greedy, always the same."""
    sizes = [range(len(values)) for values in dimensions]
    axes = list(itertools.combinations(range(len(dimensions)), 2))
    open_pairs = {(a, i, b, j) for a, b in axes for i, j in itertools.product(sizes[a], sizes[b])}
    while open_pairs:
        row = _next_row(sizes, open_pairs)
        open_pairs -= {(a, row[a], b, row[b]) for a, b in axes}
        yield tuple(values[i] for values, i in zip(dimensions, row, strict=True))


def _next_row(sizes: list[range], open_pairs: set[tuple[int, int, int, int]]) -> list[int]:
    """A row that begins with an open pair and adds the values that close most others."""
    a, i, b, j = min(open_pairs)
    row = {a: i, b: j}
    for axis, size in enumerate(sizes):
        if axis in row:
            continue
        gain = {
            value: sum(
                _pair(axis, value, other, chosen) in open_pairs for other, chosen in row.items()
            )
            for value in size
        }
        row[axis] = max(gain, key=lambda value: gain[value])
    return [row[axis] for axis in range(len(sizes))]


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)


def _batch(inputs: Inputs) -> Batch:
    return Batch(inputs.table, tuple(inputs.query_indptr))


def _poisoned(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(query, math.nan)
    return out, torch.full(query.shape[:2], math.nan, dtype=torch.float32, device=query.device)


def compute(backends: Backends, cell: Cell, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one cell.

    Raises:
        Unsupported: it is refused at plan.
    """
    query, view = inputs.query, inputs.view
    prefill = cell.case.fresh is not None
    wanted = Wanted.of(view, query.shape[1], prefill=prefill, causal=prefill)
    backend, _ = backends.pick(cell.backend, wanted)
    scale = cell.case.head_dim**-0.5
    out, lse = _poisoned(query)
    if not cell.graph:
        plan = backend.plan(wanted, [view], _batch(inputs), sm_scale=scale, room=None)
        plan.run(0, query, out, lse)
        return out, lse
    first = _rotated(inputs)
    room = Room(len(inputs.table.indices))
    plan = backend.plan(wanted, [view], first, sm_scale=scale, room=room)
    plan.run(0, query, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(0, query, out, lse)
    plan.update(_batch(inputs))
    out.fill_(math.nan)
    lse.fill_(math.nan)
    graph.replay()
    return out, lse


def _rotated(inputs: Inputs) -> Batch:
    """Another batch of as many requests, rows and pages: the first plan of a graph."""
    from attention._pages import PageTable  # noqa: PLC0415 - kept beside its only use

    table = inputs.table
    pages = len(table.indices)
    counts = table.counts[::-1].copy()
    starts = [0, *counts.cumsum().tolist()]
    last = table.last_page_len[::-1].copy()
    ids = table.indices[::-1].copy()
    other = PageTable.raw(starts, ids, last, page_size=table.page_size, pages=pages + 3)
    rows = [b - a for a, b in itertools.pairwise(inputs.query_indptr)]
    turned = [0, *itertools.accumulate(rows[::-1])]
    return Batch(other, tuple(turned))


def expected(inputs: Inputs, *, causal: bool) -> _reference.Attended:
    """The oracle's answer, float32."""
    return _reference.prefill(
        inputs.query, inputs.query_indptr, inputs.view, inputs.table, causal=causal
    )


def judge(
    backends: Backends, cell: Cell, inputs: Inputs, oracle: _reference.Attended
) -> dict[str, Any]:
    """The verdict on one cell."""
    try:
        out, lse = compute(backends, cell, inputs)
    except Unsupported as refusal:
        return {"cell": cell.name, "verdict": "refused", "why": str(refusal)}
    except RuntimeError as fault:
        if "CUDA error" in str(fault):
            raise  # the context is gone: every later cell would fail too
        return {"cell": cell.name, "verdict": "wrong", "why": str(fault)[:500]}
    error, sums = relative_error(out, oracle.out), lse_error(lse, oracle.lse)
    right = error <= OUT_MAX and sums <= LSE_MAX
    return {
        "cell": cell.name,
        "verdict": "right" if right else "wrong",
        "out": error,
        "lse": sums,
    }


def sweep(
    backends: Backends,
    done: set[str],
    seconds: float,
    keep: Callable[[dict[str, Any]], None],
    *,
    head_dims: tuple[int, ...] | None = None,
    only: tuple[str, ...] = BACKENDS,
    every: int = 1,
) -> int:
    """Judge cells that are not done yet until the time is up; returns how many are left.

    Args:
        backends: to take them from.
        done: names of cells that have a verdict.
        seconds: time for this part.
        keep: called with every verdict.
        head_dims: only these, when given.
        only: backends to judge.
        every: only every so many-th combination.
    """
    end = time.monotonic() + seconds
    left = 0
    made: tuple[Case, Inputs, _reference.Attended] | None = None
    wanted = [
        c
        for c in cells()
        if c.backend in only and (head_dims is None or c.case.head_dim in head_dims)
    ]
    order = {case: number for number, case in enumerate(dict.fromkeys(c.case for c in wanted))}
    for cell in sorted(wanted, key=lambda c: order[c.case]):
        if cell.name in done or order[cell.case] % every:
            continue
        if time.monotonic() > end:
            left += 1
            continue
        if made is None or made[0] != cell.case:
            inputs = build(cell.case, "cuda")
            made = (cell.case, inputs, expected(inputs, causal=cell.case.fresh is not None))
        verdict = judge(backends, cell, made[1], made[2])
        done.add(cell.name)
        keep(verdict)
    return left


def controls(backends: Backends) -> Iterator[dict[str, Any]]:
    """Damage one V page, one K page, and double the scale: every backend's output must move."""
    for backend, fresh in itertools.product(BACKENDS, (None, FRESH)):
        case = Case(lengths=LENGTHS, fresh=fresh, scope=ScaleScope.HEAD, group=4)
        cell = Cell(backend, case, graph=False)
        for damage in ("none", "value", "key", "scale"):
            inputs = build(case, "cuda")
            oracle = expected(inputs, causal=fresh is not None)
            page = int(inputs.table.pages_of(len(LENGTHS) - 1)[3])
            view = inputs.view
            if damage == "value":
                view.value.view(torch.uint8)[page] ^= 0x80
            elif damage == "key":
                view.key[page] += 1.0
            elif damage == "scale":
                double = LayerView(view.key, view.value, view.order, view.scale * 2, view.scope)
                inputs = inputs._replace(view=double)
            verdict = judge(backends, cell, inputs, oracle)
            yield {**verdict, "damage": damage}


def describe(case: Case) -> dict[str, str]:
    """A case as plain text, for a failure that is to be repeated."""
    return {name: str(value) for name, value in asdict(replace(case)).items()}
