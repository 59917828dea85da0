"""A batched copy by the driver's own entry point, which reads arrays where they are.

The bindings want lists with an object for each address: for 512 pieces they take 57 us to make and
unwrap, the call itself 4 us (measured on a driver that does nothing). Their wrappers of calls with a few
numbers take 0.3 us, less than ``ctypes`` does, and stay.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final, final

from transfer._cuda_api import CudaMissing

if TYPE_CHECKING:
    from transfer._extent import Int64Array

VERSION: Final = 13000
"""The driver interface whose signature is written here."""
NAME: Final = "cuMemcpyBatchAsync"
KINDS: Final[tuple[Any, ...]] = (
    *(ctypes.c_void_p,) * 3,  # destinations, sources, sizes
    ctypes.c_size_t,  # how many
    ctypes.c_void_p,  # sets of attributes
    ctypes.c_void_p,  # the first copy that each set is for
    ctypes.c_size_t,  # how many sets
    ctypes.c_void_p,  # stream
)


@final
class Batch:
    """The entry point, and the arguments that never change. Lets go of the interpreter lock.

    Args:
        api: the module ``cuda.bindings.driver``.
        attributes: its object with the one set of attributes that all copies have; kept.

    Raises:
        CudaMissing: the driver does not have it.
    """

    def __init__(self, api: Any, attributes: Any) -> None:
        code, address, *_ = api.cuGetProcAddress(NAME.encode(), VERSION, 0)
        if int(code) or not int(address):
            raise CudaMissing(f"found no {NAME} in the driver, need NVIDIA driver 580 or newer")
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *KINDS)(int(address))
        self._attributes = attributes
        self._attributes_at = int(attributes.getPtr())
        self._index = ctypes.c_size_t(0)
        self._index_at = ctypes.addressof(self._index)

    def __call__(self, dst: Int64Array, src: Int64Array, nbytes: Int64Array, stream: int) -> int:
        """Queue; the driver's number. The arrays are read before this returns."""
        if not (dst.flags.c_contiguous and src.flags.c_contiguous and nbytes.flags.c_contiguous):
            raise ValueError("a batch takes arrays without gaps")
        return int(
            self._call(
                dst.ctypes.data,
                src.ctypes.data,
                nbytes.ctypes.data,
                len(nbytes),
                self._attributes_at,
                self._index_at,
                1,
                stream,
            )
        )
