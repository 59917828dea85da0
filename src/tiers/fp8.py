"""FP8 values with scales: which scale, which code, what becomes of NaN and infinities.

For a group of values that share a scale, with `a` its largest finite magnitude and `M` the largest
finite magnitude of the code's format:

- the scale is ``float32(a / M)``; 1 when `a` is zero; the smallest positive float32 when the division
  gives zero. It is always finite and greater than zero.
- the code is ``float32(v / scale)``, clamped to plus and minus `M` by ourselves, rounded to the nearest
  code, ties to even. So the bytes are the same for every version of torch.
- an infinity takes the clamp's value, NaN becomes the format's NaN code in that element alone; both are
  counted, or refused with ``nonfinite="refuse"`` before anything is written.
- decoding is ``float32(code) * scale``, rounded once to the destination's dtype.

Arrays are numpy arrays of bit patterns, since numpy has no bfloat16: unsigned integers as wide as the
dtype that is named beside them. Any strides are taken.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from tiers._errors import AmplitudeError, NonFiniteValue
from tiers._fp8_cast import Job, decode, encode
from tiers._fp8_lookup import INFINITY
from tiers._fp8_scratch import LOOKUP, WIDE, Scratch, merge_axes, pieces, scale_box, split_shape
from tiers._fp8_tables import FORMATS, Fp8Format, decode_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch

    from tiers._fp8_scratch import Bits
    from tiers._team import Team

__all__ = [
    "FORMATS",
    "Counts",
    "Fp8Format",
    "NonFinite",
    "cast_values",
    "check_amplitude",
    "decode_table",
    "decode_values",
    "encode_values",
    "find_scales",
    "quantize",
    "unit_scale_error",
]

NonFinite: TypeAlias = Literal["saturate", "refuse"]
"""What becomes of NaN and infinities: encoded as described above and counted, or refused."""

_SMALLEST: Final = np.float32(2.0**-149)
_NORMAL: Final = 2.0**-126
_MAGNITUDE: Final[dict[int, Any]] = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFF_FFFF)}
"""Mask of all bits but the sign's, by bytes."""
_PEAK_SHARE: Final = 2 * 1024 * 1024
UNIT_SCALE_LIMIT: Final = 0.03
"""Relative RMS error up to which unit-scale codes pass; Gaussian values reach it at sigma 0.03."""


class Counts(NamedTuple):
    """Values that are not finite."""

    nan: int = 0
    infinite: int = 0


def find_scales(
    values: Bits,
    kept: Sequence[bool],
    scales: npt.NDArray[np.float32],
    *,
    dtype: str,
    form: Fp8Format,
    team: Team,
    nonfinite: NonFinite = "saturate",
) -> Counts:
    """Compute one scale for each group of values.

    Args:
        values: bit patterns of bfloat16, float16 (uint16) or float32 (uint32), any shape.
        kept: for each axis of `values`, whether scales differ along it.
        scales: destination, float32, dense, with the sizes of the kept axes in their order.
        dtype: dtype of the values.
        form: format that the scales are for.
        team: threads.
        nonfinite: what to do about NaN and infinities.

    Returns:
        How many values are NaN and infinite.

    Raises:
        NonFiniteValue: with ``nonfinite="refuse"``; `scales` is then untouched.
    """
    (merged,), flags = merge_axes([values], kept)
    return _find_merged(
        merged, flags, scales, dtype=dtype, form=form, team=team, nonfinite=nonfinite
    )


def _find_merged(
    values: Bits,
    kept: tuple[bool, ...],
    scales: npt.NDArray[np.float32],
    *,
    dtype: str,
    form: Fp8Format,
    team: Team,
    nonfinite: NonFinite,
) -> Counts:
    """`find_scales` of values whose axes are merged."""
    infinity = INFINITY[dtype]
    peaks = _peaks(values, kept, team, infinity=None)
    counts = Counts()
    if int(peaks.max(initial=0)) >= infinity:
        counts = _count(values, infinity)
        if nonfinite == "refuse":
            raise NonFiniteValue(nan=counts.nan, infinite=counts.infinite)
        peaks = _peaks(values, kept, team, infinity=infinity)
    found = magnitudes(peaks, dtype) / np.float32(form.largest)
    np.maximum(found, _SMALLEST, out=found)
    found[peaks == 0] = 1.0
    scales.reshape(-1)[:] = found.reshape(-1)
    return counts


