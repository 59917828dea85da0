"""The driver calls that every copy makes, by the driver's own entry points.

The bindings wrap and unwrap each argument and each answer in an object of their own; for calls that
take a microsecond or two themselves that is a good part of the cost. Here streams, events and
addresses are plain numbers. Every call lets go of the interpreter lock.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transfer._cuda_api import CudaMissing

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._extent import Int64Array

VERSION: Final = 13000
"""The driver interface whose signatures are written here."""

_HANDLE: Final = ctypes.c_void_p
_ADDRESS: Final = ctypes.c_uint64
_SIZE: Final = ctypes.c_size_t
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuEventSynchronize": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, ctypes.c_uint),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _HANDLE),
    "cuMemcpyBatchAsync": (
        *(ctypes.c_void_p,) * 3,
        _SIZE,
        ctypes.c_void_p,
        ctypes.c_void_p,
        _SIZE,
        _HANDLE,
    ),
}


class Calls(NamedTuple):
    """Entry points; each answers as the bindings do, with a tuple of the driver's number."""

    record: Callable[..., tuple[int]]
    query: Callable[..., tuple[int]]
    sync: Callable[..., tuple[int]]
    wait: Callable[..., tuple[int]]
    copy: Callable[..., tuple[int]]
    batch: Callable[..., tuple[int]]


def bind(api: Any) -> Calls:
    """Look the entry points up.

    Args:
        api: the module ``cuda.bindings.driver``.

    Raises:
        CudaMissing: the driver does not have one of them.
    """
    return Calls(*(_bind(api, name, kinds) for name, kinds in _SIGNATURES.items()))


def _bind(api: Any, name: str, kinds: tuple[Any, ...]) -> Callable[..., tuple[int]]:
    code, address, *_ = api.cuGetProcAddress(name.encode(), VERSION, 0)
    if int(code) or not int(address):
        raise CudaMissing(f"found no {name} in the driver, need NVIDIA driver 580 or newer")
    call = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(int(address))
    # As the bindings answer, so that the caller need not know which of the two it has.
    call.restype = _answer
    return call


def _answer(code: int) -> tuple[int]:
    return (code,)


class Batch:
    """Arguments of a batched copy that never change.

    Args:
        call: the entry point.
        attributes: address of the one set of attributes that all copies have.
    """

    def __init__(self, call: Callable[..., tuple[int]], attributes: int) -> None:
        self._call = call
        self._attributes = attributes
        self._index = _SIZE(0)
        self._index_at = ctypes.addressof(self._index)

    def __call__(
        self, dst: Int64Array, src: Int64Array, nbytes: Int64Array, stream: int
    ) -> tuple[int]:
        """Queue; the arrays are read before this returns."""
        parts = [part.ctypes.data for part in (dst, src, nbytes) if part.flags.c_contiguous]
        if len(parts) < 3:
            raise ValueError("a batch takes arrays without gaps")
        return self._call(*parts, len(nbytes), self._attributes, self._index_at, 1, stream)
