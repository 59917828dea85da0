"""Where the new tokens of one step go, computed once for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import Tensor


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

    def __len__(self) -> int:
        return self.where.shape[0]
