"""CudaDevice, through the engine and by hand, on a GPU that is not there."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.transfer.cuda_rig import PAGE, Rig
from tests.transfer.gpu_kit import CoreEvent, CoreStream, FakeDriver, FakeKernels

from transfer import (
    BadWork,
    CompletionLost,
    Copy,
    DevicePoisoned,
    Engine,
    External,
    HostDevice,
    HostPool,
    Launch,
    NotPosted,
    OperationFailed,
    SubmitError,
    WrongDevice,
)
from transfer._cuda_watch import CudaFence
from transfer._staging import Pipeline
from transfer.cuda import CudaDevice, Way

WAYS = [Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED]


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A device for an engine to start, on a GPU that runs by itself; made outside of the loop."""
    made = Rig(manual=False, start=False, ways=getattr(request, "param", tuple(Way)))
    yield made
    made.driver.stop()


def test_importing_needs_nothing_and_starts_nothing() -> None:
    """Neither torch nor CUDA nor a thread."""
    code = (
        "import sys, threading, transfer.cuda as c; c.CudaDevice();"
        "assert not {'torch', 'cuda', 'triton'} & set(sys.modules), sorted(sys.modules);"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.anyio
@pytest.mark.parametrize("rig", [(way,) for way in WAYS], indirect=True, ids=WAYS)
async def test_the_engine_moves_every_byte(rig: Rig) -> None:
    out, back = rig.copy(30), Copy(rig.leased(rig.host)[:30], rig.leased(rig.gpu)[30:60])
    async with Engine(rig.device) as engine:
        await engine.run(out, after=())
        await engine.run(back, after=())
        assert rig.same(out)
        assert rig.same(Copy(back.src, back.dst))
        await engine.copy(rig.leased(rig.gpu)[30:40], rig.leased(rig.gpu)[:10], after=())
    assert sorted(rig.device.taken.values()) == [1, 2]
    assert rig.driver.opened == 0
    assert all(stream.dropped for stream in rig.driver.streams)
    assert all(event.dropped for event in rig.driver.events)


@pytest.mark.anyio
async def test_a_lost_context_stops_the_gpu_alone(rig: Rig) -> None:  # case 11
    plain = HostPool(PAGE, 2)
    a, b = plain.lease().handle, plain.lease().handle
    async with Engine(rig.device, HostDevice(), drain_deadline=0.1) as engine:
        running = rig.device._running
        assert running is not None
        rig.driver.hold(running.out.kernels)
        rig.driver.hold(running.out.moves)
        op = await engine.submit(rig.copy(4), after=())
        rig.driver.lose_context()
        with pytest.raises(CompletionLost):
            await op.wait()
        assert rig.gpu.counts().quarantined == 4
        with pytest.raises((DevicePoisoned, SubmitError)):
            await engine.run(rig.copy(4, 20), after=())
        await engine.copy(a, b)


@pytest.mark.parametrize("code", [700, 719])
def test_what_torch_says_of_a_lost_context_is_no_exception_of_a_check(code: int) -> None:
    rig = Rig()
    fence = rig.post(rig.copy(2))

    def lost() -> bool:
        rig.driver._enter("caller_captures")
        return False

    rig.driver.caller_captures = lost  # type: ignore[method-assign]
    rig.driver.lose_context(code)
    work = rig.copy(1, 20)
    rig.device.check(work)
    with pytest.raises(SubmitError, match="lost its context"):
        rig.device.enqueue(work, ())
    rig.device.check(work)
    (done,) = rig.ends(1)
    assert done.fence is fence
    assert done.lost
    assert done.poisoned


def test_a_call_inside_a_capture_is_refused() -> None:  # case 86
    rig = Rig()
    rig.driver.captures = True
    with pytest.raises(BadWork, match="captured into a CUDA graph"):
        rig.device.check(rig.copy(1))
    rig.driver.captures = False
    stream = rig.driver.stream()
    stream.captured = True
    for call in (
        lambda: rig.device.record(CoreStream(stream)),
        lambda: rig.device.join(CoreStream(stream), CudaFence()),
    ):
        with pytest.raises(BadWork, match="being captured"):
            call()
    rig.close()


def test_memory_that_is_not_page_locked_is_refused() -> None:
    rig = Rig()
    plain = HostPool(PAGE, 1)
    with pytest.raises(WrongDevice, match="is not page-locked"):
        rig.device.check(Copy(rig.leased(rig.gpu)[:1], plain.lease().handle))
    rig.close()


def test_streams_of_others_are_waited_for_and_made_to_wait() -> None:  # case 2
    rig = Rig()
    theirs = rig.driver.stream()
    stream = CoreStream(theirs)
    assert rig.device.owns_stream(stream)
    assert not rig.device.owns_stream(CoreStream(theirs, 1))
    rig.driver.hold(theirs)
    produced = rig.device.record(stream)
    assert isinstance(produced, CudaFence)
    assert rig.device.can_wait(produced)
    work = rig.copy(3)
    fence = rig.post(work, produced)
    later = rig.driver.stream()
    seen: list[bool] = []
    rig.device.join(CoreStream(later), fence)
    rig.driver.queue(later, lambda: seen.append(rig.same(work)))
    rig.driver.run()
    assert not seen
    assert not rig.same(work)
    rig.driver.let_go(theirs)
    assert {done.fence for done in rig.ends(2)} == {produced, fence}
    assert seen == [True]
    rig.close()


def test_an_event_stands_for_its_last_record() -> None:
    rig = Rig()
    theirs = rig.driver.stream()
    event = rig.driver.event(blocking=False)
    rig.driver.hold(theirs)
    rig.driver.record(event, theirs)
    fence = rig.device.record(CoreEvent(event))
    rig.driver.run()
    assert not rig.device.completions.items
    rig.driver.let_go(theirs)
    assert [done.fence for done in rig.ends(1)] == [fence]
    with pytest.raises(BadWork, match="cannot wait for"):
        rig.device.join(CoreEvent(event), fence)
    rig.close()


def test_an_event_that_was_never_recorded_is_refused() -> None:  # case 12
    rig = Rig()
    event = rig.driver.event(blocking=False)
    event.handle = 0
    with pytest.raises(NotPosted):
        rig.device.record(CoreEvent(event))
    rig.close()


@pytest.mark.anyio
async def test_callables_run_on_a_stream(rig: Rig) -> None:
    page = rig.leased(rig.gpu)[0]
    ran: list[Any] = []

    def broken(stream: Any) -> None:
        rig.driver.queue(stream, lambda: ran.append(stream))
        raise ValueError("half way")

    async with Engine(rig.device) as engine:
        await engine.run(Launch(ran.append, writes=(page,), on="cuda:0"), after=())
        with pytest.raises(OperationFailed, match="half way"):
            await engine.run(Launch(broken, writes=(page,), on="cuda:0"), after=())
        assert len(ran) == 2  # what had been queued has run before the failure is told


def test_a_callable_in_the_callers_stream() -> None:
    rig = Rig()
    theirs = rig.driver.stream()
    stream = CoreStream(theirs)
    order: list[str] = []

    def call(_stream: Any) -> None:
        rig.driver.queue(theirs, lambda: order.append("call"))

    rig.driver.hold(theirs)
    work = Launch(call, writes=(rig.leased(rig.gpu)[0],), on="cuda:0", stream=stream)
    rig.device.check(work)
    rig.post(work)
    assert not rig.device.completions.items
    rig.driver.let_go(theirs)
    rig.ends(1)
    assert order == ["call"]
    rig.close()


def test_work_of_the_caller_ends_where_its_stream_is() -> None:
    rig = Rig()
    theirs = rig.driver.stream()
    page = rig.leased(rig.gpu)[0]
    fence = rig.post(External(reads=(page,), on="cuda:0"))
    other = rig.post(External(reads=(page,), on="cuda:0"))
    rig.driver.hold(theirs)
    rig.device.finish(fence, CoreStream(theirs))
    rig.device.finish(other, None)
    assert [done.fence for done in rig.ends(1)] == [other]
    rig.driver.let_go(theirs)
    assert [done.fence for done in rig.ends(2)] == [other, fence]
    rig.close()


def test_leaving_with_something_in_flight_keeps_everything() -> None:
    rig = Rig()
    running = rig.device._running
    assert running is not None
    rig.driver.hold(running.out.kernels)
    rig.driver.hold(running.out.moves)
    fence = rig.post(rig.copy(2))
    rig.device.close()
    assert rig.driver.memory
    assert not any(stream.dropped for stream in rig.driver.streams)
    rig.driver.let_go(running.out.kernels)
    rig.driver.let_go(running.out.moves)
    assert [done.fence for done in rig.ends(1)] == [fence]
    rig.close()
    assert rig.device._running is None


def test_numbers_that_make_no_sense_are_refused() -> None:
    for options in ({"spin": -1}, {"multiprocessors": 0}, {"staging": 100}):
        with pytest.raises(ValueError, match="too small"):
            CudaDevice(**options)  # type: ignore[arg-type]


def test_before_the_start_and_after_the_end() -> None:
    rig = Rig(start=False)
    work = rig.copy(1)
    with pytest.raises(SubmitError, match="not started"):
        rig.device.enqueue(work, ())
    before = threading.active_count()
    rig.device.start()
    assert threading.active_count() == before + 4
    rig.close()
    with pytest.raises(SubmitError, match="not started"):
        rig.device.enqueue(work, ())
    assert threading.active_count() == before


def test_the_callers_context_is_left_alone() -> None:
    rig = Rig(ways=(Way.DMA,))
    rig.post(rig.copy(2))
    assert rig.driver.scopes == 0
    rig.driver.fail("copy", 1)
    with pytest.raises(SubmitError):
        rig.post(rig.copy(2, 10))
    assert rig.driver.scopes == 0
    rig.ends(1)
    rig.close()


def test_plans_name_the_way() -> None:
    rig = Rig()
    plan = rig.device.plan(rig.copy(8))
    assert plan.way in WAYS
    assert set(plan.others) | {plan.way} == set(WAYS)
    with pytest.raises(BadWork, match="no way to choose"):
        rig.device.plan(Launch(print, on="cuda:0"))
    with pytest.raises(BadWork, match="runs on a CudaDevice only"):
        Pipeline()()
    rig.close()


def test_two_gpus_are_kept_apart() -> None:  # case 16
    driver = FakeDriver(1)
    second = CudaDevice(1, driver=driver, kernels=FakeKernels(driver), staging=1 << 16)
    rig = Rig()
    assert not second.routes & rig.device.routes
    second.start()
    theirs = CoreStream(driver.stream(), 1)
    assert second.owns_stream(theirs)
    with pytest.raises(BadWork, match="cuda:0"):
        rig.device.record(theirs)
    second.close()
    driver.stop()
    rig.close()
