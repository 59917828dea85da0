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

WIDEN_ROWS: Final = (1, 2)
TILES: Final = (
    (64, 4, 5), (64, 4, 7), (64, 8, 5), (64, 8, 7), (64, 2, 5),
    (32, 4, 7), (32, 4, 9), (32, 4, 11), (32, 2, 9), (128, 8, 5),
)  # fmt: skip
"""Tokens, warps and stages of a decode program."""
SPLITS: Final = {
    (64, 4096): (1, 2, 4),
    (8, 32768): (4, 6, 8, 16),
    (1, 131072): (16, 32, 33, 49, 66),
}
PREFILL_TILES: Final = (
    (128, 128, 8, 3), (128, 128, 8, 5), (128, 64, 8, 5), (128, 64, 8, 7), (64, 64, 4, 5),
    (64, 64, 4, 7), (64, 128, 4, 5), (64, 128, 8, 5),
)  # fmt: skip
"""Rows, tokens, warps and stages of a prefill program."""


def tune(library: Library | None) -> Iterator[dict[str, Any]]:
    """Every variant at group 4, of the Triton kernels or of the FlashInfer module."""
    for batch, tokens in SPLITS:
        pages = pages_of(batch, tokens)
        query = query_of(batch, 4)
        shape = f"{batch} x {tokens}"
        if library is None:
            yield from _triton(pages, query, shape, SPLITS[batch, tokens])
        else:
            yield from _tensor(pages, query, shape, tuple(range(batch + 1)))
    fresh, prefix = PREFILL
    pages = pages_of(1, fresh + prefix)
    query, shape = query_of(fresh, 4), f"{fresh} over {prefix}"
    if library is None:
        yield from _triton_prefill(pages, query, shape)
    else:
        yield from _tensor(pages, query, shape, (0, fresh))


def _tensor(
    pages: Pages, query: torch.Tensor, shape: str, rows: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    from attention._choice import Backends  # noqa: PLC0415 - kept beside its only use

    for widen in WIDEN_ROWS:
        backends = Backends(library=Library(widen_rows=widen))
        launch, name = ours(backends, "flashinfer", pages, query, rows)
        micros, spread = clock(launch, 15)
        yield _line(f"{name}, {widen} rows widened at a time", shape, micros, spread)


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


def _triton(
    pages: Pages, query: torch.Tensor, shape: str, choices: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    kernels = _kernels()
    table = _table(pages)
    batch, heads, dim = query.shape
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device="cuda")
    for tokens, warps, stages in TILES:
        for splits in choices:
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

            what = f"triton {tokens} tokens, {warps} warps, {stages} stages, {splits} splits"
            yield _line(what, shape, *clock(launch, 15))


def _triton_prefill(pages: Pages, query: torch.Tensor, shape: str) -> Iterator[dict[str, Any]]:
    kernels = _kernels()
    table = _table(pages)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device="cuda")
    starts = torch.tensor([0, query.shape[0]], dtype=torch.int32, device="cuda")
    for rows, tokens, warps, stages in PREFILL_TILES:
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
        what = f"triton prefill {rows} x {tokens}, {warps} warps, {stages} stages"
        yield _line(what, shape, micros, spread)


def _line(what: str, shape: str, micros: float, spread: float) -> dict[str, Any]:
    line = {"what": what, "shape": shape, "us": round(micros, 1), "spread_us": round(spread, 1)}
    line["kv_heads"] = KV_HEADS
    return line
