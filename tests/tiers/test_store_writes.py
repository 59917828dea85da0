"""Write-behind: bounded, invisible until published, honest about errors."""

import errno
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.tiers.store_kit import Calls, fill, keys_of, rig, until

from tiers import Placement, PutFailed

pytestmark = pytest.mark.anyio

ON_DISK = pytest.mark.parametrize("placement", [Placement.SPLIT, Placement.WHOLE_DISK])


@ON_DISK
@pytest.mark.parametrize("where", ["create", "write", "link", "unlink"])
async def test_a_page_is_invisible_until_it_is_published(
    tmp_path: Path, placement: Placement, where: str
) -> None:
    # case 23 (get during put), the writer paused after each step
    keys = keys_of(1)
    async with rig(tmp_path, placement=placement) as it:
        gate = it.calls.gates[where] = threading.Event()
        ticket = await it.put(keys, wait=False)
        await until(it.calls.arrived.is_set)
        assert it.store.match(keys) == 0
        assert await it.get(keys) == 0
        del it.calls.gates[where]
        gate.set()
        await ticket.resident()
        assert await it.get(keys) == 1


@ON_DISK
@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE], ids=errno.errorcode.get
)
@pytest.mark.parametrize("where", ["create", "write", "link"])
async def test_a_failed_write_is_told_and_withdrawn(
    tmp_path: Path, placement: Placement, error: int, where: str
) -> None:
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        it.calls.nth(1, error, only=[where])
        ticket = await it.put(keys, wait=False)
        with pytest.raises(PutFailed) as caught:
            await ticket.resident()
        assert len(caught.value.pages) == 1
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == error
        await it.store.drain()
        statistics = it.store.statistics()
        assert (statistics.failed, statistics.stored) == (1, 2)
        assert dict(statistics.faults) == {errno.errorcode[error]: 1}
        assert len(it.files("data/*/*")) == 2
        assert it.store.match(keys) < 3


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "E"), TimeoutError("T"), ValueError("V"), MemoryError("M"), KeyError("K")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["create", "write", "link", "read", "unlink"])
async def test_any_error_ends_one_job_and_no_worker(
    tmp_path: Path, error: Exception, where: str
) -> None:
    # case 42 (a worker dies on an error that nobody expected)
    class Strange(Calls):
        left = 0

        def _at(self, name: str, what: object) -> None:
            if name == where and self.left:
                self.left = 0
                raise error
            super()._at(name, what)

    calls = Strange()
    keys = keys_of(2)
    async with rig(tmp_path, calls=calls) as it:
        await it.put(keys)
        calls.left = 1
        await it.get(keys)
        await it.put(keys_of(2, start=1), wait=False)
        await it.store.drain()
        it.store.evict(1)
        await it.store.drain()
        assert calls.left == 0
        it.store._core.removals.retry()
        with anyio.fail_after(30):
            while it.store.health().degraded:
                await it.put(keys_of(1, start=8), wait=False)
                await it.store.drain()
        fresh = keys_of(2, start=9)
        await it.put(fresh)
        assert await it.get(fresh) == 2


@ON_DISK
async def test_the_queue_is_bounded_and_puts_are_refused(
    tmp_path: Path, placement: Placement
) -> None:
    # case 43 (a slow disk and a burst), by refusal
    async with rig(
        tmp_path,
        placement=placement,
        blocks=64,
        backpressure="refuse",
        write_behind_bytes=4 * 16384,
    ) as it:
        bound = it.store._core.stages.count * it.store.form.file_bytes
        gate = it.calls.gates["write"] = threading.Event()
        refused = 0
        for start in range(200):
            ticket = await it.put(keys_of(1, start=start), wait=False)
            refused += len(ticket.refused)
            assert it.store.statistics().write_behind_bytes <= bound
        kept = 200 - refused
        assert 0 < kept <= it.store._core.stages.count
        assert dict(it.store.statistics().refused) == {"write-behind full": refused}
        gate.set()
        await it.store.drain()
        assert it.store.statistics().stored == kept


