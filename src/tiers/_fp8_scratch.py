"""Working memory of the FP8 codec, and how an array is cut into pieces that fit it.

Torch operators work on the scratch alone: contiguous and of one dtype. Copying in and out goes through
numpy, which takes any strides.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

import numpy as np

from tiers._fp8_tables import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    import torch

    Bits: TypeAlias = npt.NDArray[Any]

WIDE: Final = 262_144
"""Elements of a piece for operators: calls so long that threads seldom wait for the interpreter lock."""
LOOKUP: Final = 262_144
"""Elements of a piece for table lookups, which torch runs in the calling thread."""
_VIEWS: Final = 64
_GRAIN: Final = 32_768


class Views(NamedTuple):
    """Scratch as pieces of one shape: numpy arrays shaped, torch tensors flat unless said."""

    narrow: Bits
    narrow_tensor: torch.Tensor | None
    wide: Bits
    wide_tensor: torch.Tensor
    wide_shaped: torch.Tensor
    codes: Bits
    codes_tensor: torch.Tensor
    indices: Bits
    index_tensor: torch.Tensor
    looked_up: torch.Tensor


@final
class Scratch:
    """Arrays of one thread, each beside the torch tensor that shares its memory."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

        self.wide = np.zeros(WIDE, np.float32)
        self.wide_tensor = torch.from_numpy(self.wide)
        self.pairs_tensor = self.wide_tensor.view(torch.float64)
        self.narrow = np.zeros(LOOKUP, np.uint16)
        narrow = torch.from_numpy(self.narrow.view(np.int16))
        self.narrow_tensors = {
            "bfloat16": narrow.view(torch.bfloat16),
            "float16": narrow.view(torch.float16),
        }
        self.narrow_pairs_tensor = narrow.view(torch.int32)
        self.codes = np.zeros(LOOKUP, np.uint8)
        self.codes_tensor = torch.from_numpy(self.codes)
        self.fp8_tensors = {name: self.codes_tensor.view(getattr(torch, name)) for name in FORMATS}
        self.index = np.zeros(LOOKUP, np.int32)
        self.index_tensor = torch.from_numpy(self.index)
        self.encode_table = np.zeros(65536, np.uint8)
        self.decode_table = np.zeros(65536, np.uint32)
        self._scales = np.zeros(0, np.float32)
        self._views: dict[tuple[object, ...], Views] = {}

    def views(self, shape: tuple[int, ...], dtype: str, form: str, *, paired: bool) -> Views:
        """The scratch seen as pieces of one shape; kept, since making a view costs as a cast does.

        Args:
            shape: of the values.
            dtype: of the values.
            form: of the codes.
            paired: codes are looked up two by two along the last axis.
        """
        key = (shape, dtype, form, paired)
        known = self._views.get(key)
        if known is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            known = self._views[key] = self._make_views(shape, dtype, form, paired=paired)
        return known

    def _make_views(self, shape: tuple[int, ...], dtype: str, form: str, *, paired: bool) -> Views:
        count = math.prod(shape)
        looked_up = (*shape[:-1], shape[-1] // 2) if paired else shape
        half = math.prod(looked_up)
        narrow = self.narrow_tensors.get(dtype)
        return Views(
            narrow=self.narrow[:count].reshape(shape),
            narrow_tensor=None if narrow is None else narrow[:count],
            wide=self.wide[:count].reshape(shape),
            wide_tensor=self.wide_tensor[:count],
            wide_shaped=self.wide_tensor[:count].view(shape),
            codes=self.codes[:count].reshape(shape),
            codes_tensor=self.fp8_tensors[form][:count],
            indices=self.index[:half].reshape(looked_up),
            index_tensor=self.index_tensor[:half],
            looked_up=(self.pairs_tensor if paired else self.wide_tensor)[:half],
        )

    def scales(self, count: int) -> npt.NDArray[np.float32]:
        """Room for `count` scales; grows to the largest number asked for."""
        if len(self._scales) < count:
            self._scales = np.zeros(count, np.float32)
        return self._scales[:count]


def dense(array: Bits) -> bool:
    """Whether torch can work on an array's memory as it is, as one run."""
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and flags.writeable)


