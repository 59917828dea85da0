"""Which device does what: work to lanes, and what ``after=`` names to operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from transfer._errors import OrderRequired, WrongDevice
from transfer._lane import Lane
from transfer._operation import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer._device import Device
    from transfer._ledger import Ledger
    from transfer._work import Route, Work


@final
class Unset:
    """Stands for an ``after=`` that was not given."""

    def __repr__(self) -> str:
        return "not given"


UNSET: Final = Unset()


def route_name(route: Route) -> str:
    """A route for messages, e.g. ``Copy host cuda:0``."""
    return " ".join(part.__name__ if isinstance(part, type) else str(part) for part in route)


@final
class Routing:
    """The lanes of an engine's devices.

    Raises:
        WrongDevice: no device, or two that serve the same route.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.lanes = [Lane(device) for device in devices]
        self._routes: dict[Route, Lane] = {}
        if not devices:
            raise WrongDevice("an engine needs at least one device, found none")
        for lane in self.lanes:
            for route in lane.device.routes:
                if route in self._routes:
                    raise WrongDevice(
                        f"{lane.device.name} and {self._routes[route].device.name} both serve "
                        f"{route_name(route)}; expected one device for each"
                    )
                self._routes[route] = lane

    @property
    def names(self) -> str:
        """The devices' names, for messages."""
        return ", ".join(lane.device.name for lane in self.lanes)

    def lane_for(self, work: Work) -> Lane:
        """The lane of the one device that serves `work`.

        Raises:
            WrongDevice: there is none.
        """
        lane = self._routes.get(work.route)
        if lane is None:
            served = ", ".join(sorted(map(route_name, self._routes)))
            raise WrongDevice(f"no device for {route_name(work.route)}; there are: {served}")
        return lane

    def predecessors(
        self, ledger: Ledger, work: Work, lane: Lane, after: object
    ) -> tuple[Operation, ...]:
        """Record now what `work` is ordered behind.

        Raises:
            OrderRequired: device memory, and `after` was not given.
            WrongDevice: `after` names something that no device knows, or an operation of another
                engine, whose end would be told to that engine only.
        """
        if after is UNSET:
            if lane.device.ordered or any(
                handle.pool.kind != "host" for handle in (*work.reads, *work.writes)
            ):
                raise OrderRequired(
                    f"{work!r} touches device memory and after= is {after!r}: expected a stream, "
                    f"an event, an Operation, or () when nothing is queued"
                )
            return ()
        items = after if isinstance(after, tuple) else (after,)
        return tuple(self._predecessor(ledger, item) for item in items)

    def _predecessor(self, ledger: Ledger, item: object) -> Operation:
        if isinstance(item, Operation):
            if item.driver is not ledger._driver:
                raise WrongDevice(
                    f"{item!r} is an operation of {item.driver!r}, expected one of "
                    f"{ledger._driver!r}; `await op.wait()` orders behind it"
                )
            return item
        lane = self.stream_lane(item)
        device = lane.device
        covered = lane.covered(device.stream_key(item))
        return ledger.mark(lane, device.record(item), covered)

    def stream_lane(self, stream: object) -> Lane:
        """The lane of the device that a stream or event belongs to.

        Raises:
            WrongDevice: no device of this engine knows it.
        """
        for lane in self.lanes:
            if lane.device.owns_stream(stream):
                return lane
        raise WrongDevice(f"{stream!r} is no Operation and no stream or event of {self.names}")