def magnitudes(bits: Bits, dtype: str) -> npt.NDArray[np.float32]:
    """Bit patterns of finite numbers as float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(np.float32).copy()


def _peaks(values: Bits, kept: tuple[bool, ...], team: Team, *, infinity: int | None) -> Bits:
    """Largest magnitude's bits of each group, size 1 along shared axes.

    Magnitudes of floats are ordered as their bits are. With `infinity`, larger bits count as zero.
    """
    parts = min(team.threads, values.size // _PEAK_SHARE)
    if parts < 2:
        return _peaks_of(values, kept, team, infinity=infinity)
    shape = tuple(n if keep else 1 for n, keep in zip(values.shape, kept, strict=True))
    out = np.zeros(shape, values.dtype)
    boxes = split_shape(values.shape, parts)
    tasks = [
        functools.partial(_peaks_of, values[box], kept, team, infinity=infinity) for box in boxes
    ]
    for box, part in zip(boxes, team.run(tasks), strict=True):
        target = out[scale_box(box, kept)]
        np.maximum(target, part, out=target)
    return out


def _peaks_of(values: Bits, kept: tuple[bool, ...], team: Team, *, infinity: int | None) -> Bits:
    shape = tuple(n if keep else 1 for n, keep in zip(values.shape, kept, strict=True))
    out = np.zeros(shape, values.dtype)
    if not values.size:
        return out
    mask = _MAGNITUDE[values.itemsize]
    with team.workspace() as space:
        scratch = space.of(Scratch)
        room = scratch.narrow if values.itemsize == 2 else scratch.index.view(np.uint32)
        for box in pieces(values.shape, LOOKUP):
            part = values[box]
            found = room[: part.size].reshape(part.shape)
            np.bitwise_and(part, mask, out=found)
            if infinity is not None:
                found[found >= infinity] = 0
            for axis, keep in enumerate(kept):
                if not keep:
                    found = np.maximum.reduce(found, axis=axis, keepdims=True)
            target = out[scale_box(box, kept)]
            np.maximum(target, found, out=target)
    return out


def _count(values: Bits, infinity: int) -> Counts:
    mask = _MAGNITUDE[values.itemsize]
    nan = infinite = 0
    for box in pieces(values.shape, WIDE):
        part = values[box] & mask
        nan += int(np.count_nonzero(part > infinity))
        infinite += int(np.count_nonzero(part == infinity))
    return Counts(nan, infinite)


def encode_values(
    values: Bits,
    scales: npt.NDArray[np.float32],
    kept: Sequence[bool],
    codes: Bits,
    *,
    dtype: str,
    form: Fp8Format,
    team: Team,
    nan: bool = True,
) -> None:
    """Encode values with scales that are there already.

    Args:
        values: as for `find_scales`.
        scales: float32, dense, writable memory, finite and positive.
        kept: as for `find_scales`.
        codes: destination, uint8 of the shape of `values`.
        dtype: dtype of the values.
        form: format of the codes.
        team: threads.
        nan: the values may hold NaN.
    """
    encode(Job.of(values, codes, scales, kept, dtype=dtype, form=form, nan=nan), team)


def cast_values(
    values: Bits,
    kept: Sequence[bool],
    codes: Bits,
    store: Callable[[npt.NDArray[np.float32]], object],
    *,
    dtype: str,
    form: Fp8Format,
    team: Team,
    nonfinite: NonFinite = "saturate",
) -> Counts:
    """Compute scales and encode with them.

    Args:
        values: as for `find_scales`.
        kept: as for `find_scales`.
        codes: destination, uint8 of the shape of `values`.
        store: given the scales, flat, dense in the kept axes; they are gone when it returns.
        dtype: dtype of the values.
        form: format of the codes.
        team: threads.
        nonfinite: what to do about NaN and infinities.

    Raises:
        NonFiniteValue: with ``nonfinite="refuse"``; nothing is then written.
    """
    (values, codes), flags = merge_axes([values, codes], kept)
    sizes = [n if keep else 1 for n, keep in zip(values.shape, flags, strict=True)]
    with team.workspace() as space:
        scales = space.of(Scratch).scales(math.prod(sizes))
        counts = _find_merged(
            values, flags, scales, dtype=dtype, form=form, team=team, nonfinite=nonfinite
        )
        # A scale below the normal numbers is rounded so much that quotients pass the largest code.
        clamp = any(counts) or float(scales.min(initial=1.0)) < _NORMAL
        job = Job(values, codes, scales.reshape(sizes), flags, dtype, form, counts.nan > 0, clamp)
        encode(job, team)
        store(scales)
    return counts


def decode_values(
    codes: Bits,
    scales: npt.NDArray[np.float32],
    kept: Sequence[bool],
    values: Bits,
    *,
    dtype: str,
    form: Fp8Format,
    team: Team,
) -> None:
    """Decode codes to bfloat16, float16 or float32.

    Args:
        codes: uint8.
        scales: float32, dense in the kept axes; may be read-only memory at any address.
        kept: for each axis of `codes`, whether scales differ along it.
        values: destination, bit patterns of the shape of `codes`.
        dtype: dtype of the destination.
        form: format of the codes.
        team: threads.
    """
    with team.workspace() as space:
        own = space.of(Scratch).scales(scales.size)
        own[:] = scales.reshape(-1)
        decode(Job.of(values, codes, own, kept, dtype=dtype, form=form), team)


def quantize(
    values: torch.Tensor, *, shared: Sequence[int], form: Fp8Format = FORMATS["float8_e4m3fn"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rules in plain torch, for a tensor on any device; also the reference for tests.

    Args:
        values: a floating-point tensor.
        shared: axes along which values share a scale.
        form: format of the codes.

    Returns:
        Codes, of the shape of `values` and the format's dtype, and scales, float32, with size 1
        along the shared axes.
    """
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    wide = values.detach().to(torch.float32)
    finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
    peak = finite.amax(dim=tuple(shared), keepdim=True) if shared else finite
    # Divided by a tensor: CUDA turns division by a number into a product with its reciprocal.
    scales = peak / torch.full_like(peak, form.largest)
    scales = torch.where(peak > 0, scales.clamp_min(float(_SMALLEST)), 1.0)
    dtype: Any = getattr(torch, form.name)
    codes = (wide / scales).clamp_(-form.largest, form.largest).to(dtype)
    bits = codes.view(torch.uint8)
    return torch.where(wide.isnan(), form.nan, bits).to(torch.uint8).view(dtype), scales


def unit_scale_error(values: torch.Tensor, *, form: Fp8Format = FORMATS["float8_e4m3fn"]) -> float:
    """Relative RMS error of `values` as codes with a scale of one; 0 for all zeros.

    Small values underflow: on Gaussian values 0.0265 at sigma 0.1, 0.029 at 0.03, 0.057 at 0.01, 0.19
    at 0.003.
    """
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    exact = values.detach().to(torch.float32)
    dtype: Any = getattr(torch, form.name)
    read = exact.clamp(-form.largest, form.largest).to(dtype).to(torch.float64)
    power = float(exact.to(torch.float64).square().sum())
    error = float((read - exact).square().sum())
    return math.sqrt(error / power) if power else 0.0


def check_amplitude(
    values: torch.Tensor,
    *,
    limit: float = UNIT_SCALE_LIMIT,
    form: Fp8Format = FORMATS["float8_e4m3fn"],
) -> float:
    """What a producer of unit-scale codes calls before it casts.

    Returns:
        The relative RMS error that the codes will have.

    Raises:
        AmplitudeError: it is above `limit`, or not a number.
    """
    error = unit_scale_error(values, form=form)
    if not error <= limit:
        raise AmplitudeError(error=error, limit=limit)
    return error
