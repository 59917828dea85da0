"""Encoding and decoding of FP8 values by chunks, on any number of threads.

Two ways give the same bytes. Where many values share a scale, a table over all 16-bit patterns (or
over all pairs of codes) is built once for the scale and looked up; elsewhere values are widened to
float32, divided or multiplied by their scales, and cast. Which one is faster was measured; see
docs/codec.md.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from tiers._fp8_scratch import (
    LOOKUP,
    WIDE,
    Scratch,
    merge_axes,
    pieces,
    scale_box,
    split_shape,
)
from tiers._fp8_tables import Fp8Format, decode_table, pair_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    import torch

    from tiers._fp8_scratch import Bits
    from tiers._team import Team

    Floats = npt.NDArray[np.float32]

ENCODE_GROUP: Final = 192 * 1024
"""Values per scale and thread from which an encode table pays for itself."""
DECODE_GROUP: Final = 64 * 1024
"""Values per scale and thread from which a decode table pays for itself."""
SHARE: Final = 128 * 1024
"""Values below which a further thread costs more than it gains."""
INFINITY: Final = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
"""Bits of positive infinity: of the magnitudes, larger bits are NaN and smaller ones finite."""


@final
@dataclass(frozen=True, slots=True)
class Job:
    """Values, codes and scales viewed with the same few axes.

    Attributes:
        values: bit patterns, unsigned integers as wide as the dtype.
        codes: uint8 of the same shape.
        scales: float32; size 1 along the axes that share a scale.
        kept: axes along which scales differ.
        dtype: the values' dtype.
        form: the codes' format.
        nan: values may hold NaN.
    """

    values: Bits
    codes: Bits
    scales: Floats
    kept: tuple[bool, ...]
    dtype: str
    form: Fp8Format
    nan: bool = False

    @classmethod
    def of(
        cls,
        values: Bits,
        codes: Bits,
        scales: Floats,
        kept: Sequence[bool],
        *,
        dtype: str,
        form: Fp8Format,
        nan: bool = False,
    ) -> Job:
        """Merge axes; `scales` is dense in the kept axes of `values`, in their order."""
        (values, codes), flags = merge_axes([values, codes], kept)
        sizes = [n if keep else 1 for n, keep in zip(values.shape, flags, strict=True)]
        return cls(values, codes, scales.reshape(sizes), flags, dtype, form, nan)

    def at(self, box: tuple[slice, ...]) -> Job:
        """The part of the job in a box of the values."""
        scales = self.scales[scale_box(box, self.kept)]
        return Job(
            self.values[box], self.codes[box], scales, self.kept, self.dtype, self.form, self.nan
        )

    def groups(self) -> Iterator[Job]:
        """One job for each scale."""
        ranges = (range(n) for n in self.scales.shape)
        for index in itertools.product(*ranges):
            box = tuple(
                slice(i, i + 1) if keep else slice(0, n)
                for i, keep, n in zip(index, self.kept, self.values.shape, strict=True)
            )
            yield self.at(box)

    @property
    def group(self) -> int:
        """Values that share one scale."""
        return self.values.size // max(self.scales.size, 1)

    def shares(self, team: Team) -> list[Job]:
        """One job for each thread that is worth starting."""
        parts = min(team.threads, self.values.size // SHARE)
        return [self.at(box) for box in split_shape(self.values.shape, self.kept, parts)]


def encode(job: Job, team: Team) -> None:
    """Fill the job's codes from its values and scales."""
    if job.values.size:
        team.run([functools.partial(_encode_share, share, team) for share in job.shares(team)])


def decode(job: Job, team: Team) -> None:
    """Fill the job's values from its codes and scales."""
    if job.values.size:
        team.run([functools.partial(_decode_share, share, team) for share in job.shares(team)])


def _encode_share(job: Job, team: Team) -> None:
    with team.workspace() as space:
        scratch = space.of(Scratch)
        if job.values.itemsize == 2 and job.group >= ENCODE_GROUP:
            for group in job.groups():
                _encode_lookup(group, scratch)
            return
        for box in pieces(job.values.shape, WIDE):
            _encode_wide(job.at(box), scratch)


