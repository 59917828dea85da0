"""Dense caches that round what they keep as a format would: the formats beside K16/V8.

They share their arithmetic (float32 attention of plain torch), so two of them differ in the rounding
alone. FP8 keys and values have one scale per token and head, which is the finest that engines use: the
comparison is with FP8 at its best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, final

import torch
from torch.nn import functional

from attention._scales import quantise, scale_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvhold.model_attention import Reads

FP8: Final = torch.float8_e4m3fn


class Format(NamedTuple):
    """How many bits keys and values are kept in.

    Attributes:
        key: 16 or 8.
        value: 16 or 8.
    """

    key: int
    value: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"K{self.key}/V{self.value}"


K16V16: Final = Format(16, 16)
K16V8: Final = Format(16, 8)
K8V16: Final = Format(8, 16)
K8V8: Final = Format(8, 8)


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """What is read back of a tensor that was kept in `bits` bits, float32.

    Args:
        tensor: [..., heads, head_dim].
        bits: 16 for bfloat16, 8 for e4m3fn with a scale per token and head.
    """
    if bits == 16:
        return tensor.to(torch.bfloat16).float()
    scale = scale_of(tensor, (tensor.dim() - 1,), FP8)[..., None]
    codes, _ = quantise(tensor, scale, FP8)
    return codes.float() * scale


@final
class DenseReads:
    """Keys and values of some requests of equal length, rounded as they come in.

    Args:
        form: how they are rounded.
        layers: attention layers.

    Attributes:
        length: tokens of each request that are there; set it back to forget the last ones.
    """

    def __init__(self, form: Format, layers: int) -> None:
        self.form = form
        self.length = 0
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """See `Reads.attend`."""
        fresh = rounded(key, self.form.key), rounded(value, self.form.value)
        before = self._kept[layer]
        if before is not None:
            fresh = (
                torch.cat([before[0][:, : self.length], fresh[0]], dim=1),
                torch.cat([before[1][:, : self.length], fresh[1]], dim=1),
            )
        self._kept[layer] = fresh
        if layer == len(self._kept) - 1:
            self.length += key.shape[1]
        return dense_attention(query, *fresh, scale=scale)

    def kept(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [batch, length, kv_heads, head_dim]."""
        found = self._kept[layer]
        assert found is not None  # noqa: S101 - asked for behind a step
        return found


def dense_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Causal attention of the last tokens over all, in float32; axes as in `Reads.attend`."""
    fresh, length = query.shape[1], key.shape[1]
    places = torch.arange(length, device=query.device)
    seen = places[None, :] <= places[length - fresh :, None]
    found = functional.scaled_dot_product_attention(
        query.float().transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=seen,
        scale=scale,
        enable_gqa=True,
    )
    return found.transpose(1, 2).to(query.dtype)


@final
class Watched:
    """Any reads, with each layer's attention output kept.

    Attributes:
        outputs: of the last step, by layer; float32 [batch, tokens, query_heads, head_dim].
    """

    def __init__(self, inner: Reads) -> None:
        self._inner = inner
        self.outputs: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """See `Reads.attend`."""
        out = self._inner.attend(layer, query, key, value, scale=scale)
        self.outputs[layer] = out.float()
        return out


@final
class Probed:
    """16-bit reads that also ask, layer by layer, what another format would have given there.

    The query is the 16-bit run's own: the error is of one layer's read, and nothing has built up.

    Args:
        inner: the 16-bit cache.
        forms: the formats that are asked for.

    Attributes:
        errors: relative RMS error of the attention output, by format and layer.
    """

    def __init__(self, inner: DenseReads, forms: tuple[Format, ...]) -> None:
        self._inner = inner
        self._forms = forms
        self.errors: dict[Format, dict[int, float]] = {form: {} for form in forms}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """See `Reads.attend`."""
        out = self._inner.attend(layer, query, key, value, scale=scale)
        keys, values = self._inner.kept(layer)
        for form in self._forms:
            other = dense_attention(
                query, rounded(keys, form.key), rounded(values, form.value), scale=scale
            )
            self.errors[form][layer] = relative_error(other, out)
        return out


def relative_error(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of what is expected."""
    difference = (found.float() - expected.float()).norm()
    return float(difference / expected.float().norm())
