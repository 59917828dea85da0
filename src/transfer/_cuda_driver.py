"""The CUDA driver of one GPU, through cuda-bindings: the only importer of ``cuda``.

The driver's own interface is used and not the runtime's: a context is named instead of being a
thread's current one, so a caller's current device never changes, and there is no pending error
that a later, innocent call would report. Every call returns or raises `CudaError`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Final, final

from transfer._cuda_api import CudaError, CudaMissing
from transfer._cuda_bare import Batch

if TYPE_CHECKING:
    from transfer._extent import Int64Array
    from transfer._pieces import Rows

_NOT_READY: Final = 600
_ILLEGAL_ADDRESS: Final = 700


def load() -> Any:
    """The module ``cuda.bindings.driver``, with the driver initialised.

    Raises:
        CudaMissing: the package, the driver library or a GPU is missing.
    """
    if importlib.util.find_spec("cuda") is None:
        raise CudaMissing(
            "found no package `cuda`, need cuda-bindings 13: pip install 'kvhold[cuda]'"
        )
    try:
        api: Any = importlib.import_module("cuda.bindings.driver")
        code = int(api.cuInit(0)[0])
    except ImportError as error:
        raise CudaMissing(
            f"found cuda-bindings that cannot be imported ({error}), need cuda-bindings 13"
        ) from error
    except RuntimeError as error:
        raise CudaMissing(
            f"found cuda-bindings but no usable driver library ({error}), need NVIDIA driver 580 "
            f"or newer"
        ) from error
    if code:
        raise CudaMissing(
            f"found a driver whose cuInit answers {code}, need a visible GPU and NVIDIA driver 580 "
            f"or newer"
        )
    return api


@final
class CudaDriver:
    """`Driver` on the real one.

    Args:
        ordinal: which of the visible GPUs.
        bare: batches go to the driver's entry point as arrays, not through the bindings as lists.

    Raises:
        CudaMissing: no such GPU, or no CUDA.
    """

    def __init__(self, ordinal: int, *, bare: bool = False) -> None:
        self.ordinal = ordinal
        self._api = api = load()
        count = self._call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise CudaMissing(f"found {count} GPUs, need one with the number {ordinal}")
        self._device = self._call("cuDeviceGet", ordinal)
        self._context: Any = None
        self._relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._not_capturing = api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        order = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes = api.CUmemcpyAttributes()
        # In stream order: any other order lets the engine read before the stream's waits are over.
        self._attributes.srcAccessOrder = order
        # Bound once: these are called for every operation.
        self._ok = api.CUresult.CUDA_SUCCESS
        self._record, self._query = api.cuEventRecord, api.cuEventQuery
        self._wait, self._copy = api.cuStreamWaitEvent, api.cuMemcpyAsync
        self._sync = api.cuEventSynchronize
        self._current = api.cuCtxGetCurrent
        self._exchange = api.cuThreadExchangeStreamCaptureMode
        self._batch = Batch(api, self._attributes) if bare else None

    def _call(self, name: str, *args: Any) -> Any:
        result = getattr(self._api, name)(*args)
        if int(result[0]):
            self._fail(result[0], name)
        return result[1] if len(result) == 2 else None

    def _fail(self, code: Any, name: str) -> None:
        status, text = self._api.cuGetErrorName(code)
        detail = text.decode() if not int(status) and isinstance(text, bytes) else ""
        raise CudaError(int(code), name, detail)

    def open(self) -> None:
        """See `Driver.open`."""
        if self._context is None:
            self._context = self._call("cuDevicePrimaryCtxRetain", self._device)

    def shut(self) -> None:
        """See `Driver.shut`."""
        if self._context is not None:
            self._context = None
            self._call("cuDevicePrimaryCtxRelease", self._device)

    def scope(self) -> _Scope:
        """See `Driver.scope`."""
        return _Scope(self)

    def context(self) -> _Context:
        """See `Driver.context`: one call where the context is current already, as torch leaves it."""
        return _Context(self)

    def holds(self) -> bool:
        """Whether the calling thread's current context is this GPU's."""
        code, current = self._current()
        if code != self._ok:
            self._fail(code, "cuCtxGetCurrent")
        return self._context is not None and int(current) == int(self._context)

    def adopt_thread(self) -> None:
        """See `Driver.adopt_thread`."""
        self._call("cuCtxSetCurrent", self._context)
        self.exchange(self._relaxed)

    def exchange(self, mode: Any) -> Any:
        """Set the calling thread's rules for captures of others; those that it had."""
        code, before = self._exchange(mode)
        if code != self._ok:
            self._fail(code, "cuThreadExchangeStreamCaptureMode")
        return before

    def attribute(self, name: str) -> int:
        """See `Driver.attribute`."""
        known = self._api.CUdevice_attribute
        key = getattr(known, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", key, self._device))

    def bus_id(self) -> str:
        """The GPU's PCI address, e.g. ``0000:17:00.0``."""
        raw: bytes = self._call("cuDeviceGetPCIBusId", 32, self._device)
        return raw.split(b"\0")[0].decode().lower()

    def stream(self, *, urgent: bool = False) -> Any:
        """See `Driver.stream`."""
        flag = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        priority = 0
        if urgent:
            # The smaller the number, the higher the priority.
            code, _, priority = self._api.cuCtxGetStreamPriorityRange()
            if int(code):
                self._fail(code, "cuCtxGetStreamPriorityRange")
        return self._call("cuStreamCreateWithPriority", int(flag), int(priority))

    def stream_of(self, handle: int) -> Any:
        """See `Driver.stream_of`."""
        return self._api.CUstream(handle)

    def drop_stream(self, stream: Any) -> None:
        """See `Driver.drop_stream`."""
        self._call("cuStreamDestroy", stream)

    def capturing(self, stream: Any) -> bool:
        """See `Driver.capturing`; an implicit capture counts."""
        code, status = self._api.cuStreamIsCapturing(stream)
        if int(code):
            error = CudaError(int(code), "cuStreamIsCapturing")
            if error.capture:
                return True
            raise error
        return bool(status != self._not_capturing)

    def caller_captures(self) -> bool:
        """See `Driver.caller_captures`; torch has the notion of a current stream, the driver none."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        try:
            return bool(torch.cuda.is_current_stream_capturing())
        except RuntimeError as error:
            # torch's own class of it has the number; a lost context is the one known reason.
            code = int(getattr(error, "error_code", _ILLEGAL_ADDRESS))
            raise CudaError(code, "cudaStreamIsCapturing", str(error).split("\n", 1)[0]) from error

    def event(self, *, blocking: bool) -> Any:
        """See `Driver.event`."""
        flags = self._api.CUevent_flags
        chosen = int(flags.CU_EVENT_DISABLE_TIMING)
        if blocking:
            chosen |= int(flags.CU_EVENT_BLOCKING_SYNC)
        return self._call("cuEventCreate", chosen)

    def event_of(self, handle: int) -> Any:
        """See `Driver.event_of`."""
        return self._api.CUevent(handle)

    def drop_event(self, event: Any) -> None:
        """See `Driver.drop_event`."""
        self._call("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """See `Driver.record`."""
        (code,) = self._record(event, stream)
        if code != self._ok:
            self._fail(code, "cuEventRecord")

    def done(self, event: Any) -> bool:
        """See `Driver.done`."""
        (code,) = self._query(event)
        if code == self._ok:
            return True
        if int(code) != _NOT_READY:
            self._fail(code, "cuEventQuery")
        return False

    def sync(self, event: Any) -> None:
        """See `Driver.sync`; releases the interpreter lock."""
        (code,) = self._sync(event)
        if code != self._ok:
            self._fail(code, "cuEventSynchronize")

    def wait(self, stream: Any, event: Any) -> None:
        """See `Driver.wait`."""
        (code,) = self._wait(stream, event, 0)
        if code != self._ok:
            self._fail(code, "cuStreamWaitEvent")

    def copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """See `Driver.copy`."""
        (code,) = self._copy(dst, src, nbytes, stream)
        if code != self._ok:
            self._fail(code, "cuMemcpyAsync")

    def copy_rows(self, rows: Rows, stream: Any) -> None:
        """See `Driver.copy_rows`: addresses of one space, so that the driver finds the way."""
        api = self._api
        what = api.CUDA_MEMCPY2D()
        what.dstMemoryType = what.srcMemoryType = api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        what.dstDevice, what.dstPitch = api.CUdeviceptr(rows.dst), rows.dst_step
        what.srcDevice, what.srcPitch = api.CUdeviceptr(rows.src), rows.src_step
        what.WidthInBytes, what.Height = rows.nbytes, rows.number
        self._call("cuMemcpy2DAsync", what, stream)

    def copy_batch(self, dst: Int64Array, src: Int64Array, nbytes: Int64Array, stream: Any) -> None:
        """See `Driver.copy_batch`; the bindings want lists of their own pointer objects."""
        if self._batch is not None:
            code = self._batch(dst, src, nbytes, int(stream))
            if code:
                self._fail(self._api.CUresult(code), "cuMemcpyBatchAsync")
            return
        pointer = self._api.CUdeviceptr
        self._call(
            "cuMemcpyBatchAsync",
            list(map(pointer, dst.tolist())),
            list(map(pointer, src.tolist())),
            nbytes.tolist(),
            len(nbytes),
            [self._attributes],
            [0],
            1,
            stream,
        )

    def allocate(self, nbytes: int) -> int:
        """See `Driver.allocate`."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """See `Driver.free`."""
        self._call("cuMemFree", address)

    def allocate_host(self, nbytes: int) -> int:
        """See `Driver.allocate_host`; usable by every GPU, at the same address."""
        return int(self._call("cuMemHostAlloc", nbytes, 0x01 | 0x02))

    def free_host(self, address: int) -> None:
        """See `Driver.free_host`."""
        self._call("cuMemFreeHost", address)

    def register(self, address: int, nbytes: int) -> None:
        """See `Driver.register`; usable by every GPU, at the same address."""
        self._call("cuMemHostRegister", address, nbytes, 0x01 | 0x02)

    def unregister(self, address: int) -> None:
        """See `Driver.unregister`."""
        self._call("cuMemHostUnregister", address)


@final
class _Context:
    """A thread inside a context."""

    __slots__ = ("_driver", "_pushed")

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._pushed = False

    def __enter__(self) -> None:
        driver = self._driver
        if not driver.holds():
            driver._call("cuCtxPushCurrent", driver._context)
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._driver._call("cuCtxPopCurrent")


@final
class _Scope:
    """A thread inside a context, with capture rules that let it query and record.

    Entered even where the context is current: a callable that is run inside may change that.
    """

    __slots__ = ("_driver", "_mode")

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._mode: Any = None

    def __enter__(self) -> None:
        driver = self._driver
        driver._call("cuCtxPushCurrent", driver._context)
        self._mode = driver.exchange(driver._relaxed)

    def __exit__(self, *_: object) -> None:
        self._driver.exchange(self._mode)
        self._driver._call("cuCtxPopCurrent")
