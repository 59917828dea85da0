"""Completions reach the ledger: in order, in batches, after interrupts, and without a loop."""

import gc
import threading
import weakref

import pytest
from tests.transfer.gates import PATIENCE, HandDevice, hand_launch, turns

from transfer import Engine
from transfer._fence import Completion, Fence
from transfer._lane import Lane
from transfer._loop import current_loop
from transfer._reaper import REAP_AT_ONCE, Reaper


class Log:
    """Stands for the ledger; notes what it is given."""

    def __init__(self) -> None:
        self.seen: list[Completion] = []
        self.strikes: list[BaseException] = []

    def complete(self, completion: Completion) -> None:
        """Note it, or be struck."""
        if self.strikes:
            raise self.strikes.pop()
        self.seen.append(completion)


def make(devices: int = 1) -> tuple[Reaper, Log, list[HandDevice]]:
    made = [HandDevice(f"hand {number}") for number in range(devices)]
    log = Log()
    reaper = Reaper([Lane(device) for device in made], log)  # type: ignore[arg-type]
    return reaper, log, made


@pytest.mark.anyio
async def test_one_callback_takes_many_and_leaves_the_rest_to_the_next() -> None:
    reaper, log, (device,) = make()
    fences = [Fence() for _ in range(3 * REAP_AT_ONCE)]
    for fence in fences[:5]:
        device.completions.post(fence)
    reaper.attach(current_loop())
    for fence in fences[5:]:
        device.completions.post(fence)
    assert log.seen == []
    counts = []
    while len(log.seen) < len(fences):
        await turns(1)
        counts.append(len(log.seen))
    assert max(counts) == len(fences)
    # Trio may run two callbacks between two looks, in an order that it draws.
    assert any(0 < count < len(fences) for count in counts)
    assert all(count % REAP_AT_ONCE == 0 for count in counts)
    assert [completion.fence for completion in log.seen] == fences
    reaper.detach()
    device.completions.post(Fence())
    await turns()
    assert len(device.completions.items) == 1  # kept for a later look


@pytest.mark.anyio
async def test_what_waits_is_taken_when_it_attaches_again() -> None:
    reaper, log, (device,) = make()
    for _ in range(3):
        reaper.attach(current_loop())
        device.completions.post(Fence())
        await turns()
        reaper.detach()
        device.completions.post(Fence())  # rings into nothing, once
        device.completions.post(Fence())
        await turns()
    assert len(log.seen) == 7
    reaper.attach(current_loop())
    await turns()
    assert len(log.seen) == 9


@pytest.mark.anyio
async def test_after_an_interrupt_the_rest_is_rung_for() -> None:
    reaper, log, (device,) = make()
    reaper.attach(current_loop())
    fences = [Fence() for _ in range(3)]
    device.completions.post(fences[0])
    await turns()
    log.strikes.append(KeyboardInterrupt())
    for fence in fences[1:]:
        device.completions.items.append(Completion(fence))
    with pytest.raises(KeyboardInterrupt):
        reaper.reap()
    await turns()
    assert [completion.fence for completion in log.seen] == fences


@pytest.mark.anyio
async def test_every_device_is_served_in_one_callback() -> None:
    reaper, log, (first, second) = make(2)
    for _ in range(5 * REAP_AT_ONCE):
        first.completions.items.append(Completion(Fence()))
    late = Fence()
    second.completions.items.append(Completion(late))
    reaper.reap(limit=REAP_AT_ONCE)
    assert len(log.seen) == REAP_AT_ONCE + 1
    assert log.seen[-1].fence is late
    reaper.reap()
    assert len(log.seen) == 5 * REAP_AT_ONCE + 1


@pytest.mark.anyio
async def test_the_queue_does_not_keep_the_engine() -> None:
    device = HandDevice()
    engine = Engine(device)
    async with engine:
        await turns(1)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    device.completions.post(Fence())  # nobody is there, and nothing is raised
    assert len(device.completions.items) == 1


def test_waiting_without_a_loop_ends_with_the_proof() -> None:
    reaper, log, (device,) = make()
    fence = Fence()

    def prove() -> None:
        device.completions.post(fence)

    thread = threading.Thread(target=prove)
    thread.start()
    reaper.wait_sync(lambda: not log.seen, PATIENCE)
    thread.join()
    assert [completion.fence for completion in log.seen] == [fence]


def test_waiting_without_a_loop_ends_at_the_deadline() -> None:
    reaper, log, (device,) = make()
    reaper.wait_sync(lambda: True, 0)
    reaper.wait_sync(lambda: True, 0.01)
    reaper.wait_sync(lambda: False, PATIENCE)
    assert log.seen == []
    assert device.completions.wake is not None


@pytest.mark.anyio
async def test_a_completion_seen_twice_is_a_stray() -> None:
    device = HandDevice()
    async with Engine(device) as engine:
        op = engine.submit_nowait(hand_launch())
        device.signal(0)
        device.signal(0)
        device.completions.post(Fence())
        await op.wait()
        await turns()
        assert engine.statistics().stray_completions == 2
