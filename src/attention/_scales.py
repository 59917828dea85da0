"""Scales of the FP8 values: real value = code * scale.

Formula (that of the storage formats too): scale = max|V| / 448 over what the scale covers, 1.0
where that maximum is not above 0; code = e4m3fn(clamp(V / scale, -448, 448)) in float32, rounded
to nearest even. Infinities saturate, NaN stays NaN in its own element, and both are counted.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import torch

from attention._errors import CacheError
from tiers._layout import ScaleScope, StaticScales

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LIMITS: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite value of each format."""


class ScaleOrigin(enum.Enum):
    """Where scales come from, which decides who may share pages written with them."""

    STATIC = "static"
    """Given with the model: the same in every process that uses it, part of the provenance."""
    CALIBRATED = "calibrated"
    """Measured once over sample values, then fixed: part of the provenance by their bytes."""
    PER_TOKEN = "per_token"  # noqa: S105  # an origin, not a secret
    """From each token's own values: pages carry their scales and can be shared."""
    FIRST_PAGE = "first_page"
    """From a request's first page: its pages depend on the request, and carry their scales. They
    are private to it, or stored with the producer's scales; never shared as computed ones."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ValueScales:
    """How a cache scales its values. Make one with a class method.

    Attributes:
        origin: where the scales come from.
        scope: what one of them covers.
        values: float32 [layers, 1] or [layers, kv_heads] on the CPU for fixed scales, else None.
    """

    origin: ScaleOrigin
    scope: ScaleScope
    values: Tensor | None = None

    @classmethod
    def unit(cls, layers: int) -> ValueScales:
        """1.0 everywhere: codes are the values, as byte-through storage wants them."""
        return cls.static([1.0] * layers)

    @classmethod
    def static(cls, values: Sequence[float] | Sequence[Sequence[float]] | Tensor) -> ValueScales:
        """Scales that belong to the model: one per layer, or one per layer and KV head.

        Raises:
            CacheError: a scale that is not finite and above 0.
        """
        return cls._fixed(ScaleOrigin.STATIC, torch.as_tensor(values, dtype=torch.float32))

    @classmethod
    def calibrated(
        cls,
        samples: Sequence[Tensor],
        *,
        per_head: bool = True,
        margin: float = 1.0,
        value: torch.dtype = torch.float8_e4m3fn,
    ) -> ValueScales:
        """Scales measured over sample values, one tensor [tokens, kv_heads, head_dim] per layer.

        Args:
            samples: values of each layer.
            per_head: one scale per KV head, else one per layer.
            margin: headroom; 2.0 leaves a factor 2 above the largest sample.
            value: the format of the codes.
        """
        rows = [
            scale_of(sample, (0, 2) if per_head else (0, 1, 2), value).cpu() for sample in samples
        ]
        return cls._fixed(ScaleOrigin.CALIBRATED, torch.stack(rows) * margin)

    @classmethod
    def per_token(cls) -> ValueScales:
        """One scale per token and KV head, from the token's own values."""
        return cls(ScaleOrigin.PER_TOKEN, ScaleScope.TOKEN_HEAD)

    @classmethod
    def first_page(cls) -> ValueScales:
        """One scale per request and KV head, from the values of the request's first page."""
        return cls(ScaleOrigin.FIRST_PAGE, ScaleScope.TOKEN_HEAD)

    @classmethod
    def _fixed(cls, origin: ScaleOrigin, values: Tensor) -> ValueScales:
        rows = values.detach().to("cpu", torch.float32)
        if not rows.dim() or not rows.numel():
            raise CacheError(f"value scales of shape {tuple(rows.shape)}: one or more per layer")
        rows = rows.reshape(len(rows), -1).contiguous()
        if not bool((torch.isfinite(rows) & (rows > 0)).all()):
            raise CacheError("value scales are finite numbers above 0")
        scope = ScaleScope.TENSOR if rows.shape[1] == 1 else ScaleScope.HEAD
        return cls(origin, scope, rows)

    @property
    def shareable(self) -> bool:
        """Whether pages depend on their tokens alone, so that other requests may read them."""
        return self.origin is not ScaleOrigin.FIRST_PAGE

    @property
    def stored(self) -> StaticScales | None:
        """Fixed scales as a store takes them, None where pages carry their own."""
        if self.values is None:
            return None
        return StaticScales(self.scope, self.values.numpy())

    @property
    def provenance(self) -> str:
        """What a page's key must contain: the origin, and the bytes of fixed scales as a digest."""
        if self.values is None:
            return self.origin.value
        digest = hashlib.sha256(self.values.numpy().astype("<f4").tobytes()).hexdigest()
        return f"{self.origin.value}:{self.scope.value}:{digest[:32]}"


def scale_of(value: Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Scales over `axes` of `value`, float32; axes of size 1 are dropped.

    The quotient is rounded once, so that every device makes the same scale: on a GPU a division by
    a number would be a product with its rounded inverse.
    """
    peak = value.to(torch.float32).nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=axes)
    peak = peak.reshape(-1) if peak.dim() == 0 else peak
    scale = peak / torch.full_like(peak, LIMITS[dtype])
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantise(value: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `value` under `scale` (broadcast), and how many were clamped or not finite (int64)."""
    limit = LIMITS[dtype]
    ratio = value.to(torch.float32) / scale
    lost = ~(ratio.abs() <= limit)
    return ratio.clamp(-limit, limit).to(dtype), lost.sum(dtype=torch.int64)
