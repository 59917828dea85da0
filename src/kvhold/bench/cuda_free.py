"""A CUDA driver whose calls cost nothing and whose work is done at once, and pools to go with it.

What a device then takes is the host's own part, on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, final

from transfer._cuda_memory import DeviceStorage, paged
from transfer._cuda_pinned import PinnedStorage
from transfer._memory import Pool
from transfer.cuda import CudaDevice

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transfer import BlockLayout
    from transfer._extent import Int64Array
    from transfer._pieces import Rows

_NOTHING: Final = nullcontext()


@final
class FreeDriver:
    """Stands for the driver of one GPU; see `transfer._cuda_api.Driver`.

    Attributes:
        calls: how many commands were queued.
        first: when the first of them was that moves bytes, 0 for none.
    """

    ordinal = 0

    def __init__(self) -> None:
        self.calls = 0
        self.first = 0.0
        self._made = 0
        self._kept: dict[int, Any] = {}

    def reset(self) -> None:
        """Count from nothing again."""
        self.calls = 0
        self.first = 0.0

    def moved(self) -> None:
        """A command that moves bytes."""
        self.calls += 1
        if not self.first:
            self.first = time.perf_counter()

    def open(self) -> None:
        """Nothing."""

    def shut(self) -> None:
        """Nothing."""

    def scope(self) -> AbstractContextManager[None]:
        """Nothing."""
        return _NOTHING

    def context(self) -> AbstractContextManager[None]:
        """Nothing."""
        return _NOTHING

    def adopt_thread(self) -> None:
        """Nothing."""

    def bus_id(self) -> str:
        """No GPU's address."""
        return "0000:00:00.0"

    def attribute(self, name: str) -> int:
        """Every ability is there."""
        del name
        return 1

    def stream(self, *, urgent: bool = False) -> int:
        """A number."""
        del urgent
        self._made += 1
        return self._made

    def stream_of(self, handle: int) -> int:
        """The number."""
        return handle

    def drop_stream(self, stream: int) -> None:
        """Nothing."""

    def capturing(self, stream: int) -> bool:
        """Never."""
        del stream
        return False

    def caller_captures(self) -> bool:
        """Never."""
        return False

    def event(self, *, blocking: bool) -> int:
        """A number."""
        del blocking
        self._made += 1
        return self._made

    def event_of(self, handle: int) -> int:
        """The number."""
        return handle

    def drop_event(self, event: int) -> None:
        """Nothing."""

    def record(self, event: int, stream: int) -> None:
        """Count."""
        del event, stream
        self.calls += 1

    def done(self, event: int) -> bool:
        """At once."""
        del event
        return True

    def sync(self, event: int) -> None:
        """Done already."""

    def wait(self, stream: int, event: int) -> None:
        """Count."""
        del stream, event
        self.calls += 1

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Count."""
        del dst, src, nbytes, stream
        self.moved()

    def copy_rows(self, rows: Rows, stream: int) -> None:
        """Count."""
        del rows, stream
        self.moved()

    def copy_batch(self, dst: Int64Array, src: Int64Array, nbytes: Int64Array, stream: int) -> None:
        """Count."""
        del dst, src, nbytes, stream
        self.moved()

    def allocate(self, nbytes: int) -> int:
        """An address; nothing is ever written there."""
        return self.allocate_host(min(nbytes, 64))

    def free(self, address: int) -> None:
        """Forget it."""
        del self._kept[address]

    def allocate_host(self, nbytes: int) -> int:
        """Host memory, which tables are written to."""
        made = ctypes.create_string_buffer(nbytes)
        self._kept[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def free_host(self, address: int) -> None:
        """Forget it."""
        del self._kept[address]

    def register(self, address: int, nbytes: int) -> None:
        """Nothing."""

    def unregister(self, address: int) -> None:
        """Nothing."""


@final
class FreeKernels:
    """Stands for the kernels; see `transfer._cuda_kernels.Kernels`."""

    def __init__(self, driver: FreeDriver) -> None:
        self._driver = driver
        self.movers: dict[tuple[int, bool], Any] = {
            (word, large): (word, large)
            for word, large in ((8, True), (8, False), (4, False), (1, False))
        }

    def load(self, program: Any) -> None:
        """Nothing."""

    def launch(self, stream: int, units: int, program: Any, items: int, *args: int) -> None:
        """Count."""
        del stream, units, program, items, args
        self._driver.moved()

    def lend(self, stream: int) -> object:
        """The number."""
        return stream


def free_device(**options: Any) -> tuple[CudaDevice, FreeDriver]:
    """A device on such a driver."""
    driver = FreeDriver()
    return CudaDevice(driver=driver, kernels=FreeKernels(driver), **options), driver


def free_pools(layout: BlockLayout, blocks: int) -> tuple[Pool, Pool]:
    """Pages, on host memory, and slots, neither of which is ever touched."""
    plan = paged(layout)
    storage = DeviceStorage(plan, blocks, "cpu")
    storage.kind = "cuda:0"
    pages = Pool(plan, blocks, storage, name="pages")
    slots = PinnedStorage(layout.nbytes, blocks, FreeDriver())
    return pages, Pool(layout, blocks, slots, name="slots")
