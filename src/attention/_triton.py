"""The Triton kernels as a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import torch

from attention._backend import Batch, Buffers, Planned, Room, Wanted
from attention._errors import MissingPart
from tiers._layout import ScaleScope

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch import Tensor

    from attention._view import LayerView
    from attention.kernels import Tiles

CAPABILITY_MIN: Final = (8, 9)
"""The first devices that convert FP8."""


@final
class TritonBackend:
    """Any shape, by this package's own kernels.

    Args:
        fused: join the splits of a decode in the launch that computes them, by the program that is
            done last, instead of in one of its own.

    Raises:
        MissingPart: Triton is not installed.
    """

    name = "triton"

    def __init__(self, *, fused: bool = False) -> None:
        self._fused = fused
        try:
            from attention import kernels  # noqa: PLC0415 - Triton is optional
        except ImportError as error:
            raise MissingPart(f"the triton backend needs Triton: {error}") from error
        self._kernels: ModuleType = kernels

    def refusal(self, wanted: Wanted) -> str | None:
        """It needs a GPU that converts FP8, and pages in which 32 bits count."""
        if wanted.device.type != "cuda":
            return f"triton: pages on {wanted.device.type}: use reference"
        found = torch.cuda.get_device_capability(wanted.device)
        if found < CAPABILITY_MIN:
            return f"triton: compute capability {found} converts no FP8: use reference"
        if wanted.wide:
            return "triton: a page reaches further than 32 bits count: use reference"
        return None

    def plan(
        self,
        wanted: Wanted,
        views: Sequence[LayerView],
        batch: Batch,
        *,
        sm_scale: float,
        room: Room | None,
    ) -> Planned:
        """Choose splits and tiles; the table is copied to the device."""
        return _TritonPlan(
            (self._kernels, self._fused), wanted, views, batch, sm_scale=sm_scale, room=room
        )


@final
class _TritonPlan:
    def __init__(
        self,
        how: tuple[ModuleType, bool],
        wanted: Wanted,
        views: Sequence[LayerView],
        batch: Batch,
        *,
        sm_scale: float,
        room: Room | None,
    ) -> None:
        self._kernels, fused = how
        kernels = self._kernels
        self._wanted = wanted
        self._views = views
        self._sm_scale = sm_scale
        self._buffers = Buffers(batch, room, wanted.device)
        self._tiles = kernels.prefill_tiles(wanted.head_dim)
        self._rows = batch.rows[-1]
        # A graph replays a grid of this size, whatever the batch: room for one long request.
        self._fresh_max = batch.fresh_max if room is None else self._rows
        shape = (self._rows, wanted.query_heads)
        self._lse = torch.empty(shape, dtype=torch.float32, device=wanted.device)
        self._splits = 1
        if not wanted.prefill:
            self._tiles, self._splits = self._schedule(batch, room)
        self._partial = kernels.Partial.empty(
            *(batch.table.batch, self._splits, wanted.query_heads, wanted.head_dim, wanted.device),
            fused=fused,
        )

    def _schedule(self, batch: Batch, room: Room | None) -> tuple[Tiles, int]:
        """Shape and splits of decode programs; with room, those of its pages shared evenly."""
        wanted, lengths = self._wanted, batch.table.lengths.tolist()
        if room is not None:
            lengths = [room.pages * wanted.page_size // max(len(lengths), 1)] * len(lengths)
        by_token = wanted.scope is ScaleScope.TOKEN_HEAD
        blocks = -(-wanted.group // self._kernels.decode_rows(wanted.group))
        count = torch.cuda.get_device_properties(wanted.device).multi_processor_count
        choices = self._kernels.decode_tiles(wanted.head_dim, wanted.group, by_token=by_token)
        made: tuple[Tiles, int] = self._kernels.schedule(
            lengths, wanted.kv_heads * blocks, count, choices
        )
        return made

    def update(self, batch: Batch) -> None:
        self._buffers.write(batch)
        self._fresh_max = max(self._fresh_max, batch.fresh_max)

    def run(self, layer: int, query: Tensor, out: Tensor, lse: Tensor | None) -> None:
        if not self._rows:
            return
        sums = self._lse if lse is None else lse
        view, table = self._views[layer], self._buffers.table
        if self._wanted.prefill:
            self._kernels.prefill_pages(
                view,
                table,
                query,
                out,
                sums,
                starts=self._buffers.rows,
                sm_scale=self._sm_scale,
                fresh_max=self._fresh_max,
                causal=self._wanted.causal,
                tiles=self._tiles,
            )
        else:
            self._kernels.decode_pages(
                view,
                table,
                query,
                out,
                sums,
                sm_scale=self._sm_scale,
                splits=self._splits,
                partial=self._partial,
                tiles=self._tiles,
            )
