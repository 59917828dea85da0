"""Where CUDA is missing, every use says what was found and what is needed."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.transfer.cuda_rig import PAGE

from transfer._cuda_api import CudaError, CudaMissing
from transfer._cuda_driver import CudaDriver, load
from transfer._pieces import Rows
from transfer.cuda import CudaDevice, PinnedPool


def stand_in(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> SimpleNamespace:
    """Put an object in the place of cuda.bindings.driver."""
    api = SimpleNamespace(**{"cuInit": lambda _flags: (0,), **calls})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(importlib, "import_module", lambda _name: api)
    return api


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for use in (load, CudaDevice().start, lambda: PinnedPool(PAGE, 1)):
        with pytest.raises(CudaMissing, match="found no package `cuda`, need cuda-bindings 13"):
            use()


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_name: str) -> object:
        raise ImportError("no libcuda")

    stand_in(monkeypatch)
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(CudaMissing, match=r"cannot be imported \(no libcuda\)"):
        load()


def test_no_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(_flags: int) -> tuple[int]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    stand_in(monkeypatch, cuInit=init)
    with pytest.raises(CudaMissing, match=r"no usable driver library .*need NVIDIA driver 580"):
        load()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, cuInit=lambda _flags: (100,))
    with pytest.raises(CudaMissing, match="cuInit answers 100"):
        load()


def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, cuDeviceGetCount=lambda: (0, 2))
    with pytest.raises(CudaMissing, match="found 2 GPUs, need one with the number 5"):
        CudaDriver(5)


def bare_driver(**calls: Any) -> CudaDriver:
    """A driver whose calls are given, without any GPU."""
    made = object.__new__(CudaDriver)
    made.ordinal = 0
    names = {"cuGetErrorName": lambda _code: (0, b"CUDA_ERROR_MADE_UP")}
    made._api = SimpleNamespace(**{**names, **calls})
    made._not_capturing = 0
    return made


def test_answers_become_errors() -> None:
    driver = bare_driver(
        cuMemFree=lambda _at: (700,),
        cuStreamIsCapturing=lambda stream: {1: (0, 1), 2: (0, 0), 3: (906, 0), 4: (700, 0)}[stream],
    )
    with pytest.raises(CudaError, match=r"cuMemFree: CUDA error 700 .CUDA_ERROR_MADE_UP."):
        driver.free(1)
    # The legacy stream answers with an error while another stream is being captured.
    assert [driver.capturing(stream) for stream in (1, 2, 3)] == [True, False, True]
    with pytest.raises(CudaError) as lost:
        driver.capturing(4)
    assert lost.value.sticky


def test_urgent_streams_have_the_highest_priority() -> None:
    made: list[tuple[int, int]] = []

    def create(flags: int, priority: int) -> tuple[int, str]:
        made.append((flags, priority))
        return (0, "stream")

    ranges = [(0, 0, -5), (0, 0, -5), (201, 0, 0)]
    driver = bare_driver(
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
        cuStreamCreateWithPriority=create,
        cuCtxGetStreamPriorityRange=ranges.pop,
    )
    with pytest.raises(CudaError, match="cuCtxGetStreamPriorityRange"):
        driver.stream(urgent=True)
    assert driver.stream() == driver.stream(urgent=True) == "stream"
    assert made == [(1, 0), (1, -5)]


def test_rows_are_described_to_the_driver() -> None:
    seen: list[tuple[Any, Any]] = []

    def copy(what: Any, stream: Any) -> tuple[int]:
        seen.append((vars(what), stream))
        return (0,)

    driver = bare_driver(
        CUDA_MEMCPY2D=SimpleNamespace,
        CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4),
        CUdeviceptr=int,
        cuMemcpy2DAsync=copy,
    )
    driver.copy_rows(Rows(1000, 64, 2000, 48, 40, 7), 9)
    assert seen == [
        (
            {
                "dstMemoryType": 4,
                "srcMemoryType": 4,
                "dstDevice": 1000,
                "dstPitch": 64,
                "srcDevice": 2000,
                "srcPitch": 48,
                "WidthInBytes": 40,
                "Height": 7,
            },
            9,
        )
    ]


def test_a_batch_is_asked_for_as_lists_or_in_place() -> None:
    seen: list[Any] = []

    def batch(*args: Any) -> tuple[int]:
        seen.append(args)
        return (0,)

    driver = bare_driver(cuMemcpyBatchAsync=batch, CUdeviceptr=lambda at: ("at", at), CUresult=int)
    driver._attributes, driver._ok, driver._batch = "attributes", 0, None
    dst, src, nbytes = (np.array([at, at + 1]) for at in (10, 20, 30))
    driver.copy_batch(dst, src, nbytes, 9)
    at = [("at", 10), ("at", 11)], [("at", 20), ("at", 21)]
    assert seen.pop() == (*at, [30, 31], 2, ["attributes"], [0], 1, 9)
    answers = [700, 0]

    def bare(*args: Any) -> int:
        seen.append(args)
        return answers.pop()

    driver._batch = bare  # type: ignore[assignment]
    driver.copy_batch(dst, src, nbytes, "9")
    assert seen == [(dst, src, nbytes, 9)]
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync: CUDA error 700"):
        driver.copy_batch(dst, src, nbytes, "9")


def test_what_torch_raises_on_a_lost_context_becomes_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AcceleratorError(RuntimeError):
        error_code = 719

    def asked() -> bool:
        raise AcceleratorError("CUDA error: unspecified launch failure\nCompile with ...")

    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=asked)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(CudaError) as lost:
        bare_driver().caller_captures()
    assert lost.value.code == 719
    assert lost.value.sticky
    torch.cuda.is_initialized = lambda: False
    assert not bare_driver().caller_captures()


@pytest.mark.parametrize("current", [0, 77])
def test_a_context_that_is_current_is_left_alone(current: int) -> None:
    calls: list[str] = []

    def called(name: str) -> Any:
        def call(*_: object) -> tuple[int]:
            calls.append(name)
            return (0,)

        return call

    driver = bare_driver(cuCtxPushCurrent=called("push"), cuCtxPopCurrent=called("pop"))
    driver._context, driver._ok = 77, 0
    driver._current = lambda: (0, current)
    with driver.context():
        assert calls == ([] if current == 77 else ["push"])
    assert calls == ([] if current == 77 else ["push", "pop"])
    driver._current = lambda: (201, 0)
    with pytest.raises(CudaError), driver.context():
        pass