def _encode_lookup(job: Job, scratch: Scratch) -> None:
    """One scale: a code for every 16-bit pattern, then a lookup."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    _fill_encode_table(job, scratch)
    for box in pieces(job.values.shape, LOOKUP):
        values, codes = job.values[box], job.codes[box]
        count = values.size
        np.copyto(scratch.index[:count].reshape(values.shape), values)
        direct = codes.flags.c_contiguous
        out = torch.from_numpy(codes.reshape(-1)) if direct else scratch.codes_tensor[:count]
        torch.index_select(scratch.encode_table_tensor, 0, scratch.index_tensor[:count], out=out)
        if not direct:
            np.copyto(codes, scratch.codes[:count].reshape(codes.shape))


def _fill_encode_table(job: Job, scratch: Scratch) -> None:
    """Codes of the finite magnitudes and infinity by `_cast`; signs and NaN by the definition."""
    table, infinity = scratch.encode_table, INFINITY[job.dtype]
    steps = itertools.pairwise([*range(0, infinity + 1, WIDE), infinity + 1])
    for start, end in steps:
        count = end - start
        np.copyto(scratch.narrow[:count], np.arange(start, end, dtype=np.uint16))
        scratch.wide_tensor[:count].copy_(scratch.narrow_tensors[job.dtype][:count])
        _cast(scratch, count, job.scales.reshape(1), (count,), job.form)
        table[start:end] = scratch.codes[:count]
    table[infinity + 1 : 0x8000] = job.form.nan
    np.bitwise_or(table[: infinity + 1], 0x80, out=table[0x8000 : 0x8000 + infinity + 1])
    if job.form.name == "float8_e4m3fnuz":
        negative = table[0x8000 : 0x8000 + infinity + 1]
        negative[negative == 0x80] = 0
    table[0x8000 + infinity + 1 :] = job.form.nan


def _encode_wide(job: Job, scratch: Scratch) -> None:
    """Any number of scales: widen, divide, clamp, cast."""
    values, count = job.values, job.values.size
    if values.itemsize == 2:
        np.copyto(scratch.narrow[:count].reshape(values.shape), values)
        scratch.wide_tensor[:count].copy_(scratch.narrow_tensors[job.dtype][:count])
    else:
        np.copyto(scratch.wide[:count].reshape(values.shape), values.view(np.float32))
    _cast(scratch, count, job.scales, values.shape, job.form)
    codes = scratch.codes[:count]
    if job.nan:
        codes[np.isnan(scratch.wide[:count])] = job.form.nan
    np.copyto(job.codes, codes.reshape(values.shape))


def _cast(
    scratch: Scratch, count: int, scales: Floats, shape: tuple[int, ...], form: Fp8Format
) -> None:
    """`wide / scales`, clamped by ourselves, to the nearest code, ties to even, in `codes`."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    wide = scratch.wide_tensor[:count]
    wide.view(shape).div_(torch.from_numpy(scales))
    wide.clamp_(-form.largest, form.largest)
    dtype: torch.dtype = getattr(torch, form.name)
    scratch.codes_tensor[:count].view(dtype).copy_(wide)


def _decode_share(job: Job, team: Team) -> None:
    with team.workspace() as space:
        scratch = space.of(Scratch)
        paired = job.codes.shape[-1] % 2 == 0 and job.codes.strides[-1] == 1
        if paired and job.values.itemsize == 2 and job.group >= DECODE_GROUP:
            for group in job.groups():
                _decode_lookup(group, scratch)
            return
        for box in pieces(job.values.shape, WIDE):
            _decode_wide(job.at(box), scratch)


def _decode_lookup(job: Job, scratch: Scratch) -> None:
    """One scale: two values for every pair of codes, then a lookup."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    _fill_decode_table(job, scratch)
    for box in pieces(job.values.shape, LOOKUP):
        values, codes = job.values[box], job.codes[box]
        pairs = codes.view(np.uint16)
        count = pairs.size
        np.copyto(scratch.index[:count].reshape(pairs.shape), pairs)
        direct = values.flags.c_contiguous and values.flags.aligned and values.ctypes.data % 4 == 0
        out = (
            torch.from_numpy(values.reshape(-1).view(np.int32))
            if direct
            else scratch.narrow_pairs_tensor[:count]
        )
        torch.index_select(scratch.decode_table_tensor, 0, scratch.index_tensor[:count], out=out)
        if not direct:
            np.copyto(values, scratch.narrow[: 2 * count].reshape(values.shape))


def _fill_decode_table(job: Job, scratch: Scratch) -> None:
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    wide = scratch.wide_tensor[:256]
    torch.mul(_codes_tensor(job.form.name), torch.from_numpy(job.scales.reshape(1)), out=wide)
    scratch.narrow_tensors[job.dtype][:256].copy_(wide)
    single = scratch.narrow[:256].astype(np.uint32)
    table = scratch.decode_table.reshape(256, 256)
    np.bitwise_or(single[None, :], single[:, None] << np.uint32(16), out=table)


def _decode_wide(job: Job, scratch: Scratch) -> None:
    """Any number of scales: widen, multiply, round to the destination's dtype."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    values, count = job.values, job.values.size
    wide = scratch.wide_tensor[:count]
    _widen(job.codes, job.form.name, scratch)
    wide.view(values.shape).mul_(torch.from_numpy(job.scales))
    if values.itemsize == 2:
        scratch.narrow_tensors[job.dtype][:count].copy_(wide)
        np.copyto(values, scratch.narrow[:count].reshape(values.shape))
    else:
        np.copyto(values.view(np.float32), scratch.wide[:count].reshape(values.shape))


def _widen(codes: Bits, name: str, scratch: Scratch) -> None:
    """Codes as float32 in `wide`, without their scales."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    if codes.shape[-1] % 2 == 0 and codes.strides[-1] == 1:
        pairs = codes.view(np.uint16)
        count = pairs.size
        np.copyto(scratch.index[:count].reshape(pairs.shape), pairs)
        table, out = _pairs_tensor(name), scratch.pairs_tensor[:count]
    else:
        count = codes.size
        np.copyto(scratch.index[:count].reshape(codes.shape), codes)
        table, out = _codes_tensor(name), scratch.wide_tensor[:count]
    torch.index_select(table, 0, scratch.index_tensor[:count], out=out)


@functools.cache
def _pairs_tensor(name: str) -> Any:
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    return torch.from_numpy(pair_table(name).copy())


@functools.cache
def _codes_tensor(name: str) -> Any:
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    return torch.from_numpy(decode_table(name).copy())
