"""The engine: admission, waiting, leaving. A thin shell around the ledger, on any anyio loop."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

import anyio.lowlevel

from transfer import _drain
from transfer._drain import wait_decided
from transfer._errors import EngineClosed, NotPosted, WouldBlock
from transfer._home import Home
from transfer._instant import done_at_once
from transfer._ledger import Ledger
from transfer._operation import Operation, Transition
from transfer._reaper import Reaper
from transfer._routing import UNSET, Routing
from transfer._statistics import Statistics, observe
from transfer._wait import Line, limit, wait_woken
from transfer._work import Copy, handle_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Self

    from transfer._device import Device
    from transfer._lane import Lane
    from transfer._work import HandleLike, Work


@final
class Engine:
    """Runs work on devices and keeps every buffer owned until there is proof that it is quiet.

    Use it as ``async with Engine(HostDevice()) as engine``; leaving waits until nothing is in
    flight. An engine belongs to the loop and thread that started it, and may be started again
    after it was closed.

    Args:
        devices: each kind of work and memory resolves to exactly one of them.
        in_flight_max: operations admitted per device, prepared ones included.
        in_flight_bytes_max: bytes admitted per device; a larger single operation goes alone.
        quarantine_bytes_max: past this many quarantined bytes a device accepts no new work.
        drain_deadline: seconds that leaving waits before it gives up on what is still in flight.
        trace: called with every `Transition`; its exceptions are counted and never matter.
        name: for messages and the names of things.

    Raises:
        WrongDevice: no device, or two that serve the same route.
        ValueError: a limit of what is in flight is below 1.
    """

    def __init__(
        self,
        *devices: Device,
        in_flight_max: int = 4096,
        in_flight_bytes_max: int = 16 << 30,
        quarantine_bytes_max: int | None = None,
        drain_deadline: float = 30.0,
        trace: Callable[[Transition], None] | None = None,
        name: str = "engine",
    ) -> None:
        self.name = name
        self._in_flight_max = limit("in_flight_max", in_flight_max)
        self._in_flight_bytes_max = limit("in_flight_bytes_max", in_flight_bytes_max)
        self._drain_deadline = drain_deadline
        self._routing = Routing(devices)
        self._lanes = self._routing.lanes
        self._lines = {lane: Line() for lane in self._lanes}
        self._ledger = Ledger(
            self, trace=trace, quarantine_bytes_max=quarantine_bytes_max, settled=self._left
        )
        self._reaper = Reaper(self._lanes, self._ledger)
        self._home = Home(name)
        self._idle: list[Callable[[], None]] = []
        self._closing = False
        # Unlike `__del__`, this also speaks at exit, when worker threads keep everything alive.
        weakref.finalize(self, self._home.warn_unclosed)

    def __repr__(self) -> str:
        return f"<{self.name} on {self._routing.names}>"

    # Starting and leaving

    def start(self) -> None:
        """Bind the engine to the running loop and start its devices.

        For frameworks whose start and stop run in different tasks; otherwise use `async with`.

        Raises:
            EngineClosed: it is already started.
            RuntimeError: the caller runs on no loop.
        """
        loop = self._home.bind()
        self._closing = self._ledger.silent = False
        started: list[Lane] = []
        try:
            for lane in self._lanes:
                lane.device.start()
                started.append(lane)
        finally:
            if len(started) < len(self._lanes):
                self._stop(started)  # a device that did not start may be another engine's
        self._reaper.attach(loop)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def drain(self) -> None:
        """Wait until nothing is in flight; new work is still accepted meanwhile."""
        self._home.check()
        while self._busy():
            await wait_woken(self._idle)

    async def aclose(self) -> None:
        """Refuse new work, wait until nothing is in flight, stop the devices. May be repeated.

        Goes on waiting after every cancellation, and raises one again at the end. At the drain
        deadline what is prepared is cancelled and the rest is given up.

        Raises:
            CompletionLost: the end of some operations could not be learnt by then; their blocks
                stay quarantined.
        """
        if self._home.loop is None:
            return
        self._home.check()
        self._closing = True
        for line in self._lines.values():
            line.wake_all()
        caught = await _drain.wait_unstoppable(
            self._quiet, self._idle, deadline=self._drain_deadline
        )
        lost = _drain.give_up(self._ledger, self._lanes)
        self._stop(self._lanes)
        if lost:
            raise _drain.describe_lost(self, lost)
        if caught is not None:
            raise caught
        await anyio.lowlevel.checkpoint_if_cancelled()

    def close_sync(self, deadline: float = 30.0) -> None:
        """Close from any thread once the loop is gone; may be repeated, and takes late proofs.

        Args:
            deadline: seconds to wait for what is in flight or lost; the rest is given up.

        Raises:
            EngineClosed: the loop still runs; use `aclose` there.
            ForkDetected: it was started in another process.
            CompletionLost: the end of some operations could not be learnt.
        """
        with self._home.after_loop():
            self._closing = self._ledger.silent = True
            # Whoever waits does so on a loop that is gone: forgotten, not woken.
            self._lines = {lane: Line() for lane in self._lanes}
            for pool in list(self._ledger.pools):
                pool.disown(self, forget=True)
            self._reaper.wait_sync(
                lambda: not self._quiet() or _drain.provable(self._lanes), deadline
            )
            _drain.give_up(self._ledger, self._lanes)
            self._stop(self._lanes)
        still = [op for lane in self._lanes for op in lane.lost]
        if still:
            raise _drain.describe_lost(self, still)

    def _quiet(self) -> bool:
        """Whether nothing is in flight; takes up first what an interrupt left half-done."""
        self._reaper.reap()
        _drain.mend(self._ledger, self._lanes)
        return not self._busy()

    def _stop(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            lane.device.close()
        for pool in list(self._ledger.pools):
            pool.disown(self)
        self._reaper.detach()
        self._home.loop = None

    # Submitting

    async def submit(self, work: Work, *, after: object = UNSET, name: str = "") -> Operation:
        """Admit, prepare and post; or leave prepared behind its predecessors.

        Args:
            work: the descriptor.
            after: what it is ordered behind: an Operation, a stream or event of a device, a tuple
                of these, or ``()``. Required where device memory is touched. Recorded now, before
                admission is awaited.
            name: for messages.

        Raises:
            BadWork, LeaseError: the request is wrong; nothing was taken.
            SubmitError: the device refused; nothing was posted.
            CompletionLost: posted, but its end cannot be learnt.
            DevicePoisoned, EngineClosed: no new work.
        """
        owned: list[Operation] = []
        await self._submit(work, after, name, owned)
        return owned[0]

    def submit_nowait(self, work: Work, *, after: object = UNSET, name: str = "") -> Operation:
        """As `submit`, without waiting for admission.

        Raises:
            WouldBlock: it would have to wait.
        """
        lane, preds = self._begin(work, after)
        if not self._lines[lane].free(lambda: self._fits(lane, work.nbytes)):
            raise WouldBlock(
                f"{lane.device.name} has {lane.admitted} operations and {lane.nbytes} bytes "
                f"admitted; at most {self._in_flight_max} and {self._in_flight_bytes_max}"
            )
        owned: list[Operation] = []
        self._start(work, lane, preds, name, owned)
        return owned[0]

    async def run(
        self, work: Work, *, after: object = UNSET, name: str = "", leave: bool = False
    ) -> None:
        """Do `work` and return when it has completed.

        When this returns, or raises anything but a cancellation or `CompletionLost`, nothing of it
        is in flight. Cancelled, it leaves at once and the blocks stay held; on foreign memory it
        leaves only when they are quiet.

        Args:
            work: the descriptor.
            after: as for `submit`.
            name: for messages.
            leave: on foreign memory, leave at once too; then ``await block.wait_unheld()`` is the
                only permission to reuse.

        Raises:
            OperationFailed: the device is done, with an error; the destination is undefined.
            CompletionLost: its end cannot be learnt; replaces a cancellation that was held back.
            BadWork, LeaseError, SubmitError, DevicePoisoned, EngineClosed: as for `submit`.
        """
        nothing = after is UNSET or (isinstance(after, tuple) and not after)
        if nothing and done_at_once(self._ledger, self._lane(work), work):
            await anyio.lowlevel.checkpoint()
            return
        owned: list[Operation] = []
        try:
            await self._submit(work, after, name, owned)
            await wait_decided(owned[0])
        finally:
            if owned and not owned[0].settled:
                await _drain.leave_owned(owned[0], self._ledger, self._reaper, leave=leave)
        owned[0].raise_outcome()

    async def copy(
        self,
        src: HandleLike,
        dst: HandleLike,
        *,
        after: object = UNSET,
        names: Iterable[str] | None = None,
        leave: bool = False,
    ) -> None:
        """Copy blocks of `src` into as many of `dst`; `run` of a `Copy`."""
        await self.run(Copy(src, dst, names=names), after=after, leave=leave)

    def _lane(self, work: Work) -> Lane:
        """The lane of `work`, after all checks that need no order."""
        self._home.check()
        self._check_open()
        lane = self._routing.lane_for(work)
        lane.device.check(work)
        return lane

    def _begin(self, work: Work, after: object) -> tuple[Lane, tuple[Operation, ...]]:
        """All that is checked and recorded at the call."""
        lane = self._lane(work)
        return lane, self._routing.predecessors(self._ledger, work, lane, after)

    async def _submit(self, work: Work, after: object, name: str, owned: list[Operation]) -> None:
        lane, preds = self._begin(work, after)
        line = self._lines[lane]
        nbytes = work.nbytes
        if line.free(lambda: self._fits(lane, nbytes)):
            await anyio.lowlevel.checkpoint_if_cancelled()
        else:
            await line.wait(lambda: self._fits(lane, nbytes))
        self._check_open()
        self._start(work, lane, preds, name, owned)

    def _start(
        self,
        work: Work,
        lane: Lane,
        preds: tuple[Operation, ...],
        name: str,
        owned: list[Operation],
    ) -> None:
        """Prepare and post. The owner knows it before any device does: an interrupt may strike."""
        loop = self._home.check()
        op = self._ledger.prepare(work, lane, preds, name=name)
        owned.append(op)
        op.since = loop.time()
        self._ledger.start(op)

    def _fits(self, lane: Lane, nbytes: int) -> bool:
        """Whether there is room; also true when waiting for it has become pointless."""
        if self._closing or lane.poisoned is not None:
            return True
        return lane.admitted < self._in_flight_max and (
            lane.admitted == 0 or lane.nbytes + nbytes <= self._in_flight_bytes_max
        )

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosed(f"{self!r} is closing: no new work")

    # What operations ask for (Driver)

    def cancel(self, op: Operation) -> None:
        """See `Operation.cancel`."""
        if not op.decided:
            self._home.check()
        self._ledger.cancel(op)

    async def wait(self, op: Operation) -> None:
        """See `Operation.wait`."""
        if not op.decided:
            self._home.check()
        await wait_decided(op)
        op.raise_outcome()

    async def wait_posted(self, op: Operation) -> None:
        """See `Operation.wait_posted`."""
        if not op.decided:
            self._home.check()
        await wait_decided(op, posted=True)
        if not op.posted:
            op.raise_outcome()

    def order_before(self, op: Operation, stream: object) -> None:
        """See `Operation.order_before`."""
        self._home.check()
        lane = self._routing.stream_lane(stream)
        if op.settled:
            return
        if op.decided:
            op.raise_outcome()
        if op.fence is None or not lane.device.can_wait(op.fence):
            raise NotPosted(
                f"{op!r} of {op.lane.device.name}: {stream!r} can only wait for posted work of "
                f"its own device; `await op.wait_posted()`, or `await op.wait()`"
            )
        lane.device.join(stream, op.fence)
        key = lane.device.stream_key(stream)
        if key is not None:
            lane.cover(key, op)

    def finish(self, op: Operation, stream: object | None) -> None:
        """See `Operation.finish`."""
        self._home.check()
        op.check_external()
        if op.fence is None:
            raise NotPosted(f"{op!r} is not posted; there is nothing to finish")
        op.lane.device.finish(op.fence, stream)

    def _left(self, lane: Lane) -> None:
        """The ledger says that an operation left the live ones of `lane`."""
        if self._ledger.silent:
            return
        self._lines[lane].wake()
        if self._idle and not self._busy():
            for callback in list(self._idle):
                callback()

    def _busy(self) -> bool:
        return any(not op.decided for lane in self._lanes for op in lane.live)

    # Looking

    def statistics(self) -> Statistics:
        """A frozen snapshot."""
        return observe(self._ledger, self._lanes)

    def holders(self, handle: HandleLike | None = None) -> list[Operation]:
        """The operations that hold blocks of `handle`, or any blocks at all."""
        if handle is None:
            return [op for lane in self._lanes for op in (*lane.live, *lane.lost) if op.holds]
        given = handle_of(handle)
        return [op for op in given.pool.holders(given) if isinstance(op, Operation)]
