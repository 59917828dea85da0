"""Which device does what, and what `after=` names."""

import pytest
from tests.transfer.kit import HandDevice, HandStream, Rig, nothing

from transfer._errors import OrderRequired, WrongDevice
from transfer._extent import BlockLayout
from transfer._fence import Fence
from transfer._lane import Marker
from transfer._memory import HostPool
from transfer._routing import UNSET, Routing, route_name
from transfer._work import Copy, FileRemove, Launch

HOST = (Launch, "host")


def gpu(name: str = "cuda:0", *, ordered: bool = True) -> HandDevice:
    return HandDevice(name, kind="cuda:0", ordered=ordered)


def test_every_route_has_one_device() -> None:
    host, device = HandDevice("host"), gpu()
    routing = Routing([host, device])
    assert routing.names == "host, cuda:0"
    assert routing.lane_for(Launch(nothing)).device is host
    assert routing.lane_for(Launch(nothing, on="cuda:0")).device is device
    with pytest.raises(
        WrongDevice, match="no device for FileRemove; there are: Copy cuda:0 cuda:0"
    ):
        routing.lane_for(FileRemove("f"))
    with pytest.raises(WrongDevice, match="no device for Launch cuda:7"):
        routing.lane_for(Launch(nothing, on="cuda:7"))


def test_two_devices_for_one_route_or_none_are_refused() -> None:
    with pytest.raises(WrongDevice, match="found none"):
        Routing([])
    with pytest.raises(WrongDevice, match="two and one both serve Launch host; expected one"):
        Routing([HandDevice("one", routes=[HOST]), HandDevice("two", routes=[HOST])])
    assert route_name((Copy, "host", "cuda:0")) == "Copy host cuda:0"


def test_order_is_required_where_other_queues_may_touch_the_memory() -> None:  # case 2, producers
    rig = Rig()
    routing = Routing([HandDevice("host"), gpu(), HandDevice("file", routes=[(FileRemove,)])])
    launch = Launch(nothing, on="cuda:0")
    with pytest.raises(OrderRequired, match=r"after= is not given: expected a stream"):
        routing.predecessors(rig.ledger, launch, routing.lane_for(launch), UNSET)
    assert routing.predecessors(rig.ledger, launch, routing.lane_for(launch), ()) == ()


@pytest.mark.parametrize("side", ["reads", "writes"])
def test_order_is_required_by_the_memory_too(side: str) -> None:
    rig = Rig()
    pool = HostPool(BlockLayout.raw(8), 2)
    pool.kind = "cuda:0"
    block = pool.lease().handle
    routing = Routing([HandDevice("host")])
    work = Launch(nothing, reads=[block]) if side == "reads" else Launch(nothing, writes=[block])
    with pytest.raises(OrderRequired):
        routing.predecessors(rig.ledger, work, routing.lanes[0], UNSET)
    assert routing.predecessors(rig.ledger, work, routing.lanes[0], ()) == ()


def test_host_memory_defaults_to_nothing_queued() -> None:
    rig = Rig()
    work = Launch(nothing, reads=[rig.pool.lease()])
    routing = Routing([HandDevice("host")])
    assert routing.predecessors(rig.ledger, work, routing.lanes[0], UNSET) == ()


def test_one_or_many_may_be_named() -> None:
    rig = Rig(devices=2)
    routing = Routing(rig.devices[:1])
    routing.lanes[:] = rig.lanes[:1]
    work = Launch(nothing)
    first, second = rig.submit(), rig.submit()
    assert routing.predecessors(rig.ledger, work, rig.lane, first) == (first,)
    assert routing.predecessors(rig.ledger, work, rig.lane, (first, second)) == (first, second)


def test_a_stream_is_marked_behind_what_it_covers() -> None:
    rig = Rig()
    routing = Routing([rig.device])
    routing.lanes[:] = rig.lanes
    stream = HandStream(rig.device)
    op = rig.submit(stream=stream)
    found = routing.predecessors(rig.ledger, Launch(nothing), rig.lane, (stream, "event"))
    assert [type(mark.work) for mark in found] == [Marker, Marker]
    assert list(found[0].before) == [op]
    assert list(found[1].before) == []  # a bare event covers none
    assert all(isinstance(mark.fence, Fence) for mark in found)
    assert routing.stream_lane(stream) is rig.lane


@pytest.mark.parametrize("after", [None, 3, HandStream(HandDevice("elsewhere")), (None,)])
def test_what_nobody_knows_is_refused(after: object) -> None:
    rig = Rig()
    routing = Routing([rig.device])
    with pytest.raises(WrongDevice, match="is no Operation and no stream or event of hand0"):
        routing.predecessors(rig.ledger, Launch(nothing), routing.lanes[0], after)


def test_unset_says_so() -> None:
    assert repr(UNSET) == "not given"


def test_operations_of_another_engine_are_refused() -> None:
    rig, other = Rig(), Rig()
    work = Launch(nothing)
    routing = Routing(rig.devices)
    op = rig.submit()
    assert routing.predecessors(rig.ledger, work, rig.lane, op) == (op,)
    with pytest.raises(WrongDevice, match=r"expected one of <no engine>; `await op.wait\(\)`"):
        routing.predecessors(rig.ledger, work, rig.lane, other.submit())
