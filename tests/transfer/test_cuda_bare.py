"""The entry point that a stand-in hands out is called with the numbers that were given."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transfer._cuda_api import CudaMissing
from transfer._cuda_bare import KINDS, NAME, VERSION, Batch


def attributes(at: int) -> Any:
    return SimpleNamespace(getPtr=lambda: at)


def test_a_batch_reads_arrays_in_place() -> None:
    seen: list[tuple[Any, ...]] = []
    answers = [700, 0]

    def called(*args: Any) -> int:
        count = args[3]
        arrays = [list((ctypes.c_int64 * count).from_address(at)) for at in args[:3]]
        seen.append((*arrays, *args[3:5], ctypes.c_size_t.from_address(args[5]).value, *args[6:]))
        return answers.pop()

    entry = ctypes.CFUNCTYPE(ctypes.c_int, *KINDS)(called)
    asked: list[tuple[Any, ...]] = []

    def look_up(*args: Any) -> tuple[int, int | None, int]:
        asked.append(args)
        return 0, ctypes.cast(entry, ctypes.c_void_p).value, 0

    batch = Batch(SimpleNamespace(cuGetProcAddress=look_up), attributes(1 << 44))
    assert asked == [(NAME.encode(), VERSION, 0)]
    far = 1 << 47
    dst, src, nbytes = (np.arange(at, at + 5, dtype=np.int64) for at in (far, 20, 1 << 35))
    assert batch(dst[1:4], src[1:4], nbytes[1:4], 9) == 0
    arrays = [[at + 1, at + 2, at + 3] for at in (far, 20, 1 << 35)]
    assert seen == [(*arrays, 3, 1 << 44, 0, 1, 9)]
    assert batch(dst, src, nbytes, 1 << 46) == 700
    assert seen[1][-1] == 1 << 46
    with pytest.raises(ValueError, match="without gaps"):
        batch(dst[::2], src[::2], nbytes[::2], 9)


@pytest.mark.parametrize("answer", [(500, 0, 0), (0, 0, 1)])
def test_an_entry_point_that_is_not_there_is_named(answer: tuple[int, int, int]) -> None:
    api = SimpleNamespace(cuGetProcAddress=lambda *_: answer)
    with pytest.raises(CudaMissing, match="found no cuMemcpyBatchAsync in the driver"):
        Batch(api, attributes(0))
