"""Encoding and decoding of FP8 values by chunks, on any number of threads.

Two ways give the same bytes. Where long runs of values share a scale, a table over all 16-bit patterns
(or over all pairs of codes) is built once for the scale and looked up; elsewhere values are widened to
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

ENCODE_RUN: Final = 64 * 1024
"""Neighbouring values with one scale from which an encode table pays for itself."""
DECODE_RUN: Final = 64 * 1024
"""Neighbouring values with one scale from which a decode table pays for itself."""
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
    def run(self) -> int:
        """Neighbouring values that share one scale."""
        return 1 if self.kept[-1] else self.values.shape[-1]

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
        if job.values.itemsize == 2 and job.run >= ENCODE_RUN:
            for group in job.groups():
                _encode_lookup(group, scratch)
        else:
            _encode_wide(job, scratch)


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
    """Codes of all patterns: by `_cast` where they change, constant below and above, NaN by rule."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    table, infinity, form = scratch.encode_table, INFINITY[job.dtype], job.form
    scale = torch.from_numpy(job.scales.reshape(1))
    low, high = _changing(float(scale), job.dtype, form)
    table[:low] = 0
    table[high : infinity + 1] = form.top
    for start in range(low, high, WIDE):
        end = min(start + WIDE, high)
        count = end - start
        scratch.narrow[:count] = np.arange(start, end, dtype=np.uint16)
        wide = scratch.wide_tensor[:count].copy_(scratch.narrow_tensors[job.dtype][:count])
        _cast(wide.div_(scale), scratch.fp8_tensors[form.name][:count], form)
        table[start:end] = scratch.codes[:count]
    negative = table[0x8000 : 0x8000 + infinity + 1]
    np.bitwise_or(table[: infinity + 1], 0x80, out=negative)
    if form.name == "float8_e4m3fnuz":
        negative[negative == 0x80] = 0  # there is no negative zero
    table[infinity + 1 : 0x8000] = form.nan
    table[0x8000 + infinity + 1 :] = form.nan


def _changing(scale: float, dtype: str, form: Fp8Format) -> tuple[int, int]:
    """Patterns of positive numbers outside of which a code is zero, or the largest.

    With room to spare: a quarter of the smallest code above zero, and twice the largest.
    """
    ends = np.array([scale * form.smallest / 4, scale * form.largest * 2])
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float16":
            bits = ends.astype(np.float16).view(np.uint16)
        else:
            bits = ends.astype(np.float32).view(np.uint32) >> np.uint32(16)
    return int(bits[0]), min(int(bits[1]) + 1, INFINITY[dtype] + 1)


def _encode_wide(job: Job, scratch: Scratch) -> None:
    """Any number of scales: widen, divide, clamp, cast."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    form, kept = job.form, job.kept
    for box in pieces(job.values.shape, WIDE):
        values = job.values[box]
        view = scratch.views(values.shape, job.dtype, form.name, paired=False)
        if view.narrow_tensor is None:
            np.copyto(view.wide, values.view(np.float32))
        else:
            np.copyto(view.narrow, values)
            view.wide_tensor.copy_(view.narrow_tensor)
        view.wide_shaped.div_(torch.from_numpy(job.scales[scale_box(box, kept)]))
        _cast(view.wide_tensor, view.codes_tensor, form)
        if job.nan:
            view.codes[np.isnan(view.wide)] = form.nan
        np.copyto(job.codes[box], view.codes)


def _cast(wide: torch.Tensor, codes: torch.Tensor, form: Fp8Format) -> None:
    """Clamped by ourselves, to the nearest code, ties to even."""
    wide.clamp_(-form.largest, form.largest)
    codes.copy_(wide)


def _decode_share(job: Job, team: Team) -> None:
    with team.workspace() as space:
        scratch = space.of(Scratch)
        if job.values.itemsize == 2 and job.run >= DECODE_RUN and _paired(job.codes):
            for group in job.groups():
                _decode_lookup(group, scratch)
        else:
            _decode_wide(job, scratch)


def _paired(codes: Bits) -> bool:
    """Whether codes can be taken two by two."""
    return codes.shape[-1] % 2 == 0 and codes.strides[-1] == 1


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

    paired = _paired(job.codes)
    table = _pairs_tensor(job.form.name) if paired else _codes_tensor(job.form.name)
    codes = job.codes.view(np.uint16) if paired else job.codes
    for box in pieces(job.values.shape, WIDE):
        values = job.values[box]
        view = scratch.views(values.shape, job.dtype, job.form.name, paired=paired)
        np.copyto(view.indices, codes[_halved(box)] if paired else codes[box])
        torch.index_select(table, 0, view.index_tensor, out=view.looked_up)
        view.wide_shaped.mul_(torch.from_numpy(job.scales[scale_box(box, job.kept)]))
        if view.narrow_tensor is None:
            np.copyto(values.view(np.float32), view.wide)
        else:
            view.narrow_tensor.copy_(view.wide_tensor)
            np.copyto(values, view.narrow)


def _halved(box: tuple[slice, ...]) -> tuple[slice, ...]:
    """A box of codes as a box of pairs; its last range is even at both ends."""
    last = box[-1]
    return (*box[:-1], slice(last.start // 2, last.stop // 2))


@functools.cache
def _pairs_tensor(name: str) -> Any:
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    return torch.from_numpy(pair_table(name).copy())


@functools.cache
def _codes_tensor(name: str) -> Any:
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    return torch.from_numpy(decode_table(name).copy())
