"""Counters equal a scripted run; whatever a trace hook does, no result changes."""

import anyio
import pytest
from tests.transfer.gates import LAYOUT, HandDevice, hand_launch, host_engine, turns

from transfer import (
    CompletionLost,
    Copy,
    DeviceStatistics,
    Engine,
    Event,
    HostDevice,
    HostPool,
    Launch,
    OperationCancelled,
    OperationFailed,
    State,
    SubmitError,
    Transition,
)

pytestmark = pytest.mark.anyio


def refuse() -> None:
    raise SubmitError("queue full")


async def test_counters_equal_the_script() -> None:
    # case 77 - known ends, 3 complete, 2 fail, 2 are cancelled, 1 is lost, 1 of them proven later
    device = HandDevice()
    with HostPool(LAYOUT, 2) as pool, pool.lease() as block:
        async with Engine(device) as engine:
            for _ in range(3):
                op = engine.submit_nowait(Launch(lambda: None, on="hand", nbytes=100))
                device.signal()
                await op.wait()
            op = engine.submit_nowait(Launch(lambda: None, on="hand", nbytes=7))
            device.signal(-1, OSError(5, "broken"))
            with pytest.raises(OperationFailed):
                await op.wait()
            device.on_enqueue = refuse
            with pytest.raises(SubmitError):
                engine.submit_nowait(hand_launch())
            device.on_enqueue = lambda: None
            op = engine.submit_nowait(hand_launch())
            behind = engine.submit_nowait(Launch(lambda: None, on="hand", nbytes=5), after=op)
            now = engine.statistics().devices["hand"]
            assert (now.prepared, now.in_flight, now.in_flight_bytes) == (1, 1, 5)
            behind.cancel()
            op.cancel()
            now = engine.statistics().devices["hand"]
            assert (now.prepared, now.in_flight, now.abandoned) == (0, 1, 1)
            device.signal()
            with pytest.raises(OperationCancelled):
                await op.wait()
            op = engine.submit_nowait(hand_launch(writes=[block]))
            device.signal(-1, TimeoutError("gone"), lost=True)
            with pytest.raises(CompletionLost):
                await op.wait()
            now = engine.statistics().devices["hand"]
            assert (now.quarantined, now.quarantined_bytes) == (1, 4096)
            device.signal()
            device.signal()  # a stray
            await turns()
            final = engine.statistics()
    assert final.devices["hand"] == DeviceStatistics(
        submitted=8,
        completed=3,
        failed=3,
        cancelled=2,
        losses=1,
        bytes_moved=300,
        prepared=0,
        in_flight=0,
        abandoned=0,
        in_flight_bytes=0,
        quarantined=0,
        quarantined_bytes=0,
        poisoned=None,
    )
    assert (final.stray_completions, final.trace_errors, final.double_releases) == (1, 0, 0)


async def test_a_snapshot_is_frozen() -> None:
    device = HandDevice()
    async with Engine(device) as engine:
        before = engine.statistics()
        op = engine.submit_nowait(hand_launch())
        assert before.devices["hand"].submitted == 0
        with pytest.raises(AttributeError):
            before.stray_completions = 3  # type: ignore[misc]
        device.signal()
        await op.wait()


async def test_a_trace_hook_sees_every_step() -> None:
    steps: list[Transition] = []
    device = HandDevice()
    async with Engine(device, trace=steps.append) as engine:
        op = engine.submit_nowait(hand_launch(), name="load")
        op.cancel()
        device.signal()
        with pytest.raises(OperationCancelled):
            await op.wait()
    assert steps == [
        Transition(1, "load", "hand", State.PREPARED, Event.SUBMIT, State.IN_FLIGHT),
        Transition(1, "load", "hand", State.IN_FLIGHT, Event.CANCEL, State.ABANDONED),
        Transition(1, "load", "hand", State.ABANDONED, Event.COMPLETE, State.CANCELLED),
    ]


async def test_a_raising_trace_hook_changes_no_result(caplog: pytest.LogCaptureFixture) -> None:
    # case 77
    def hook(step: Transition) -> None:
        raise ValueError(f"negative increment at {step.event}")

    with HostPool(LAYOUT, 2) as pool, pool.lease() as a, pool.lease() as b:
        a.view(write=True)[:4] = b"mine"
        async with Engine(HostDevice(threads=1), trace=hook) as engine:
            await engine.copy(a, b)
            for _ in range(50):
                op = engine.submit_nowait(Copy(b, a))
                await op.wait()
            with anyio.move_on_after(0):
                await engine.copy(a, b)
        assert bytes(b.view()[:4]) == b"mine"
        assert engine.statistics().trace_errors == 102
        assert engine.statistics().devices["host"].completed == 51
    assert len(caplog.records) == 1  # the first in full, the rest is counted
    assert "trace hook" in caplog.text


async def test_ages_are_known() -> None:
    async with host_engine() as engine:
        before = anyio.current_time()
        op = engine.submit_nowait(Launch(lambda: None))
        await op.wait()
        assert before <= op.since <= anyio.current_time()
