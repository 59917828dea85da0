"""Small copies that are over within the call: the same checks, and the long way where it matters."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from transfer import (
    BlockLayout,
    Copy,
    Engine,
    HoldConflict,
    HostDevice,
    HostPool,
    Launch,
    StaleBlock,
    Transition,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer._fence import Fence
    from transfer._work import Work

pytestmark = pytest.mark.anyio
LAYOUT = BlockLayout.raw(64)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways in which work reached a host device, in order."""
    seen: list[str] = []
    enqueue, instant = HostDevice.enqueue, HostDevice.instant

    def posted(self: HostDevice, work: Work, waits: Sequence[Fence]) -> Fence:
        seen.append("posted")
        return enqueue(self, work, waits)

    def at_once(self: HostDevice, work: Work) -> bool:
        done = instant(self, work)
        seen.append("at once" if done else "declined")
        return done

    monkeypatch.setattr(HostDevice, "enqueue", posted)
    monkeypatch.setattr(HostDevice, "instant", at_once)
    return seen


async def test_a_small_copy_is_done_at_once_and_counted(ways: list[str]) -> None:
    pool = HostPool(LAYOUT, 2)
    async with Engine(HostDevice()) as engine:
        with pool.lease() as src, pool.lease() as dst:
            src.view(write=True)[:] = b"\x07" * 64
            await engine.copy(src, dst)
            assert bytes(dst.view()) == b"\x07" * 64
            assert ways == ["at once"]
            counts = engine.statistics().devices["host"]
            assert (counts.submitted, counts.completed, counts.bytes_moved) == (1, 1, 64)


async def test_larger_copies_and_callables_are_posted(ways: list[str]) -> None:
    big = HostPool(BlockLayout.raw(1 << 20), 2)
    async with Engine(HostDevice()) as engine:
        with big.lease() as src, big.lease() as dst:
            await engine.copy(src, dst)
        await engine.run(Launch(lambda: None))
    assert ways == ["declined", "posted", "declined", "posted"]


async def test_a_trace_hook_sees_every_copy(ways: list[str]) -> None:
    seen: list[Transition] = []
    pool = HostPool(LAYOUT, 2)
    async with Engine(HostDevice(), trace=seen.append) as engine:
        with pool.lease() as src, pool.lease() as dst:
            await engine.copy(src, dst)
    assert ways == ["posted"]
    assert len(seen) == 2


async def test_a_held_block_is_never_copied_at_once(ways: list[str]) -> None:
    pool = HostPool(LAYOUT, 3)
    gate = threading.Event()
    async with Engine(HostDevice()) as engine:
        with pool.lease() as src, pool.lease() as dst, pool.lease() as other:
            writer = await engine.submit(Launch(gate.wait, writes=[src]))
            with pytest.raises(HoldConflict, match="expected after="):
                await engine.copy(src, dst)
            reader = await engine.submit(Launch(gate.wait, reads=[dst]))
            with pytest.raises(HoldConflict, match="expected after="):
                await engine.copy(other, dst)
            gate.set()
            await writer.wait()
            await reader.wait()
    assert "at once" not in ways


async def test_an_ordered_copy_takes_the_long_way(ways: list[str]) -> None:
    pool = HostPool(LAYOUT, 3)
    async with Engine(HostDevice()) as engine:
        with pool.lease() as a, pool.lease() as b, pool.lease() as c:
            first = await engine.submit(Copy(a, b))
            await engine.copy(b, c, after=first)
    assert ways == ["posted", "posted"]


async def test_a_stale_handle_is_refused_as_ever(ways: list[str]) -> None:
    pool = HostPool(LAYOUT, 2)
    async with Engine(HostDevice()) as engine:
        with pool.lease() as dst:
            lease = pool.lease()
            src = lease.handle
            lease.release()
            with pytest.raises(StaleBlock):
                await engine.copy(src, dst)
    assert ways == []
