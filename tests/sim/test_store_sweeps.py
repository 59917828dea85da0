"""Fail the Nth call, cancel the Nth await, N = 1, 2, … until nothing fires; then look at the books."""

import errno
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.tiers.store_kit import (
    LAYOUT,
    STATIC,
    Calls,
    Rig,
    fill,
    keys_of,
    poison,
    rig,
    until,
    wrong_pages,
)

from tiers import PageLayout, Placement, TierError
from transfer import (
    CompletionLost,
    HostDevice,
    Launch,
    OperationFailed,
    SubmitError,
    TransferError,
)
from transfer._fence import CompletionQueue, Fence

pytestmark = pytest.mark.anyio

LIMIT = 400  # a sweep that never runs dry is a bug of the sweep
PLACEMENTS = pytest.mark.parametrize("placement", Placement)


async def scenario(it: Rig) -> None:
    """Put, fetch, evict, remove and put again; a fault may spoil any of it, but no byte."""
    one, two = (keys_of(3, start=start, provenance=it.provenance) for start in (0, 1))
    await it.put(one, wait=False)
    await it.put(two, wait=False)
    await it.store.drain()
    await it.get(one)
    it.store.evict(1)
    await it.get(two)
    it.store.remove(two)
    await it.store.drain()
    await it.put(two, wait=False)
    await it.store.drain()
    await it.get(one)
    await it.get(two)


async def settle(it: Rig) -> None:
    """The fault is over: everything is tried again, and the store works."""
    it.calls.fail = None
    await it.store.drain()  # what was under way may still meet the fault
    it.store._core.removals.retry()
    await it.store.drain()
    it.check()
    fresh = keys_of(2, start=99, provenance=it.provenance)
    with anyio.fail_after(30):
        while it.store.health().degraded:
            await it.put(fresh, wait=False)
            await it.store.drain()
            await anyio.sleep(0.01)
        await it.put(fresh)
        assert await it.get(fresh) == 2


@PLACEMENTS
@pytest.mark.parametrize(
    ("error", "layout"),
    [(errno.EIO, LAYOUT), (errno.ENOSPC, LAYOUT), (errno.EIO, STATIC)],
    ids=["EIO", "ENOSPC", "static scales"],
)
async def test_fail_the_nth_file_call(
    tmp_path: Path, placement: Placement, error: int, layout: PageLayout
) -> None:
    for number in range(1, LIMIT):
        calls, root = Calls(), tmp_path / str(number)
        async with rig(root, placement=placement, layout=layout, calls=calls) as it:
            calls.nth(number, error)
            await scenario(it)
            await settle(it)
        if not calls.fired:
            return
    pytest.fail("the sweep never ran dry")


def unheld(it: Rig) -> bool:
    """Whether no operation holds a block, lost ones included."""
    return not any(sum(pool.counts()[2:]) for pool in (it.pool, *it.store.pools()))


class Flaky:
    """A host device whose Nth work is refused, fails, or is lost.

    Attributes:
        fired: whether it was.
    """

    ordered = False

    def __init__(self, how: str, number: int) -> None:
        self._inner = HostDevice(threads=2)
        self.name = self._inner.name
        self.routes = self._inner.routes
        self.completions: CompletionQueue = self._inner.completions
        self.how = how
        self.left = number
        self.fired = False
        self.armed = True
        self.late: list[Fence] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def enqueue(self, work: Any, waits: Sequence[Fence]) -> Fence:
        own = isinstance(work, Launch) and getattr(work.fn, "__name__", "") in {"open", "close"}
        own = own or type(getattr(work, "fn", None)).__name__ == "_Step"
        self.left -= not own
        if self.left or self.fired or not self.armed:
            return self._inner.enqueue(work, waits)
        self.fired = True
        if self.how == "refuse":
            raise SubmitError("refused as told")
        fence = Fence()
        if self.how == "fail":
            self.completions.post(fence, OSError(errno.EIO, "failed as told"))
            return fence
        self.late.append(fence)
        raise CompletionLost("lost as told", fence=fence)

    def prove(self) -> None:
        """What was lost turns out to be quiet."""
        for fence in self.late:
            self.completions.post(fence)
        self.late = []


@PLACEMENTS
@pytest.mark.parametrize("how", ["refuse", "fail", "lose"])
async def test_fail_the_nth_host_call(tmp_path: Path, placement: Placement, how: str) -> None:
    for number in range(1, LIMIT):
        device = Flaky(how, number)
        root = tmp_path / str(number)
        async with rig(root, placement=placement, host_device=device) as it:
            with anyio.move_on_after(30) as scope:
                await tolerant(scenario, it)
            assert not scope.cancelled_caught
            device.armed = False
            device.prove()
            await until(partial(unheld, it))
            await settle(it)
        if not device.fired:
            return
    pytest.fail("the sweep never ran dry")


