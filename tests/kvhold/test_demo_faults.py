"""Faults of the demonstration: each strikes what it says, and is counted."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import anyio
import pytest

from kvhold import demo_faults as faults
from transfer import BlockLayout, Copy, Engine, FileDevice, FileRead, FileWrite, HostPool
from transfer._errors import OperationFailed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_the_writes_that_are_to_fail_do_and_leave_no_file(tmp_path: Path) -> None:
    calls = faults.ShakyCalls((1,), slow_every=0, seconds=0)
    with HostPool(BlockLayout.raw(4096), 1) as pool, pool.lease() as block:
        async with Engine(FileDevice(calls=calls)) as engine:
            await engine.run(FileWrite(tmp_path / "0", block))
            with pytest.raises(OperationFailed) as caught:
                await engine.run(FileWrite(tmp_path / "1", block))
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.errno == errno.ENOSPC
            await engine.run(FileWrite(tmp_path / "2", block))
    assert names(tmp_path) == ["0", "2"]
    assert calls.injected == {faults.FAILED_WRITE: 1}


async def test_each_nth_read_is_slow_and_right(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 16)
    calls = faults.ShakyCalls((), slow_every=3, seconds=0.001)
    with HostPool(BlockLayout.raw(4096), 1) as pool, pool.lease() as block:
        async with Engine(FileDevice(calls=calls)) as engine:
            for _ in range(7):
                await engine.run(FileRead(tmp_path / "file", block))
        assert bytes(block.view()[:256]) == bytes(range(256))
    assert calls.injected == {faults.SLOW_READ: 2}


async def test_a_slow_link_begins_copies_so_many_steps_late() -> None:
    steps = 0
    link = faults.SlowLink(1, rate=1.0, steps=3, clock=lambda: steps)
    with HostPool(BlockLayout.raw(64), 2) as pool:
        src, dst = pool.lease(), pool.lease()
        src.handle.view(write=True)[:3] = b"abc"
        async with Engine(link.device) as engine:
            async with link.slow():
                op = await engine.submit(Copy(src, dst))
                while steps < 3:
                    await anyio.sleep(0.11)
                    assert not op.settled
                    steps += 1
                await op.wait()
            assert link.delayed == 1
            await engine.copy(src, dst)
            assert link.delayed == 1
        assert bytes(dst.handle.view()[:3]) == b"abc"
        src.release()
        dst.release()


async def test_a_slow_link_goes_on_while_the_model_does_nothing() -> None:
    link = faults.SlowLink(1, rate=1.0, steps=1000, clock=lambda: 0)
    with HostPool(BlockLayout.raw(64), 2) as pool, pool.lease() as src, pool.lease() as dst:
        async with Engine(link.device) as engine, link.slow():
            with anyio.fail_after(20):
                await engine.copy(src, dst)


async def test_what_is_held_up_begins_at_the_end_of_the_block() -> None:
    link = faults.SlowLink(1, rate=1.0, steps=1000, clock=lambda: 0)
    with HostPool(BlockLayout.raw(64), 2) as pool, pool.lease() as src, pool.lease() as dst:
        async with Engine(link.device) as engine:
            async with link.slow():
                op = await engine.submit(Copy(src, dst))
            await op.wait()


def test_damage_is_one_bit_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    faults.damage(path)
    assert path.read_bytes() == bytes(500) + b"\x10" + bytes(499)
    faults.lose(path)
    assert not path.exists()
