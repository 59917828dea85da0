"""Streams and events of other libraries: what they are, whose they are, and their handles."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transfer._errors import BadWork, NotPosted

if TYPE_CHECKING:
    from collections.abc import Hashable


class Visitor(NamedTuple):
    """A stream or event that someone else owns.

    Attributes:
        ordinal: the GPU it belongs to; None for an event that was never recorded.
        handle: the driver's handle.
        is_event: whether it is an event.
    """

    ordinal: int | None
    handle: int
    is_event: bool

    @property
    def key(self) -> Hashable | None:
        """What identifies a stream; None for an event."""
        # 1 is another name of the legacy stream, 0.
        return None if self.is_event else (self.ordinal, 0 if self.handle == 1 else self.handle)


def identify(thing: object) -> Visitor | None:
    """What `thing` is; None for anything but a stream or an event of torch or cuda.core.

    Whatever has ``__cuda_stream__`` and a device counts as a stream of cuda.core.
    """
    if hasattr(thing, "cuda_stream"):
        return Visitor(int(thing.device_index), int(thing.cuda_stream), is_event=False)  # type: ignore[attr-defined]
    if hasattr(thing, "cuda_event"):
        device = getattr(thing, "device", None)
        index = getattr(device, "index", None)
        return Visitor(None if index is None else int(index), int(thing.cuda_event), is_event=True)
    ordinal = getattr(getattr(thing, "device", None), "device_id", None)
    if ordinal is None:
        return None
    if hasattr(thing, "__cuda_stream__"):
        return Visitor(int(ordinal), int(thing.__cuda_stream__()[1]), is_event=False)
    if hasattr(thing, "is_done") and hasattr(thing, "handle"):
        return Visitor(int(ordinal), int(thing.handle), is_event=True)
    return None


def visitor(thing: object, ordinal: int) -> Visitor:
    """The same for something that has to be a stream or a recorded event of one GPU.

    Raises:
        BadWork: it is neither, or belongs to another GPU.
        NotPosted: an event that was never recorded: waiting for it would be no wait at all.
    """
    found = identify(thing)
    if found is None or found.ordinal not in {ordinal, None}:
        raise BadWork(f"{thing!r}: expected a stream or event of cuda:{ordinal}")
    if found.is_event and (found.ordinal is None or not found.handle):
        raise NotPosted(f"{thing!r} was never recorded: nothing can be ordered behind it")
    return found
