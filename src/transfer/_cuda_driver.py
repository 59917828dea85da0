"""The CUDA driver as the device needs it: one object per GPU, the only importer of ``cuda``.

The driver's own interface is used and not the runtime's: a context is named instead of being a
thread's current one, so a caller's current device never changes, and there is no pending error
that a later, innocent call would report. Every call returns or raises `CudaError`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from transfer._errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

STICKY: Final = frozenset({201, 214, 219, 220, 226, 700, 702, 704, 709, 710, 714})
"""Driver codes after which a context never works again, by ``cuda.h``: invalid context, ECC,
NVLink and containment errors, illegal address, launch timeout, destroyed context, assert, and
hardware stack error. 715 to 719 and 721 (illegal instruction to launch failure) belong to them."""

_NOT_READY: Final = 600


class CudaMissing(TransferError):
    """CUDA cannot be used here; the message names what was found and what is needed."""


@final
class CudaError(Exception):
    """A driver call failed.

    Attributes:
        code: the driver's number.
        call: the driver function.
    """

    def __init__(self, code: int, call: str, detail: str = "") -> None:
        super().__init__(f"{call}: CUDA error {code}{f' ({detail})' if detail else ''}")
        self.code = code
        self.call = call

    @property
    def sticky(self) -> bool:
        """Whether the context is lost with it."""
        return self.code in STICKY or 715 <= self.code <= 719 or self.code == 721

    @property
    def capture(self) -> bool:
        """Whether it only says that some stream is being captured into a graph."""
        return 900 <= self.code <= 908


class Driver(Protocol):
    """What the device asks of one GPU. Streams, events and addresses are opaque.

    Every method may raise `CudaError`.
    """

    ordinal: int

    def open(self) -> None:
        """Take a reference to the primary context, which torch shares."""
        ...

    def shut(self) -> None:
        """Give that reference back."""
        ...

    def __enter__(self) -> None:
        """Make the context current and capture rules relaxed, for this thread, until exit."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def adopt_thread(self) -> None:
        """The same for a thread of our own, for good."""
        ...

    def attribute(self, name: str) -> int:
        """A device attribute by the tail of its name, e.g. ``"MULTIPROCESSOR_COUNT"``."""
        ...

    def stream(self) -> Any:
        """Make a stream that does not synchronise with the legacy stream."""
        ...

    def stream_of(self, handle: int) -> Any:
        """Wrap a handle."""
        ...

    def drop_stream(self, stream: Any) -> None:
        """Destroy a stream once its work is done."""
        ...

    def capturing(self, stream: Any) -> bool:
        """Whether a stream is being captured into a graph."""
        ...

    def event(self, *, blocking: bool) -> Any:
        """Make an event without timing; `blocking` waits by interrupt instead of spinning."""
        ...

    def drop_event(self, event: Any) -> None:
        """Destroy an event."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """Record."""
        ...

    def done(self, event: Any) -> bool:
        """Whether an event that was recorded is done."""
        ...

    def sync(self, event: Any) -> None:
        """Wait in C for an event that was recorded."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of a stream wait for an event that was recorded."""
        ...

    def copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Copy bytes between any two places."""
        ...

    def copy_batch(
        self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: Any
    ) -> None:
        """Copy many byte ranges in one call; sources are read in stream order."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        ...

    def free(self, address: int) -> None:
        """Give device memory back."""
        ...

    def allocate_host(self, nbytes: int) -> int:
        """Page-locked host memory."""
        ...

    def free_host(self, address: int) -> None:
        """Give page-locked host memory back."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory that is mapped already."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...


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

    Raises:
        CudaMissing: no such GPU, or no CUDA.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._api = api = load()
        count = self._call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise CudaMissing(f"found {count} GPUs, need one with the number {ordinal}")
        self._device = self._call("cuDeviceGet", ordinal)
        self._context: Any = None
        self._relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._modes: list[Any] = []
        self._not_capturing = api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        order = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes = api.CUmemcpyAttributes()
        # In stream order: any other order lets the engine read before the stream's waits are over.
        self._attributes.srcAccessOrder = order
        # Bound once: these are called for every operation.
        self._ok = api.CUresult.CUDA_SUCCESS
        self._record, self._query = api.cuEventRecord, api.cuEventQuery
        self._wait, self._copy = api.cuStreamWaitEvent, api.cuMemcpyAsync

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

    def __enter__(self) -> None:
        """See `Driver.__enter__`; nests, and belongs to one thread at a time."""
        self._call("cuCtxPushCurrent", self._context)
        self._modes.append(self._call("cuThreadExchangeStreamCaptureMode", self._relaxed))

    def __exit__(self, *_: object) -> None:
        """Put the thread's context and mode back."""
        self._call("cuThreadExchangeStreamCaptureMode", self._modes.pop())
        self._call("cuCtxPopCurrent")

    def adopt_thread(self) -> None:
        """See `Driver.adopt_thread`."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuThreadExchangeStreamCaptureMode", self._relaxed)

    def attribute(self, name: str) -> int:
        """See `Driver.attribute`."""
        known = self._api.CUdevice_attribute
        key = getattr(known, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", key, self._device))

    def bus_id(self) -> str:
        """The GPU's PCI address, e.g. ``0000:17:00.0``."""
        raw: bytes = self._call("cuDeviceGetPCIBusId", 32, self._device)
        return raw.split(b"\0")[0].decode().lower()

    def stream(self) -> Any:
        """See `Driver.stream`."""
        flag = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self._call("cuStreamCreateWithPriority", int(flag), 0)

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

    def event(self, *, blocking: bool) -> Any:
        """See `Driver.event`."""
        flags = self._api.CUevent_flags
        chosen = int(flags.CU_EVENT_DISABLE_TIMING)
        if blocking:
            chosen |= int(flags.CU_EVENT_BLOCKING_SYNC)
        return self._call("cuEventCreate", chosen)

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
        self._call("cuEventSynchronize", event)

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

    def copy_batch(
        self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: Any
    ) -> None:
        """See `Driver.copy_batch`; the driver wants lists of its own pointer objects."""
        pointer = self._api.CUdeviceptr
        self._call(
            "cuMemcpyBatchAsync",
            [pointer(at) for at in dst],
            [pointer(at) for at in src],
            list(nbytes),
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
