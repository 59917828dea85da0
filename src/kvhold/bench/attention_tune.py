"""Shapes of programs and splits, timed against each other: how the defaults were chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attention._errors import MissingPart
from attention.flashinfer import Library
from kvhold.bench.attention_time import (
    HEAD_DIM,
    KV_HEADS,
    PREFILL,
    Pages,
    clock,
    ours,
    pages_of,
    query_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

SHAPES: Final = ((64, 4096), (8, 32768))
WIDEN_ROWS: Final = (1, 2, 4)


def tune(library: Library | None) -> Iterator[dict[str, Any]]:
    """Every variant on the batched shapes at group 4."""
    for batch, tokens in SHAPES:
        pages = pages_of(batch, tokens)
        query = query_of(batch, 4)
        shape = f"{batch} x {tokens}"
        if library is not None:
            yield from _tensor(pages, query, shape)
        yield from _triton(pages, query, shape)
    fresh, prefix = PREFILL
    pages = pages_of(1, fresh + prefix)
    yield from _triton_prefill(pages, query_of(fresh, 4), f"{fresh} over {prefix}")


def _tensor(pages: Pages, query: torch.Tensor, shape: str) -> Iterator[dict[str, Any]]:
    from attention._choice import Backends  # noqa: PLC0415 - kept beside its only use

    batch = query.shape[0]
    for rows in WIDEN_ROWS:
        backends = Backends(library=Library(widen_rows=rows))
        launch, name = ours(backends, "flashinfer", pages, query, tuple(range(batch + 1)))
        micros, spread = clock(launch)
        yield _line(f"{name}, {rows} rows widened at a time", shape, micros, spread)


def _kernels() -> ModuleType:
    try:
        from attention import kernels  # noqa: PLC0415 - Triton is optional
    except ImportError as error:
        raise MissingPart(f"needs Triton: {error}") from error
    return kernels


def _table(pages: Pages) -> tuple[torch.Tensor, ...]:
    table = pages.table
    parts = (table.indptr, table.indices, table.last_page_len)
    return tuple(torch.from_numpy(part).cuda() for part in parts)


def _triton(pages: Pages, query: torch.Tensor, shape: str) -> Iterator[dict[str, Any]]:
    kernels = _kernels()
    table = _table(pages)
    batch, heads, dim = query.shape
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device="cuda")
    for tokens, warps, stages in ((128, 4, 3), (64, 4, 3), (64, 2, 3), (128, 8, 3), (64, 4, 5)):
        best: tuple[float, float, int] | None = None
        for splits in (1, 2, 3, 4, 6, 8, 16):
            partial = kernels.Partial.empty(batch, splits, heads, dim, query.device)
            tiles = kernels.Tiles(tokens=tokens, warps=warps, stages=stages)

            def launch(splits: int = splits, partial: Any = partial, tiles: Any = tiles) -> None:
                kernels.decode_pages(
                    pages.view,
                    table,
                    query,
                    out,
                    lse,
                    sm_scale=HEAD_DIM**-0.5,
                    splits=splits,
                    partial=partial,
                    tiles=tiles,
                )

            micros, spread = clock(launch, 15)
            best = min(best or (micros, spread, splits), (micros, spread, splits))
        assert best is not None  # noqa: S101 - there are splits
        what = f"triton {tokens} tokens, {warps} warps, {stages} stages, best of splits {best[2]}"
        yield _line(what, shape, best[0], best[1])


def _triton_prefill(pages: Pages, query: torch.Tensor, shape: str) -> Iterator[dict[str, Any]]:
    kernels = _kernels()
    table = _table(pages)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device="cuda")
    starts = torch.tensor([0, query.shape[0]], dtype=torch.int32, device="cuda")
    for rows, tokens, warps, stages in ((128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 3)):
        tiles = kernels.Tiles(tokens=tokens, warps=warps, stages=stages, rows=rows)

        def launch(tiles: Any = tiles) -> None:
            kernels.prefill_pages(
                pages.view,
                table,
                query,
                out,
                lse,
                starts=starts,
                sm_scale=HEAD_DIM**-0.5,
                fresh_max=query.shape[0],
                causal=True,
                tiles=tiles,
            )

        micros, spread = clock(launch, 10)
        yield _line(f"triton prefill {rows} x {tokens}, {warps} warps", shape, micros, spread)


def _line(what: str, shape: str, micros: float, spread: float) -> dict[str, Any]:
    line = {"what": what, "shape": shape, "us": round(micros, 1), "spread_us": round(spread, 1)}
    line["kv_heads"] = KV_HEADS
    return line
