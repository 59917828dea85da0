"""An operation: a piece of work, the blocks it holds, its state and how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from transfer._errors import (
    BadWork,
    CompletionLost,
    OperationCancelled,
    OperationFailed,
    TransferError,
)
from transfer._state import SETTLED, TRANSITIONS, Event, State, step
from transfer._work import External

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from transfer._book import Hold
    from transfer._fence import Completion, Fence
    from transfer._lane import Lane
    from transfer._memory import Pool
    from transfer._storage import Storage
    from transfer._work import Work

    Taint: TypeAlias = frozenset[tuple[Pool, int, int]]


NOTHING: Final[Taint] = frozenset()
"""No undefined bytes. Otherwise (pool, block id, generation) of each block that has some."""


UNLINKED: Final[dict[Operation, None]] = {}
"""The edges of an operation that has none. Shared, since most have none: `_order.link` adds."""


class Transition(NamedTuple):
    """One step of one operation, as the trace hook sees it."""

    serial: int
    name: str
    device: str
    before: State
    event: Event
    after: State


class Driver(Protocol):
    """What an operation asks of the engine that runs it."""

    def cancel(self, op: Operation) -> None:
        """See `Operation.cancel`."""
        ...

    async def wait(self, op: Operation) -> None:
        """See `Operation.wait`."""
        ...

    async def wait_posted(self, op: Operation) -> None:
        """See `Operation.wait_posted`."""
        ...

    def order_before(self, op: Operation, stream: object) -> None:
        """See `Operation.order_before`."""
        ...

    def finish(self, op: Operation, stream: object | None) -> None:
        """See `Operation.finish`."""
        ...


@final
class Operation:
    """The life of one piece of work. Made by an engine, never by a caller.

    Attributes:
        serial: number in the order of submission.
        name: for messages.
        work: the descriptor.
        state: where it is.
        error: how it failed, once it has.
        posted: whether a device ever got it.
        doomed: whether it was lost, or is ordered behind one that was.
        nbytes: bytes that it moves.
        since: the loop's clock when it was submitted, in seconds.
    """

    __slots__ = (
        "after",
        "before",
        "doomed",
        "driver",
        "error",
        "fence",
        "holds",
        "lane",
        "name",
        "nbytes",
        "parked",
        "posted",
        "serial",
        "since",
        "spoiled",
        "state",
        "taint",
        "watchers",
        "work",
    )

    def __init__(self, serial: int, name: str, work: Work, lane: Lane, driver: Driver) -> None:
        self.serial = serial
        self.name = name
        self.work = work
        self.lane = lane
        self.driver = driver
        self.state = State.PREPARED
        self.error: TransferError | None = None
        self.posted = False
        self.since = 0.0
        self.nbytes = 0
        self.holds: tuple[Hold, ...] = ()
        self.fence: Fence | None = None
        self.parked: Completion | None = None
        self.spoiled: TransferError | None = None
        self.taint = NOTHING
        self.doomed = False
        # Insertion-ordered sets: unsettled predecessors, and successors that wait for this one.
        self.before = UNLINKED
        self.after = UNLINKED
        # A tuple: most operations have none, and an empty one costs nothing to make or to collect.
        self.watchers: tuple[Callable[[], None], ...] = ()

    def __repr__(self) -> str:
        return f"<operation {self.serial} {self.name}, {self.state.value}>"

    @property
    def settled(self) -> bool:
        """Whether nothing touches its bytes any more."""
        return self.state in SETTLED

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The memory that it touches."""
        return tuple(hold.handle.pool.storage for hold in self.holds)

    @property
    def decided(self) -> bool:
        """Whether waiting is over: settled, or the end can no longer be learnt."""
        return self.state in SETTLED or self.state is State.QUARANTINED

    def apply(self, event: Event, trace: Callable[[Transition], None] | None) -> None:
        """Let the table decide; the only place where a state changes.

        Raises:
            IllegalTransition: the table has no such cell; nothing changed.
        """
        before = self.state
        after = TRANSITIONS[before].get(event)
        self.state = step(before, event) if after is None else after
        if trace is not None:
            trace(
                Transition(self.serial, self.name, self.lane.device.name, before, event, self.state)
            )

    def raise_outcome(self) -> None:
        """Return if it completed, else raise what became of it.

        A fresh exception each time: several waiters must not share one traceback.

        Raises:
            OperationFailed: it failed; the device's error is the cause.
            SubmitError: it was never posted, since the device refused.
            OperationCancelled: someone cancelled it.
            CompletionLost: its end can no longer be learnt.
        """
        if self.state is State.COMPLETED:
            return
        if self.state is State.CANCELLED:
            raise OperationCancelled(f"{self!r} was cancelled")
        known = self.error
        if self.state is State.QUARANTINED:
            reason = "" if known is None else f": {known}"
            cause = None if known is None else known.__cause__
            raise CompletionLost(f"the end of {self!r} cannot be learnt{reason}") from cause
        if known is None:
            raise OperationFailed(f"{self!r} failed")
        raise type(known)(*known.args) from known.__cause__

    def append(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever waiting for this operation may be over."""
        self.watchers = (*self.watchers, callback)

    def remove(self, callback: Callable[[], None]) -> None:
        """Stop calling `callback`."""
        self.watchers = tuple(known for known in self.watchers if known is not callback)

    def check_external(self) -> None:
        """Refuse anybody's word for the end of a device's work.

        Raises:
            BadWork: it is no `External`.
        """
        if not isinstance(self.work, External):
            raise BadWork(f"{self!r} is the work of {self.lane.device.name}, expected an External")

    # What a caller does with it

    async def wait(self) -> None:
        """Wait until it is settled or lost. Cancelling the wait does not cancel the operation.

        Raises:
            OperationFailed: the device is done, with an error; the destination is undefined.
            SubmitError: nothing was posted.
            OperationCancelled: someone else cancelled it.
            CompletionLost: its end cannot be learnt; the buffers are quarantined.
        """
        await self.driver.wait(self)

    async def wait_posted(self) -> None:
        """Wait until a device has it, so that `order_before` has something to order behind.

        Raises:
            OperationFailed, OperationCancelled, CompletionLost: it ended before.
        """
        await self.driver.wait_posted(self)

    def cancel(self) -> None:
        """Say that the result is unwanted. Total, idempotent, and frees nothing that is in use."""
        self.driver.cancel(self)

    def order_before(self, stream: object) -> None:
        """Make later work of `stream` wait for this operation.

        Raises:
            NotPosted: it waits for a predecessor; use `wait_posted` first.
        """
        self.driver.order_before(self, stream)

    def finish(self, stream: object | None = None) -> None:
        """Say where the host program's own work (`External`) ends: behind what `stream` has now.

        Args:
            stream: a stream of the device; None for a host device, where the work has ended.

        Raises:
            BadWork: the work is a device's: only the device can prove that it has ended.
            NotPosted: it waits for a predecessor.
        """
        self.driver.finish(self, stream)
