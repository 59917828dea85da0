"""check_device: what every device must do, whoever wrote it.

The suite talks to a device as an engine does, without one: it posts work, and looks at what comes
back through `completions`. It runs on any loop, or none, and starts the device as an engine would.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from transfer._errors import BadWork, SubmitError
from transfer._fence import Fence
from transfer._work import Copy, Launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._device import Device
    from transfer._fence import Completion
    from transfer._work import Work

_LONG: Final = 20.0  # seconds, after which a completion that has not come is missed
_MANY: Final = 64


class DeviceFault(AssertionError):
    """A device broke its contract; the message names the check and what was found."""


@dataclass(frozen=True)
class Subject:
    """A device to check, and what to give it.

    Attributes:
        make: makes a fresh device that is not started.
        work: makes the nth piece of work that succeeds; no two touch the same blocks.
        done: whether the nth piece has had its effect.
        failing: makes a piece of work that fails on the device, not in `check`.
        empty: makes a piece of work of zero bytes.
        wrong: makes work of another device, which `check` must refuse.
        pump: lets a device that does not run by itself go on; called while waiting.
        threads: whether it has threads of its own, which must be named and end.
    """

    make: Callable[[], Device]
    work: Callable[[int], Work]
    done: Callable[[int], bool]
    failing: Callable[[], Work] | None = None
    empty: Callable[[], Work] | None = None
    wrong: Callable[[], Work] | None = None
    pump: Callable[[Device], object] | None = None
    threads: bool = True


@final
@dataclass
class _Bench:
    """A started device, and everything that it has reported."""

    subject: Subject
    device: Device
    seen: list[Completion] = field(default_factory=list)
    rings: int = 0

    def __post_init__(self) -> None:
        self._rung = threading.Event()
        self.device.completions.wake = self._wake

    def _wake(self) -> None:
        self.rings += 1
        self._rung.set()

    def look(self) -> None:
        """Take what is there."""
        self._rung.clear()
        queue = self.device.completions
        queue.open()
        while queue.items:
            self.seen.append(queue.items.popleft())

    def wait(self, count: int) -> None:
        """Wait until so many completions have come."""
        end = time.monotonic() + _LONG
        self.look()
        while len(self.seen) < count:
            if self.subject.pump is not None:
                self.subject.pump(self.device)
            elif not self._rung.wait(min(_LONG, 1.0)) and time.monotonic() > end:
                break
            self.look()
            if time.monotonic() > end:
                break
        _expect(len(self.seen) >= count, f"{count} completions expected, {len(self.seen)} came")

    def settle(self) -> None:
        """Give a completion that must not come the time to come."""
        for _ in range(20):
            if self.subject.pump is not None:
                self.subject.pump(self.device)
            time.sleep(0.001)
            self.look()


def _expect(holds: bool, message: str) -> None:  # noqa: FBT001 - an assertion
    if not holds:
        raise DeviceFault(message)


def check_device(subject: Subject) -> list[str]:
    """Run every check that applies.

    Returns:
        The names of the checks that were run.

    Raises:
        DeviceFault: a check failed.
    """
    names = []
    for check in _CHECKS:
        name = check.__name__.removeprefix("_").replace("_", " ")
        bench = _Bench(subject, subject.make())
        try:
            applies = check(bench)
        except DeviceFault as fault:
            raise DeviceFault(f"{bench.device.name}: {name}: {fault}") from None
        finally:
            bench.device.close()
        if applies:
            names.append(name)
    return names


def _refuses_before_start(bench: _Bench) -> bool:
    """A device that is not started refuses, and has posted nothing."""
    try:
        bench.device.enqueue(bench.subject.work(0), ())
    except SubmitError:
        bench.settle()
        _expect(not bench.seen, "it refused, and reported a completion all the same")
        _expect(not bench.subject.done(0), "it refused, and did the work all the same")
        return True
    raise DeviceFault("work was accepted before start()")


def _starts_and_closes_again(bench: _Bench) -> bool:
    """It may be started again after it was closed, and closed twice."""
    for number in range(2):
        bench.device.start()
        bench.device.enqueue(bench.subject.work(number), ())
        bench.wait(number + 1)
        bench.device.close()
        bench.device.close()
    return True


def _signals_each_fence_once_when_it_is_done(bench: _Bench) -> bool:
    """Each fence signals once, without an error, after the last byte."""
    bench.device.start()
    fences = [bench.device.enqueue(bench.subject.work(n), ()) for n in range(_MANY)]
    _expect(len({id(fence) for fence in fences}) == _MANY, "a fence was given out twice")
    _expect(all(isinstance(fence, Fence) for fence in fences), "enqueue did not return a Fence")
    bench.wait(_MANY)
    bench.settle()
    found = [completion.fence for completion in bench.seen]
    _expect(len(found) == _MANY, f"{_MANY} fences, {len(found)} completions")
    _expect(set(found) == set(fences), "a completion is for no fence that was given out")
    _expect(all(c.error is None and not c.lost for c in bench.seen), "work failed that must not")
    undone = [n for n in range(_MANY) if not bench.subject.done(n)]
    _expect(not undone, f"signaled, but not done: {undone[:8]}")
    return True


def _is_done_at_the_signal(bench: _Bench) -> bool:
    """The work of a fence has had its effect when the completion is seen."""
    bench.device.start()
    for number in range(8):
        bench.device.enqueue(bench.subject.work(number), ())
        bench.wait(number + 1)
        _expect(bench.subject.done(number), f"piece {number} is signaled, and not done")
    return True


def _reports_an_error_once_and_goes_on(bench: _Bench) -> bool:
    """An error is reported at the fence, once; the device is fit for more."""
    if bench.subject.failing is None:
        return False
    bench.device.start()
    fence = bench.device.enqueue(bench.subject.failing(), ())
    bench.wait(1)
    (failed,) = bench.seen
    _expect(failed.fence is fence, "the error is reported at another fence")
    _expect(failed.error is not None, "work that must fail is reported as done")
    _expect(not failed.lost, "an error of a device that is quiet is reported as a loss")
    bench.device.enqueue(bench.subject.work(0), ())
    bench.wait(2)
    _expect(bench.seen[1].error is None, "the next piece of work failed too")
    return True


def _completes_zero_bytes(bench: _Bench) -> bool:
    """Nothing to do is done."""
    if bench.subject.empty is None:
        return False
    bench.device.start()
    work = bench.subject.empty()
    _expect(work.nbytes == 0, f"the empty work has {work.nbytes} bytes")
    bench.device.check(work)
    bench.device.enqueue(work, ())
    bench.wait(1)
    _expect(bench.seen[0].error is None, "work of zero bytes failed")
    return True


def _refuses_other_devices_work(bench: _Bench) -> bool:
    """`check` refuses what is another device's, before anything is taken."""
    bench.device.check(bench.subject.work(0))
    if bench.subject.wrong is None:
        return False
    work = bench.subject.wrong()
    _expect(work.route not in bench.device.routes, "the wrong work is one of its routes")
    try:
        bench.device.check(work)
    except BadWork:
        return True
    raise DeviceFault(f"check() let {work!r} pass")


