"""The one place where foreign code is called and any exception is caught.

A device's `enqueue` and a user's trace hook may raise anything, at any time; what that means for
ownership is decided here and nowhere else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, final

from transfer._errors import (
    CompletionLost,
    DevicePoisoned,
    EngineClosed,
    SubmitError,
    TransferError,
)
from transfer._fence import Fence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transfer._operation import Operation, Transition

_log = logging.getLogger("kvhold.transfer")


class Posted(NamedTuple):
    """What came of handing work to a device.

    Attributes:
        refused: nothing was posted.
        lost: something may have been posted, and there is no fence for it.
    """

    refused: TransferError | None = None
    lost: BaseException | None = None


def post(op: Operation, waits: Sequence[Fence], fences: dict[Fence, Operation]) -> Posted:
    """Hand an operation to its device and record its fence.

    Anything but `SubmitError` may have left work behind: an interrupt can strike between the
    device's own posting and its return.
    """
    try:
        fence = op.lane.device.enqueue(op.work, waits)
        op.fence = fence
        fences[fence] = op
    except (SubmitError, EngineClosed, DevicePoisoned) as error:
        return Posted(refused=error)
    except CompletionLost as error:
        if isinstance(error.fence, Fence):
            op.fence = error.fence
            fences[error.fence] = op
        return Posted(lost=error)
    except BaseException as error:  # noqa: BLE001 - the device boundary
        return Posted(lost=error)
    return Posted()


def attempt(function: Callable[..., object], *args: object) -> Exception | None:
    """Call a user's function; the exception that it raised, if it raised one."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - becomes the operation's error
        return error
    return None


@final
class Tracer:
    """Calls a user's trace hook, whose faults must not change any result.

    Attributes:
        errors: how many calls raised; the first is logged.
    """

    __slots__ = ("_hook", "errors")

    def __init__(self, hook: Callable[[Transition], None]) -> None:
        self._hook = hook
        self.errors = 0

    def __call__(self, transition: Transition) -> None:
        """Pass a transition on."""
        try:
            self._hook(transition)
        except Exception:  # noqa: BLE001 - a metrics fault is not a transfer fault
            self.errors += 1
            if self.errors == 1:
                _log.exception("the trace hook raised; later errors are only counted")