async def tolerant(call: Callable[[Rig], Awaitable[None]], it: Rig) -> None:
    """Errors that a device's fault may raise are no fault of the store."""
    try:
        await call(it)
    except (SubmitError, OperationFailed, CompletionLost):
        await it.store.drain()


class Step:
    """Runs a coroutine and cancels a scope when it waits for the Nth time.

    Attributes:
        waits: how often it has waited.
    """

    def __init__(
        self, call: Coroutine[Any, Any, object], number: int, scope: anyio.CancelScope
    ) -> None:
        self._call = call
        self._number = number
        self._scope = scope
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, object]:
        give = self._call.send
        value: Any = None
        while True:
            try:
                wanted = give(value)
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self._number:
                self._scope.cancel()
            try:
                value = yield wanted
                give = self._call.send
            except BaseException as error:  # noqa: BLE001 - passed on to the coroutine
                value = error
                give = self._call.throw


async def cancelled_at(number: int, call: Coroutine[Any, Any, object]) -> bool:
    """Run `call` and cancel it at its Nth wait; whether it came that far."""
    with anyio.CancelScope() as scope:
        step = Step(call, number, scope)
        await step
    return step.waits >= number


async def put_once(it: Rig) -> None:
    keys = keys_of(6, start=5)
    with it.lease(6) as pages:
        fill(pages, keys)
        await it.store.put(keys, pages)
        poison(pages)


async def put_and_wait(it: Rig) -> None:
    await (await it.put(keys_of(4, start=6), wait=False)).resident()


async def fetch_once(it: Rig) -> None:
    await it.get(keys_of(3))


async def evict_and_drain(it: Rig) -> None:
    it.store.evict(2)
    await it.store.drain()


async def verify_once(it: Rig) -> None:
    await it.store.verify()


@PLACEMENTS
@pytest.mark.parametrize("verb", [put_once, put_and_wait, fetch_once, evict_and_drain, verify_once])
async def test_cancel_the_nth_await(
    tmp_path: Path, placement: Placement, verb: Callable[[Rig], Coroutine[Any, Any, None]]
) -> None:
    # case 67 (cancel at every await), case 44 (nothing leaks on abort)
    for number in range(1, LIMIT):
        root = tmp_path / str(number)
        # So small that a put has to wait for the write-behind, and a fetch for its stages.
        async with rig(root, placement=placement, write_behind_bytes=1, read_bytes=1) as it:
            await it.put(keys_of(3))
            came = await cancelled_at(number, verb(it))
            await it.store.drain()
            it.check()
            assert await it.get(keys_of(3)) == it.store.match(keys_of(3))
            await settle(it)
        if not came:
            return
    pytest.fail("the sweep never ran dry")


@PLACEMENTS
async def test_cancel_the_nth_await_of_closing(tmp_path: Path, placement: Placement) -> None:
    for number in range(1, LIMIT):
        async with rig(tmp_path / str(number), placement=placement) as it:
            await it.put(keys_of(6), wait=False)
            came = await cancelled_at(number, it.store.aclose())
            # Whatever struck: it is closed, and nothing of it runs.
            assert not it.store._core.busy
            assert it.engine.holders() == []
        async with rig(tmp_path / str(number), placement=placement):
            pass  # nobody has the folder any more
        if not came:
            return
    pytest.fail("the sweep never ran dry")


@PLACEMENTS
async def test_cancel_the_nth_await_of_starting(tmp_path: Path, placement: Placement) -> None:
    for number in range(1, LIMIT):
        root = tmp_path / str(number)
        async with rig(root, placement=placement) as it:
            if placement is Placement.WHOLE_HOST:
                return
            await it.store.aclose()
            assert it.store._disk is not None
            it.store._core.closing = False
            came = await cancelled_at(number, it.store.start())
            it.store._started = True
            await it.store.drain()
            await it.store.aclose()
        async with rig(root, placement=placement) as again:  # nobody has the folder any more
            await again.put(keys_of(1))
        if not came:
            return
    pytest.fail("the sweep never ran dry")


async def test_a_sweep_sees_what_it_is_for(tmp_path: Path) -> None:
    """A control: damage on the way is seen by the check of bytes."""
    keys = keys_of(2)
    async with rig(tmp_path) as it:
        await it.put(keys)
        with it.store.lookup(keys) as hit, it.lease(2) as pages:
            assert await it.store.fetch(hit, into=pages) == 2
            assert wrong_pages(pages, keys, 2) == []
            view = pages[1].view(write=True)
            view[0] ^= 1
            assert wrong_pages(pages, keys, 2) == [1]
        assert issubclass(TierError, TransferError)
