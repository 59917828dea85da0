"""The error tree: each class says what became of the buffers.

A caller that catches one of these knows, without looking at anything else, whether the buffers
came back and whether the destination is defined.
"""

from __future__ import annotations


class TransferError(Exception):
    """Base of everything that a transfer can report at run time."""


class SubmitError(TransferError):
    """Nothing was posted: buffers are back, the destination is untouched, a retry is safe."""


class OperationFailed(TransferError):
    """The device is done, with an error: buffers are back, the destination is undefined.

    The device's own error is the ``__cause__``.
    """


class OperationCancelled(TransferError):
    """Someone else cancelled the operation: buffers are back, the destination is undefined."""


class CompletionLost(TransferError):
    """The end can no longer be learnt: buffers are quarantined.

    Raised by a device's ``enqueue``, it means "posted, and no fence could be made". A device that
    can still learn of a later quiet state hands a fence for it along.

    Attributes:
        fence: what will report a later quiet state, or None when nothing can.
    """

    def __init__(self, message: str, *, fence: object | None = None) -> None:
        super().__init__(message)
        self.fence = fence


class DevicePoisoned(TransferError):
    """The device lost its context or its quarantine is full: it accepts no new work."""


class EngineClosed(TransferError):
    """The engine is draining, closed, forked away or its loop is gone: no new work."""


class PoolBusy(TransferError):
    """A pool was closed with held or quarantined blocks: its memory is kept mapped."""


class WouldBlock(TransferError):
    """A ``*_nowait`` call would have had to wait for admission: nothing was taken."""


class PoolExhausted(TransferError):
    """Too few free blocks; the message and the attributes say who has them.

    Attributes:
        wanted: blocks asked for.
        free: blocks nobody has.
        leased: blocks that an owner has and no operation touches.
        held: blocks that operations may touch.
        quarantined: blocks whose last operation was lost.
    """

    def __init__(
        self, pool: str, *, wanted: int, free: int, leased: int, held: int, quarantined: int
    ) -> None:
        super().__init__(
            f"{pool}: {wanted} blocks wanted, {free} free; "
            f"{leased} leased, {held} held by operations, {quarantined} quarantined"
        )
        self.wanted = wanted
        self.free = free
        self.leased = leased
        self.held = held
        self.quarantined = quarantined


class NotPosted(TransferError):
    """The operation waits for a predecessor: there is no fence yet to order behind."""


class BadWork(TransferError, ValueError):
    """The request itself is wrong: nothing was taken, nothing was touched."""


class SpanError(BadWork):
    """A byte range does not lie inside its block."""


class AlignmentError(BadWork):
    """An address, offset or length breaks the alignment that direct I/O needs."""


class LayoutMismatch(BadWork):
    """Two layouts cannot be copied into each other, or a layout disagrees with real memory."""


class WrongPool(BadWork):
    """A block of another pool, engine or thread than the one that may use it."""


class WrongThread(WrongPool):
    """A call from another thread or loop than the one that the engine and its pools belong to."""


class WrongDevice(BadWork):
    """No device of this engine does this work on this kind of memory."""


class OrderRequired(BadWork, TypeError):
    """Device memory was named without ``after=``: state what the copy must wait for, or ``()``."""


class LeaseError(RuntimeError):
    """The caller broke the ownership rules: a bug in the calling program."""


class StaleBlock(LeaseError):
    """A handle from an earlier lease of a block that has since been given to someone else."""


class HoldConflict(LeaseError):
    """Two operations would touch a block, one writing, with no order between them."""


class IllegalTransition(RuntimeError):
    """An event that the state table has no cell for: a bug of kvhold or of a device."""


class ForkDetected(EngineClosed):
    """The engine was started in another process: its threads did not survive the fork."""
