"""Streams and events of other libraries."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.transfer.gpu_kit import CoreEvent, CoreStream, FakeEvent, FakeStream

from transfer._cuda_streams import Visitor, identify, visitor
from transfer._errors import BadWork, NotPosted


def torch_stream(handle: int, ordinal: int = 0) -> Any:
    return SimpleNamespace(cuda_stream=handle, device_index=ordinal)


def torch_event(handle: int, ordinal: int | None = 0) -> Any:
    device = None if ordinal is None else SimpleNamespace(index=ordinal)
    return SimpleNamespace(cuda_event=handle, device=device)


def test_what_is_known() -> None:
    assert identify(torch_stream(7, 1)) == Visitor(1, 7, is_event=False)
    assert identify(torch_event(9)) == Visitor(0, 9, is_event=True)
    assert identify(CoreStream(FakeStream(handle=5), 2)) == Visitor(2, 5, is_event=False)
    assert identify(CoreEvent(FakeEvent(handle=6), 3)) == Visitor(3, 6, is_event=True)


@pytest.mark.parametrize("thing", [None, 7, "cuda:0", object(), SimpleNamespace(device="cuda")])
def test_what_is_not(thing: object) -> None:
    assert identify(thing) is None
    with pytest.raises(BadWork, match="expected a stream or event of cuda:0"):
        visitor(thing, 0)


def test_both_names_of_the_legacy_stream_are_one() -> None:
    assert Visitor(0, 0, is_event=False).key == Visitor(0, 1, is_event=False).key
    assert Visitor(0, 2, is_event=False).key != Visitor(0, 1, is_event=False).key
    assert Visitor(0, 2, is_event=False).key != Visitor(1, 2, is_event=False).key
    assert Visitor(0, 2, is_event=True).key is None


def test_another_gpu_is_refused() -> None:
    with pytest.raises(BadWork):
        visitor(torch_stream(7, 1), 0)


@pytest.mark.parametrize("event", [torch_event(0), torch_event(9, None)])
def test_an_event_that_was_never_recorded_is_refused(event: Any) -> None:  # case 12
    with pytest.raises(NotPosted, match="never recorded"):
        visitor(event, 0)
