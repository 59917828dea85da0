"""What the device asks of the CUDA driver, and how the driver fails.

One object stands for one GPU. Everything above it can be tried on a stand-in that has no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, final

from transfer._errors import TransferError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transfer._extent import Int64Array
    from transfer._pieces import Rows

STICKY: Final = frozenset({201, 214, 219, 220, 226, 700, 702, 704, 709, 710, 714})
"""Driver codes after which a context never works again, by ``cuda.h``: invalid context, ECC,
NVLink and containment errors, illegal address, launch timeout, destroyed context, assert, and
hardware stack error. 715 to 719 and 721 (illegal instruction to launch failure) belong to them."""


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

    def scope(self) -> AbstractContextManager[None]:
        """Make the context current and capture rules relaxed for this thread, until exit."""
        ...

    def context(self) -> AbstractContextManager[None]:
        """Make the context current only: enough to queue copies and events on streams of ours."""
        ...

    def adopt_thread(self) -> None:
        """The same for a thread of our own, for good."""
        ...

    def bus_id(self) -> str:
        """The GPU's PCI address, e.g. ``0000:17:00.0``."""
        ...

    def attribute(self, name: str) -> int:
        """A device attribute by the tail of its name, e.g. ``"MULTIPROCESSOR_COUNT"``."""
        ...

    def stream(self, *, urgent: bool = False) -> Any:
        """Make a stream that does not synchronise with the legacy stream.

        Args:
            urgent: of the highest priority that there is.
        """
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

    def caller_captures(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""
        ...

    def event(self, *, blocking: bool) -> Any:
        """Make an event without timing; `blocking` waits by interrupt instead of spinning."""
        ...

    def event_of(self, handle: int) -> Any:
        """Wrap a handle."""
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

    def copy_rows(self, rows: Rows, stream: Any) -> None:
        """Copy byte ranges at even distances in one call."""
        ...

    def copy_batch(self, dst: Int64Array, src: Int64Array, nbytes: Int64Array, stream: Any) -> None:
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
