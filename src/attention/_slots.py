"""Where the new tokens of one step go, computed once for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attention._pages import PageTable


@final
class Slots:
    """Places of one step's new tokens, from `PagedKVCache.slots`.

    Attributes:
        where: int64 [tokens] on the cache's device: page * page_size + place.
        starts: position of each request's first new token.
        counts: new tokens of each request.
        first: slot of each request's first token.
    """

    __slots__ = ("counts", "first", "starts", "where")

    def __init__(
        self, where: Tensor, *, starts: list[int], counts: list[int], first: list[int]
    ) -> None:
        self.where = where
        self.starts = starts
        self.counts = counts
        self.first = first

    @classmethod
    def of(cls, table: PageTable, counts: Sequence[int], device: torch.device) -> Slots:
        """Places of each request's last counts[i] tokens.

        Raises:
            PageTableError: as `PageTable.slots`.
        """
        where = torch.from_numpy(table.slots(counts)).to(device)
        heads = [int(table.pages_of(row)[0]) if n else 0 for row, n in enumerate(table.counts)]
        lengths = table.lengths.tolist()
        return cls(
            where,
            starts=[length - count for length, count in zip(lengths, counts, strict=True)],
            counts=list(counts),
            first=[page * table.page_size for page in heads],
        )

    def __len__(self) -> int:
        return self.where.shape[0]
