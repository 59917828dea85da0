"""A device on a driver that costs nothing ends its work at once and counts what it queues."""

import time

import pytest

from kvhold.bench.cuda_free import free_device, free_pools
from kvhold.bench.gpu_rig import page_layout
from transfer import Copy
from transfer.cuda import Way


@pytest.mark.parametrize(("way", "commands"), [(Way.MAPPED, 4), (Way.BATCH, 2)])
def test_work_ends_at_once_and_its_commands_are_counted(way: Way, commands: int) -> None:
    device, driver = free_device(ways=(way,))
    pages, slots = free_pools(page_layout(2), 6)
    device.start()
    before = time.perf_counter()
    fence = device.enqueue(Copy(pages.lease(6).handle, slots.lease(6).handle), ())
    assert driver.calls == commands
    assert before < driver.first < time.perf_counter()
    end = time.monotonic() + 10
    while not device.completions.items:
        assert time.monotonic() < end
        time.sleep(0)
    assert device.completions.items.popleft().fence is fence
    driver.reset()
    assert (driver.calls, driver.first) == (0, 0.0)
    device.close()
    assert device._running is None