def _ends_posted_work_after_close(bench: _Bench) -> bool:
    """Closing does not wait, and does not lose: what is posted still signals."""
    bench.device.start()
    fences = {bench.device.enqueue(bench.subject.work(n), ()) for n in range(8)}
    bench.device.close()
    try:
        bench.device.enqueue(bench.subject.work(8), ())
    except SubmitError:
        bench.wait(8)
        _expect({c.fence for c in bench.seen} == fences, "posted work was lost by close()")
        return True
    raise DeviceFault("work was accepted after close()")


def _rings_once_for_many(bench: _Bench) -> bool:
    """Until the loop looks, one wake-up is enough; and an idle device makes none."""
    bench.device.start()
    for number in range(_MANY):
        bench.device.enqueue(bench.subject.work(number), ())
    end = time.monotonic() + _LONG
    queue = bench.device.completions
    while len(queue.items) < _MANY and time.monotonic() < end:
        if bench.subject.pump is not None:
            bench.subject.pump(bench.device)
        else:
            time.sleep(0.001)
    _expect(bench.rings == 1, f"{_MANY} completions nobody looked at rang {bench.rings} times")
    bench.wait(_MANY)
    before = bench.rings
    time.sleep(0.02)
    _expect(bench.rings == before, "an idle device rang")
    return True


def _knows_its_own_fences_only(bench: _Bench) -> bool:
    """Nobody can wait for a fence of nobody; nothing but streams is a stream."""
    _expect(not bench.device.can_wait(Fence()), "it claims to wait for a fence of nobody")
    _expect(not bench.device.owns_stream(object()), "it takes any object for a stream")
    return True


def _waits_for_what_it_says_it_can(bench: _Bench) -> bool:
    """Work behind a fence that `can_wait` accepts ends after it."""
    bench.device.start()
    first = bench.device.enqueue(bench.subject.work(0), ())
    if not bench.device.can_wait(first):
        bench.wait(1)
        return False
    second = bench.device.enqueue(bench.subject.work(1), (first,))
    bench.wait(2)
    order = [completion.fence for completion in bench.seen]
    _expect(order.index(first) < order.index(second), "work ended before what it was put behind")
    return True


def _names_and_ends_its_threads(bench: _Bench) -> bool:
    """Threads are daemons with a name of ours, are there while started, and end when closed."""
    if not bench.subject.threads:
        return False
    before = set(threading.enumerate())
    bench.device.start()
    ours = set(threading.enumerate()) - before
    _expect(bool(ours), "no thread was started")
    for thread in ours:
        _expect(thread.name.startswith("kvhold-"), f"a thread is called {thread.name!r}")
        _expect(thread.daemon, f"{thread.name} is no daemon and would keep a program from ending")
    bench.device.enqueue(bench.subject.work(0), ())
    bench.wait(1)
    bench.device.close()
    end = time.monotonic() + _LONG
    while ours & set(threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.001)
    _expect(not ours & set(threading.enumerate()), "threads are left after close()")
    return True


def _serves_the_routes_it_names(bench: _Bench) -> bool:
    """Routes are there, and name descriptors and kinds of memory."""
    routes = bench.device.routes
    _expect(bool(routes), "it serves nothing")
    _expect(bench.subject.work(0).route in routes, "it does not serve the work it was given")
    for route in routes:
        _expect(isinstance(route[0], type), f"{route} does not begin with a type")
        copies = route[0] is Copy and len(route) != 3
        _expect(not copies and not (route[0] is Launch and len(route) != 2), f"{route} is no route")
    return True


_CHECKS: Final[tuple[Callable[[_Bench], bool], ...]] = (
    _serves_the_routes_it_names,
    _refuses_before_start,
    _starts_and_closes_again,
    _signals_each_fence_once_when_it_is_done,
    _is_done_at_the_signal,
    _reports_an_error_once_and_goes_on,
    _completes_zero_bytes,
    _refuses_other_devices_work,
    _ends_posted_work_after_close,
    _rings_once_for_many,
    _knows_its_own_fences_only,
    _waits_for_what_it_says_it_can,
    _names_and_ends_its_threads,
)
