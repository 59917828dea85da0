"""NaiveEngine: a control that goes by what is convenient instead of by proof.

It is the engine with the habits of engines that do without an ownership rule: a cancel, a lost
completion, an error and old age each release the buffers, and closing waits for nothing. Under
the same faults its callers' bytes are damaged; if they were not, the campaign would see nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import anyio.lowlevel

from transfer._engine import Engine
from transfer._errors import CompletionLost
from transfer._routing import UNSET
from transfer._state import State
from transfer.testing._bugs import release_holds

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._device import Device
    from transfer._operation import Operation, Transition
    from transfer._statistics import Statistics
    from transfer._work import HandleLike, Work


@final
class NaiveEngine:
    """Runs work on devices like `Engine`, and releases buffers on a cancel, a loss and by age.

    Args:
        devices: as for `Engine`.
        age_max: operations begun since, after which an operation is given up.
        in_flight_max: as for `Engine`.
        drain_deadline: taken for the sake of the same signature; closing waits for nothing.
        trace: as for `Engine`.

    Attributes:
        engine: what runs the work.
    """

    def __init__(
        self,
        *devices: Device,
        age_max: int = 12,
        in_flight_max: int = 4096,
        drain_deadline: float = 0.0,
        trace: Callable[[Transition], None] | None = None,
    ) -> None:
        del drain_deadline
        self.engine = Engine(
            *devices, in_flight_max=in_flight_max, drain_deadline=0.0, trace=self._trace
        )
        self._age_max = age_max
        self._hook = trace
        self._known: dict[int, Operation] = {}

    def _trace(self, step: Transition) -> None:
        if step.after in (State.ABANDONED, State.QUARANTINED):
            op = self._known.pop(step.serial, None)
            if op is not None:
                release_holds(op)
        if self._hook is not None:
            self._hook(step)

    def _note(self, op: Operation) -> Operation:
        self._known[op.serial] = op
        for serial in [s for s in self._known if s <= op.serial - self._age_max]:
            release_holds(self._known.pop(serial))
        return op

    def start(self) -> None:
        """As `Engine.start`."""
        self.engine.start()

    async def aclose(self) -> None:
        """Stop, whatever is in flight."""
        try:
            await self.engine.aclose()
        except CompletionLost:
            await anyio.lowlevel.checkpoint()

    def close_sync(self, deadline: float = 0.0) -> None:
        """As `Engine.close_sync`."""
        self.engine.close_sync(deadline)

    async def drain(self) -> None:
        """As `Engine.drain`."""
        await self.engine.drain()

    async def submit(self, work: Work, *, after: object = UNSET, name: str = "") -> Operation:
        """As `Engine.submit`."""
        return self._note(await self.engine.submit(work, after=after, name=name))

    def submit_nowait(self, work: Work, *, after: object = UNSET, name: str = "") -> Operation:
        """As `Engine.submit_nowait`."""
        return self._note(self.engine.submit_nowait(work, after=after, name=name))

    async def run(
        self, work: Work, *, after: object = UNSET, name: str = "", leave: bool = False
    ) -> None:
        """As `Engine.run`, but a cancelled caller leaves with the buffers."""
        del leave
        op = await self.submit(work, after=after, name=name)
        try:
            await op.wait()
        finally:
            op.cancel()

    def holders(self, handle: HandleLike | None = None) -> list[Operation]:
        """As `Engine.holders`."""
        return self.engine.holders(handle)

    def statistics(self) -> Statistics:
        """As `Engine.statistics`."""
        return self.engine.statistics()
