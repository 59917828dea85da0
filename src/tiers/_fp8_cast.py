"""Encoding and decoding of FP8 values by chunks, on any number of threads.

Two ways give the same bytes. Where long runs of values share a scale, a table over all 16-bit patterns
(or over all pairs of codes) is built once for the scale and looked up; elsewhere values are widened to
float32, divided or multiplied by their scales, and cast. Which one is faster was measured; see
docs/codec.md.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from tiers._fp8_lookup import cast, codes_tensor, decode_lookup, encode_lookup
from tiers._fp8_scratch import (
    WIDE,
    Scratch,
    dense,
    merge_axes,
    narrow_tensor,
    one_torch_thread,
    pieces,
    scale_box,
    split_shape,
)
from tiers._fp8_tables import Fp8Format, pair_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from tiers._fp8_scratch import Bits
    from tiers._team import Team

    Floats = npt.NDArray[np.float32]

TABLE: Final = 64 * 1024
"""Neighbouring values with one scale from which a table of its own pays for the scale."""
SHARE: Final = 512 * 1024
"""Values below which a further thread costs more than it gains."""


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
        clamp: a quotient may lie beyond the largest code by more than a rounding error.
    """

    values: Bits
    codes: Bits
    scales: Floats
    kept: tuple[bool, ...]
    dtype: str
    form: Fp8Format
    nan: bool = False
    clamp: bool = True

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
        return replace(
            self,
            values=self.values[box],
            codes=self.codes[box],
            scales=self.scales[scale_box(box, self.kept)],
        )

    @property
    def tabulated(self) -> bool:
        """Whether tables pay: 16-bit values in long runs of one scale."""
        run = 1 if self.kept[-1] else self.values.shape[-1]
        return self.values.itemsize == 2 and run >= TABLE

    def groups(self) -> Iterator[Job]:
        """One job for each scale."""
        for index in itertools.product(*(range(n) for n in self.scales.shape)):
            box = tuple(
                slice(i, i + 1) if keep else slice(0, n)
                for i, keep, n in zip(index, self.kept, self.values.shape, strict=True)
            )
            yield self.at(box)

    def shares(self, team: Team) -> list[Job]:
        """One job for each thread that is worth starting."""
        parts = min(team.threads, self.values.size // SHARE)
        if parts < 2:
            return [self]
        return [self.at(box) for box in split_shape(self.values.shape, parts)]


def encode(job: Job, team: Team) -> None:
    """Fill the job's codes from its values and scales."""
    if job.values.size:
        team.run([functools.partial(_encode_share, share, team) for share in job.shares(team)])


def decode(job: Job, team: Team) -> None:
    """Fill the job's values from its codes and scales."""
    if job.values.size:
        team.run([functools.partial(_decode_share, share, team) for share in job.shares(team)])


def _encode_share(job: Job, team: Team) -> None:
    with team.workspace() as space, one_torch_thread(job.values.size):
        scratch = space.of(Scratch)
        if not job.tabulated:
            _encode_wide(job, scratch)
            return
        for part in job.groups():
            encode_lookup(
                part.values, part.codes, part.scales, scratch, dtype=job.dtype, form=job.form
            )


def _encode_wide(job: Job, scratch: Scratch) -> None:
    """Any number of scales: widen, divide, clamp, cast.

    As few and as long operators as can be, on the caller's memory where it is dense: around each one
    the interpreter lock is given up, and getting it back from other threads is what takes time.
    """
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    form, kept = job.form, job.kept
    for box in pieces(job.values.shape, WIDE):
        values, codes = job.values[box], job.codes[box]
        view = scratch.views(values.shape, job.dtype, form.name, paired=False)
        if view.narrow_tensor is None:
            np.copyto(view.wide, values.view(np.float32))
        elif dense(values):
            view.wide_tensor.copy_(narrow_tensor(values, job.dtype))
        else:
            np.copyto(view.narrow, values)
            view.wide_tensor.copy_(view.narrow_tensor)
        view.wide_shaped.div_(torch.from_numpy(job.scales[scale_box(box, kept)]))
        if dense(codes) and not job.nan:
            out = torch.from_numpy(codes.reshape(-1)).view(view.codes_tensor.dtype)
            cast(view.wide_tensor, out, form, clamp=job.clamp)
            continue
        cast(view.wide_tensor, view.codes_tensor, form, clamp=job.clamp)
        if job.nan:
            view.codes[np.isnan(view.wide)] = form.nan
        np.copyto(codes, view.codes)


def _decode_share(job: Job, team: Team) -> None:
    with team.workspace() as space, one_torch_thread(job.values.size):
        scratch = space.of(Scratch)
        if not job.tabulated or not _paired(job.codes):
            _decode_wide(job, scratch)
            return
        for part in job.groups():
            decode_lookup(
                part.codes, part.values, part.scales, scratch, dtype=job.dtype, form=job.form
            )


def _paired(codes: Bits) -> bool:
    """Whether codes can be taken two by two."""
    return codes.shape[-1] % 2 == 0 and codes.strides[-1] == 1


def _decode_wide(job: Job, scratch: Scratch) -> None:
    """Any number of scales: widen, multiply, round to the destination's dtype."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    paired = _paired(job.codes)
    table = _pairs_tensor(job.form.name) if paired else codes_tensor(job.form.name)
    codes = job.codes.view(np.uint16) if paired else job.codes
    for box in pieces(job.values.shape, WIDE):
        values = job.values[box]
        view = scratch.views(values.shape, job.dtype, job.form.name, paired=paired)
        np.copyto(view.indices, codes[_halved(box)] if paired else codes[box])
        torch.index_select(table, 0, view.index_tensor, out=view.looked_up)
        view.wide_shaped.mul_(torch.from_numpy(job.scales[scale_box(box, job.kept)]))
        if view.narrow_tensor is None:
            np.copyto(values.view(np.float32), view.wide)
        elif dense(values):
            narrow_tensor(values, job.dtype).copy_(view.wide_tensor)
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
