"""What a started device takes, and gives back."""

from tests.transfer.cuda_rig import Rig
from tests.transfer.gpu_kit import CoreEvent

from transfer._cuda_running import HELPERS


def test_everything_is_given_back() -> None:
    rig = Rig()
    event = rig.driver.event(blocking=False)
    theirs = rig.driver.stream()
    rig.driver.record(event, theirs)
    rig.driver.run()
    for _ in range(3 * HELPERS):
        rig.device.record(CoreEvent(event))
    rig.ends(3 * HELPERS)
    streams = len(rig.driver.streams)
    assert streams == 6 + 1 + HELPERS
    rig.close()
    assert sum(stream.dropped for stream in rig.driver.streams) == streams - 1
    assert rig.driver.opened == 0
    assert not rig.driver.memory
    assert [found.dropped for found in rig.driver.events].count(False) == 1  # the caller's own


def test_nothing_is_given_back_while_a_fence_is_open() -> None:
    rig = Rig()
    running = rig.device._running
    assert running is not None
    fence = rig.post(rig.copy(4))
    assert not running.stop()
    assert rig.driver.memory
    assert rig.ends(1)[0].fence is fence
    assert running.stop()
    assert not rig.driver.memory
    rig.driver.stop()


def test_nothing_is_given_back_of_a_lost_context() -> None:
    rig = Rig()
    running = rig.device._running
    assert running is not None
    rig.post(rig.copy(4))
    rig.driver.lose_context()
    assert rig.ends(1)[0].poisoned
    rig.device.close()
    assert rig.device._running is running
    assert rig.driver.memory