def narrow_tensor(array: Bits, dtype: str) -> torch.Tensor:
    """Dense 16-bit patterns as a flat tensor of their dtype, which shares their memory."""
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    found: torch.Tensor = torch.from_numpy(array.reshape(-1).view(np.int16))
    return found.view(getattr(torch, dtype))


@contextmanager
def one_torch_thread(elements: int) -> Iterator[None]:
    """Keep torch's operators in the calling thread, so that its threads do not compete with ours.

    Up to 32768 elements they stay there anyway. Above, sets OpenMP's number for this thread alone and puts it back. Where torch has no OpenMP, its
    operators run as they do.
    """
    if elements <= _GRAIN:
        yield
        return
    import torch  # noqa: PLC0415 - import torch costs a second; formats are read without

    # Asked first, since torch sets the number of a thread when it is first asked for it.
    before = torch.get_num_threads()
    limit = _openmp_setter()
    if before == 1 or limit is None:
        yield
        return
    limit(1)
    try:
        yield
    finally:
        limit(before)


@functools.cache
def _openmp_setter() -> Callable[[int], object] | None:
    """`omp_set_num_threads` of the OpenMP that the process has loaded."""
    setter: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    return setter


def merge_axes(arrays: Sequence[Bits], kept: Sequence[bool]) -> tuple[list[Bits], tuple[bool, ...]]:
    """View arrays of one shape with as few axes as their strides and `kept` allow.

    Neighbouring axes become one when every array runs through them without a step and both have
    scales of their own, or neither. Axes of size 1 go. At least one axis stays.
    """
    strides = tuple(a.strides for a in arrays)
    shape, flags = _merged(arrays[0].shape, tuple(kept), strides)
    return [a.reshape(shape) for a in arrays], flags


@functools.lru_cache(maxsize=256)
def _merged(
    shape: tuple[int, ...], kept: tuple[bool, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Sizes and flags of the axes that remain; cached, since it costs as much as a small cast."""
    sizes: list[int] = []
    flags: list[bool] = []
    last: list[int] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        steps = [own[axis] for own in strides]
        if (
            sizes
            and flags[-1] == kept[axis]
            and all(before == step * size for before, step in zip(last, steps, strict=True))
        ):
            sizes[-1] *= size
        else:
            sizes.append(size)
            flags.append(kept[axis])
        last = steps
    return tuple(sizes) or (1,), tuple(flags) or (False,)


def pieces(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cut a shape into boxes of at most `limit` elements, in row-major order.

    A box is whole along the inner axes, so that in a dense array it is one run of memory.
    """
    inner = 1
    axis = len(shape)
    while axis and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield tuple(slice(0, n) for n in shape)
        return
    step = max(limit // inner, 1)
    tail = tuple(slice(0, n) for n in shape[axis:])
    for outer in itertools.product(*(range(n) for n in shape[: axis - 1])):
        head = tuple(slice(i, i + 1) for i in outer)
        for start in range(0, shape[axis - 1], step):
            yield (*head, slice(start, min(start + step, shape[axis - 1])), *tail)


def split_shape(shape: tuple[int, ...], parts: int) -> list[tuple[slice, ...]]:
    """At most `parts` boxes that cover `shape`.

    Cut along the first axis where it is long enough, since each box of a dense array is then one run
    of memory; else along the longest.
    """
    if math.prod(shape) == 0 or parts < 2:
        return [tuple(slice(0, n) for n in shape)]
    axis = 0 if shape[0] >= parts else max(range(len(shape)), key=lambda i: shape[i])
    parts = min(parts, shape[axis])
    bounds = [shape[axis] * part // parts for part in range(parts + 1)]
    whole = [slice(0, n) for n in shape]
    return [(*whole[:axis], slice(a, b), *whole[axis + 1 :]) for a, b in itertools.pairwise(bounds)]


def scale_box(box: tuple[slice, ...], kept: Sequence[bool]) -> tuple[slice, ...]:
    """The part of the scales, axis by axis, that belongs to a box of the values."""
    return tuple(part if keep else slice(0, 1) for part, keep in zip(box, kept, strict=True))
