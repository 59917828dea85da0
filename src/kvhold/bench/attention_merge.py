"""Ways to join the splits of a decode with few requests, side by side on the same pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from attention._choice import Backends
from attention._errors import MissingPart, Unsupported
from attention._triton import TritonBackend
from attention.flashinfer import FlashInferBackend, Library, ModuleKey
from kvhold.bench import attention_time as timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attention._backend import Backend

SHAPES: Final = ((1, 131072), (8, 32768), (1, 32768), (64, 4096))
GROUPS: Final = (1, 4)
TURNS: Final = 3
"""Every way is timed so many times, in turns, so that a device that drifts drifts under all."""


CANDIDATES: Final = {
    "cores, merge of 512 threads": {"wide_merge": True},
    "cores, early trigger": {"early_trigger": True},
    "cores, merge of 512 threads, early trigger": {"wide_merge": True, "early_trigger": True},
}


def specs() -> list[Any]:
    """How to build the modules of the candidates."""
    types = (torch.bfloat16, torch.float8_e4m3fn, timing.HEAD_DIM)
    key = ModuleKey(True, *types, False)  # noqa: FBT003 - a record of what a module is built for
    return [Library(**how).spec(key) for how in CANDIDATES.values()]


def ways(library: Library | None) -> dict[str, Callable[[], Backend]]:
    """How splits can be joined: those in use first, the candidates behind them.

    Args:
        library: the installed FlashInfer as it is used, None for Triton alone.
    """
    found: dict[str, Callable[[], Backend]] = {
        "triton, a merge of its own": TritonBackend,
        "triton, merged by the last program": lambda: TritonBackend(fused=True),
    }
    if library is None:
        return found

    made: dict[str, Callable[[], Backend]] = {
        name: partial(_cores, how) for name, how in CANDIDATES.items()
    }
    stock = "cores, merge of 128 threads"
    return {stock: lambda: FlashInferBackend(cores=True, library=library), **made, **found}


def _cores(how: dict[str, bool]) -> Backend:
    return FlashInferBackend(cores=True, library=Library(**how))


def compared(library: Library | None) -> Iterator[dict[str, Any]]:
    """Times of all ways, and how far their outputs are from the first one's.

    Args:
        library: the installed FlashInfer, None for Triton alone.
    """
    ceiling = timing.copy_rate()
    made: dict[str, Backend] = {}
    for name, make in ways(library).items():
        try:
            made[name] = make()
        except (MissingPart, Unsupported):
            continue
    for batch, tokens in SHAPES:
        pages = timing.pages_of(batch, tokens)
        nbytes = batch * tokens * timing.KV_HEADS * timing.HEAD_DIM * 3
        for group in GROUPS:
            shape = f"{batch} x {tokens}, group {group}"
            query = timing.query_of(batch, group)
            yield from _rows(made, pages, query, shape, (nbytes, ceiling))


def _rows(
    made: dict[str, Backend],
    pages: timing.Pages,
    query: torch.Tensor,
    shape: str,
    scale: tuple[int, float],
) -> Iterator[dict[str, Any]]:
    """One shape: every way in turns."""
    nbytes, ceiling = scale
    rows = tuple(range(len(query) + 1))
    launches = {}
    for name, backend in made.items():
        try:
            launches[name] = timing.launch_of(Backends([backend]), backend.name, pages, query, rows)
        except (MissingPart, Unsupported):
            continue
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in launches}
    for _ in range(TURNS):
        for name, (launch, _, _) in launches.items():
            times[name].append(timing.clock(launch, 20))
    first = next(iter(launches.values()))[2].float() if launches else None
    for name, (_, _, out) in launches.items():
        micros, spread = sorted(times[name])[TURNS // 2]
        figure = timing.Figure(name, shape, micros, spread, nbytes)
        assert first is not None  # noqa: S101 - there is one if there are any
        apart = (out.float() - first).norm() / first.norm()
        yield figure.row(ceiling) | {"apart": f"{float(apart):.1e}"}
