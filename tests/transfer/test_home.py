"""The process, thread and loop that an engine lives in."""

import anyio
import anyio.to_thread
import pytest

from transfer import EngineClosed, ForkDetected, WrongThread
from transfer._home import Home


@pytest.mark.anyio
async def test_bound_checked_and_left() -> None:
    home = Home("mine")
    with pytest.raises(EngineClosed, match="mine is not started"):
        home.check()
    loop = home.bind()
    assert home.ours
    assert home.check() is loop
    with pytest.raises(EngineClosed, match="mine is already started; expected it closed"):
        home.bind()
    with pytest.raises(WrongThread, match="mine belongs to another thread's loop"):
        await anyio.to_thread.run_sync(home.check)
    home.loop = None
    home.warn_unclosed()  # it was closed
    home.bind()


def test_no_loop() -> None:
    home = Home("mine")
    with pytest.raises(RuntimeError):
        home.bind()
    assert home.loop is None


@pytest.mark.anyio
async def test_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home("mine")
    home.check_process()
    home.bind()
    home.check_process()
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert not home.ours
    for call in (home.check, home.check_process, home.bind):
        with pytest.raises(ForkDetected, match="this is 1: its threads did not survive the fork"):
            call()
    home.warn_unclosed()  # the parent's business


@pytest.mark.anyio
async def test_the_missing_close_is_named() -> None:
    home = Home("mine")
    home.warn_unclosed()
    home.bind()
    with pytest.warns(ResourceWarning, match="mine was never closed: leave `async with`"):
        home.warn_unclosed()


def test_a_loop_that_is_gone() -> None:
    home = Home("mine")

    async def main() -> None:
        home.bind()

    anyio.run(main)

    async def later() -> None:
        with pytest.raises(WrongThread, match="or to a loop that is gone"):
            home.check()

    anyio.run(later)
    assert home.loop is not None
    assert home.loop.gone()