@ON_DISK
async def test_the_queue_is_bounded_and_puts_wait(tmp_path: Path, placement: Placement) -> None:
    # case 43 (a slow disk and a burst), by waiting
    async with rig(tmp_path, placement=placement, blocks=64, write_behind_bytes=2 * 16384) as it:
        bound = it.store._core.stages.count * it.store.form.file_bytes
        gate = it.calls.gates["write"] = threading.Event()
        worst = 0
        async with anyio.create_task_group() as tasks:
            for start in range(8):
                tasks.start_soon(it.put, keys_of(2, start=start))
            await until(lambda: it.store.statistics().put_waits >= 7)
            await until(lambda: it.store.statistics().write_behind_bytes)
            worst = it.store.statistics().write_behind_bytes
            gate.set()
        assert 0 < worst <= bound
        assert it.store.statistics().stored == 16


async def test_closing_has_a_time_limit(tmp_path: Path) -> None:
    # case 43 (close while the disk stands still)
    gate = threading.Event()
    async with rig(
        tmp_path, placement=Placement.WHOLE_DISK, writes_at_once=1, close_deadline=0.05
    ) as it:
        it.calls.gates["write"] = gate
        ticket = await it.put(keys_of(3), wait=False)
        with anyio.fail_after(20), pytest.raises(Exception, match="held by"):
            await it.store.aclose()
        gate.set()
        with pytest.raises(PutFailed, match="was closed"):
            await ticket.resident()
        await it.engine.drain()
        await until(lambda: not it.store._core.busy)


async def test_pages_may_be_reused_when_a_put_returns(tmp_path: Path) -> None:
    # case 12 (the source changes after the call, since the kit poisons pages at once)
    keys = keys_of(8)
    async with rig(tmp_path, pages=8) as it:
        gate = it.calls.gates["create"] = threading.Event()
        ticket = await it.put(keys, wait=False)
        with it.lease(8) as pages:
            fill(pages, keys_of(8, start=50))
        gate.set()
        await ticket.resident()
        assert await it.get(keys) == 8


@ON_DISK
async def test_short_counts_go_on(tmp_path: Path, placement: Placement) -> None:
    # case 27 (1 byte, half, all but one, EINTR)
    class Short(Calls):
        def __init__(self) -> None:
            super().__init__()
            self.turn = 0

        def cut(self, buffers: Any) -> Any:
            self.turn += 1
            first = buffers[0]
            size = [1, len(first) // 2, len(first) - 1, len(first)][self.turn % 4]
            if self.turn % 5 == 0:
                raise InterruptedError(errno.EINTR, "interrupted")
            return [first[: max(1, size)]]

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            return super().preadv(fd, self.cut(buffers), offset)

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            return super().pwritev(fd, self.cut(buffers), offset)

        def set_direct(self, fd: int, *, on: bool) -> None:
            if not on:
                super().set_direct(fd, on=on)

    keys = keys_of(4)
    async with rig(tmp_path, placement=placement, calls=Short()) as it:
        await it.put(keys)
        assert await it.get(keys) == 4


@ON_DISK
async def test_nothing_moved_is_a_failure(tmp_path: Path, placement: Placement) -> None:
    # case 27 (0 before the end)
    class Zero(Calls):
        on = ""

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            return 0 if self.on == "read" else super().preadv(fd, buffers, offset)

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            return 0 if self.on == "write" else super().pwritev(fd, buffers, offset)

    calls = Zero()
    async with rig(tmp_path, placement=placement, calls=calls) as it:
        calls.on = "write"
        ticket = await it.put(keys_of(1), wait=False)
        with pytest.raises(PutFailed):
            await ticket.resident()
        calls.on = ""
        await it.put(keys_of(1))
        calls.on = "read"
        assert await it.get(keys_of(1)) == 0
        calls.on = ""
        await it.store.drain()


async def test_direct_input_that_is_refused_falls_back_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # case 46 (O_DIRECT refused)
    class Refusing(Calls):
        def set_direct(self, fd: int, *, on: bool) -> None:
            if on:
                raise OSError(errno.EINVAL, "no direct I/O here")
            super().set_direct(fd, on=on)

    async with rig(tmp_path, calls=Refusing()) as it:
        await it.put(keys_of(4))
        assert await it.get(keys_of(4)) == 4
        assert len(it.files()) == 4
    lines = [record for record in caplog.records if "direct" in record.getMessage()]
    assert len(lines) == 1
