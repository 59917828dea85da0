"""Entry points that a stand-in hands out are called with the numbers that were given."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transfer._cuda_api import CudaMissing
from transfer._cuda_bare import _SIGNATURES, VERSION, Batch, bind


class Entries:
    """C functions that note their arguments and answer with a number."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.answer = 0
        self.asked: list[tuple[bytes, int, int]] = []
        self._kept = {
            name.encode(): ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._noted(name))
            for name, kinds in _SIGNATURES.items()
        }

    def _noted(self, name: str) -> Any:
        def call(*args: Any) -> int:
            if name == "cuMemcpyBatchAsync":
                count = args[3]
                arrays = [list((ctypes.c_int64 * count).from_address(at)) for at in args[:3]]
                index = ctypes.c_size_t.from_address(args[5]).value
                args = (*arrays, count, args[4], index, *args[6:])
            self.seen.append((name, *args))
            return self.answer

        return call

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:  # noqa: N802
        self.asked.append((name, version, flags))
        found = ctypes.cast(self._kept[name], ctypes.c_void_p).value
        assert found is not None
        return 0, found, 0


def test_arguments_arrive_whole() -> None:
    entries = Entries()
    calls = bind(entries)
    assert {asked[0].decode() for asked in entries.asked} == set(_SIGNATURES)
    assert {asked[1:] for asked in entries.asked} == {(VERSION, 0)}
    far = (1 << 63) + 5
    assert calls.record(1 << 40, 7) == (0,)
    assert calls.wait(7, 1 << 41, 0) == (0,)
    assert calls.copy(far, 1 << 42, 1 << 35, 7) == (0,)
    entries.answer = 600
    assert calls.query(1 << 40) == (600,)
    entries.answer = 700
    assert calls.sync(1 << 40) == (700,)
    assert entries.seen == [
        ("cuEventRecord", 1 << 40, 7),
        ("cuStreamWaitEvent", 7, 1 << 41, 0),
        ("cuMemcpyAsync", far, 1 << 42, 1 << 35, 7),
        ("cuEventQuery", 1 << 40),
        ("cuEventSynchronize", 1 << 40),
    ]


def test_a_batch_reads_arrays_in_place() -> None:
    entries = Entries()
    batch = Batch(bind(entries).batch, 1 << 44)
    dst, src, nbytes = (np.arange(at, at + 5, dtype=np.int64) for at in (10, 20, 30))
    assert batch(dst[1:4], src[1:4], nbytes[1:4], 9) == (0,)
    assert entries.seen == [
        ("cuMemcpyBatchAsync", [11, 12, 13], [21, 22, 23], [31, 32, 33], 3, 1 << 44, 0, 1, 9)
    ]
    with pytest.raises(ValueError, match="without gaps"):
        batch(dst[::2], src[::2], nbytes[::2], 9)


@pytest.mark.parametrize("answer", [(500, 0, 0), (0, 0, 1)])
def test_an_entry_point_that_is_not_there_is_named(answer: tuple[int, int, int]) -> None:
    api = SimpleNamespace(cuGetProcAddress=lambda *_: answer)
    with pytest.raises(CudaMissing, match="found no cuEventRecord in the driver"):
        bind(api)
