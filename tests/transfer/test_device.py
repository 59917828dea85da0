"""What a device without streams answers, and that the hand-driven one is a device."""

import pytest
from tests.transfer.kit import HandDevice

from transfer._device import Device, PlainDevice
from transfer._fence import Fence


def test_worker_threads_never_wait_and_have_no_streams() -> None:
    device = PlainDevice()
    assert device.ordered is False
    assert device.can_wait(Fence()) is False
    assert device.owns_stream("stream") is False
    for ask in (device.stream_key, device.record, lambda s: device.join(s, Fence())):
        with pytest.raises(TypeError, match=r"has no streams.*got 'stream'"):
            ask("stream")


def test_the_hand_driven_device_is_a_device() -> None:
    device: Device = HandDevice("mine")
    assert device.name == "mine"
    device.start()
    device.close()
