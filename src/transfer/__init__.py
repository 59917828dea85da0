"""Who owns which bytes, until when.

A transfer is an `Operation` that keeps its buffers owned until its device has proven that nothing
touches them any more. A timeout, a cancel, a failed heartbeat or an exception proves nothing.
"""

from transfer._book import PoolCounts
from transfer._engine import Engine
from transfer._errors import (
    AlignmentError,
    BadWork,
    CompletionLost,
    DevicePoisoned,
    EngineClosed,
    ForkDetected,
    HoldConflict,
    IllegalTransition,
    LayoutMismatch,
    LeaseError,
    NotPosted,
    OperationCancelled,
    OperationFailed,
    OrderRequired,
    PoolBusy,
    PoolExhausted,
    SpanError,
    StaleBlock,
    SubmitError,
    TransferError,
    WouldBlock,
    WrongDevice,
    WrongPool,
    WrongThread,
)
from transfer._extent import DTYPES, BlockLayout, Extent
from transfer._handle import Block, Blocks, Lease, Span
from transfer._memory import HostPool, Pool
from transfer._operation import Operation, Transition
from transfer._state import SETTLED, TRANSITIONS, Event, State
from transfer._statistics import DeviceStatistics, Statistics
from transfer._thread import EngineThread
from transfer._work import Copy, External, FileRead, FileRemove, FileWrite, Launch
from transfer.files import FileDevice
from transfer.host import HostDevice

__all__ = [
    "DTYPES",
    "SETTLED",
    "TRANSITIONS",
    "AlignmentError",
    "BadWork",
    "Block",
    "BlockLayout",
    "Blocks",
    "CompletionLost",
    "Copy",
    "DevicePoisoned",
    "DeviceStatistics",
    "Engine",
    "EngineClosed",
    "EngineThread",
    "Event",
    "Extent",
    "External",
    "FileDevice",
    "FileRead",
    "FileRemove",
    "FileWrite",
    "ForkDetected",
    "HoldConflict",
    "HostDevice",
    "HostPool",
    "IllegalTransition",
    "Launch",
    "LayoutMismatch",
    "Lease",
    "LeaseError",
    "NotPosted",
    "Operation",
    "OperationCancelled",
    "OperationFailed",
    "OrderRequired",
    "Pool",
    "PoolBusy",
    "PoolCounts",
    "PoolExhausted",
    "Span",
    "SpanError",
    "StaleBlock",
    "State",
    "Statistics",
    "SubmitError",
    "TransferError",
    "Transition",
    "WouldBlock",
    "WrongDevice",
    "WrongPool",
    "WrongThread",
]
