"""The error tree: what a caller may conclude from a class, without looking at anything else."""

import inspect

import pytest

import transfer
from transfer import _errors
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
from transfer._fence import Fence

AT_RUN_TIME: list[type[Exception]] = [
    SubmitError,
    OperationFailed,
    OperationCancelled,
    CompletionLost,
    DevicePoisoned,
    EngineClosed,
    ForkDetected,
    PoolBusy,
    WouldBlock,
    PoolExhausted,
    NotPosted,
    BadWork,
]
BAD_REQUESTS: list[type[Exception]] = [
    SpanError,
    AlignmentError,
    LayoutMismatch,
    WrongPool,
    WrongThread,
    WrongDevice,
    OrderRequired,
]
CALLERS_BUGS: list[type[Exception]] = [LeaseError, StaleBlock, HoldConflict]


@pytest.mark.parametrize("error", AT_RUN_TIME)
def test_what_a_transfer_reports_is_a_transfer_error(error: type[Exception]) -> None:
    assert issubclass(error, TransferError)
    assert not issubclass(error, RuntimeError)


@pytest.mark.parametrize("error", BAD_REQUESTS)
def test_a_wrong_request_is_a_value_error_too(error: type[Exception]) -> None:
    assert issubclass(error, BadWork)
    assert issubclass(error, ValueError)


@pytest.mark.parametrize("error", CALLERS_BUGS)
def test_a_bug_of_the_caller_is_no_transfer_error(error: type[Exception]) -> None:
    # Code that handles transfer errors, by a retry or a recompute, must not swallow these.
    assert issubclass(error, LeaseError)
    assert not issubclass(error, TransferError)


def test_a_bug_of_ours_is_neither() -> None:
    assert not issubclass(IllegalTransition, (TransferError, LeaseError))


def test_nothing_that_says_retry_says_lost() -> None:
    # A retry is safe after SubmitError only: no class may be both.
    assert not issubclass(SubmitError, (CompletionLost, OperationFailed))
    assert not issubclass(CompletionLost, (SubmitError, OperationFailed, OperationCancelled))


def test_every_class_of_the_tree_is_listed_here_and_exported() -> None:
    defined = {
        error
        for _, error in inspect.getmembers(_errors, inspect.isclass)
        if error.__module__ == _errors.__name__
    }
    listed = {*AT_RUN_TIME, *BAD_REQUESTS, *CALLERS_BUGS, TransferError, IllegalTransition}
    assert defined == listed
    assert {error.__name__ for error in defined} <= set(transfer.__all__)


def test_exhaustion_says_who_has_the_blocks() -> None:
    error = PoolExhausted("gpu pages", wanted=9, free=1, leased=2, held=3, quarantined=4)
    assert (error.wanted, error.free, error.leased, error.held, error.quarantined) == (
        9,
        1,
        2,
        3,
        4,
    )
    assert str(error) == (
        "gpu pages: 9 blocks wanted, 1 free; 2 leased, 3 held by operations, 4 quarantined"
    )


def test_a_lost_completion_may_hand_a_fence_along() -> None:
    fence = Fence()
    assert CompletionLost("posted").fence is None
    assert CompletionLost("posted", fence=fence).fence is fence
