"""Callbacks from any thread onto a loop, and what is left when the loop is gone."""

import asyncio
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest
import trio
from tests.transfer.gates import turns

from transfer._loop import AsyncioLoop, Loop, TrioLoop, current_loop

BACKENDS = pytest.mark.parametrize(
    ("backend", "options"),
    [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})],
    ids=["asyncio", "uvloop", "trio"],
)


@pytest.mark.anyio
async def test_callbacks_run_on_the_loop_from_any_thread() -> None:
    loop = current_loop()
    here = threading.get_ident()
    seen: list[int] = []
    done = anyio.Event()

    def note() -> None:
        seen.append(threading.get_ident())
        if len(seen) == 2:
            done.set()

    loop.post(note)
    assert seen == []  # soon, not at once
    await anyio.to_thread.run_sync(loop.post, note)
    await done.wait()
    assert seen == [here, here]


@pytest.mark.anyio
async def test_here_is_this_loop_on_this_thread() -> None:
    loop = current_loop()
    assert loop.here()
    assert not loop.gone()
    assert not await anyio.to_thread.run_sync(loop.here)

    async def other() -> bool:
        return loop.here()

    assert not await anyio.to_thread.run_sync(lambda: anyio.run(other))
    assert not await anyio.to_thread.run_sync(lambda: anyio.run(other, backend="trio"))
    await turns(1)
    assert loop.here()


@pytest.mark.anyio
async def test_the_clock_is_the_loops() -> None:
    before = anyio.current_time()
    assert before <= current_loop().time() <= anyio.current_time()


@BACKENDS
def test_a_loop_that_is_gone(backend: str, options: dict[str, Any]) -> None:
    async def main() -> Loop:
        return current_loop()

    loop = anyio.run(main, backend=backend, backend_options=options)
    assert loop.gone()
    assert not loop.here()
    ran: list[int] = []
    loop.post(lambda: ran.append(1))
    thread = threading.Thread(target=loop.post, args=(lambda: ran.append(2),))
    thread.start()
    thread.join()
    assert ran == []

    async def next_one() -> bool:
        return loop.here()

    assert not anyio.run(next_one, backend=backend, backend_options=options)


def test_a_loop_that_is_stopped_takes_callbacks_for_later() -> None:
    made = asyncio.new_event_loop()

    async def main() -> AsyncioLoop:
        return AsyncioLoop()

    loop = made.run_until_complete(main())
    assert loop.gone()
    ran: list[int] = []
    loop.post(lambda: ran.append(1))
    made.run_until_complete(asyncio.sleep(0))
    assert ran == [1]
    made.close()


def test_trio_runs_on_its_own_clock() -> None:
    clock = trio.testing.MockClock()

    async def main() -> None:
        loop = TrioLoop()
        before = loop.time()
        clock.jump(5)
        assert loop.time() == before + 5

    trio.run(main, clock=clock)


def test_no_loop() -> None:
    with pytest.raises(RuntimeError):
        current_loop()
