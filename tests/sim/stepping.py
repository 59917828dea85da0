"""Run a coroutine and act on it at its Nth stop, on any loop."""

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


@types.coroutine
def at_stop(
    inner: Coroutine[Any, Any, None], number: int, act: Callable[[], None]
) -> Generator[Any, Any, bool]:
    """Await `inner`, and call `act` when it stops for the Nth time; whether it did stop so often.

    What the coroutine gives to its loop goes through unchanged, so this works on every loop.
    """
    stops = 0
    resume: Callable[[], Any] = lambda: inner.send(None)  # noqa: E731 - replaced below
    while True:
        try:
            trap = resume()
        except StopIteration:
            return stops >= number
        stops += 1
        if stops == number:
            act()
        try:
            value = yield trap
        except BaseException as error:  # noqa: BLE001 - passed on
            resume = _throwing(inner, error)
        else:
            resume = _sending(inner, value)


def _sending(inner: Coroutine[Any, Any, None], value: Any) -> Callable[[], Any]:
    return lambda: inner.send(value)


def _throwing(inner: Coroutine[Any, Any, None], error: BaseException) -> Callable[[], Any]:
    return lambda: inner.throw(error)
