"""Reads: shared, and never trusted before they are checked."""

import errno
import struct
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from tests.tiers.store_kit import Calls, Rig, keys_of, poison, rig, until, wrong_pages

from tiers import Placement
from tiers._store_fetch import Load
from transfer import EngineClosed, PoolBusy

pytestmark = pytest.mark.anyio

ON_DISK = pytest.mark.parametrize("placement", [Placement.SPLIT, Placement.WHOLE_DISK])


def file_of(it: Rig, number: int) -> Path:
    """The file of the Nth page of `keys_of(3)`."""
    (found,) = it.files(f"data/*/{keys_of(3).digests[number].hex()}-*")
    return found


def damage(path: Path, offset: int, byte: int | None = None) -> None:
    """Change one bit, or set a byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 1 if byte is None else byte]))


@ON_DISK
async def test_one_read_for_each_page_however_many_want_it(
    tmp_path: Path, placement: Placement
) -> None:
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        gate = it.calls.gates["read"] = threading.Event()
        counts = []
        async with anyio.create_task_group() as tasks:

            async def get() -> None:
                counts.append(await it.get(keys))

            first = anyio.CancelScope()  # whoever asks first leaves again

            async def leave() -> None:
                with first:
                    await it.get(keys)

            tasks.start_soon(leave)
            await until(it.calls.arrived.is_set)
            for _ in range(3):
                tasks.start_soon(get)
            await until(lambda: it.store.statistics().joined_flights == 9)
            first.cancel()
            await anyio.lowlevel.checkpoint()
            gate.set()
        assert counts == [3, 3, 3]
        assert it.store.statistics().read_bytes == 3 * it.store.form.file_bytes


# Every field of the header, its checksum, the first and last byte of each section, and the padding.
FIELDS = [
    0,
    8,
    10,
    12,
    16,
    24,
    25,
    26,
    27,
    28,
    32,
    36,
    40,
    44,
    48,
    52,
    53,
    54,
    55,
    64,
    96,
    128,
    144,
]
FIELDS += [192, 196, 200, 208, 216, 224, 256, 384, 4091, 4095, 4096]


@ON_DISK
async def test_a_flipped_bit_is_a_miss(tmp_path: Path, placement: Placement) -> None:
    # case 30 (corrupt file), each field of header, body and padding
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        end = it.store.form.file_bytes
        plan = it.store.form.blob.plan if it.store.form.blob else None
        assert plan is not None
        inside = [s.offset + s.part.nbytes - 1 for s in plan.sections]
        for offset in (*FIELDS, *inside, end - 1):
            await it.put(keys)
            before = it.store.statistics()
            damage(file_of(it, 1), offset)
            assert await it.get(keys) == 1
            after = it.store.statistics()
            assert after.dropped == before.dropped + 1
            assert sum(after.faults.values()) == sum(before.faults.values()) + 1
            assert it.store.match(keys) == 1  # at most one load of it fails
            await it.store.drain()
            assert len(it.files()) == 2
        assert 0 < len(it.files("aside/*")) <= 16


@ON_DISK
async def test_swapped_and_cut_files_are_misses(tmp_path: Path, placement: Placement) -> None:
    # case 30 (two files of equal size), case 25 (truncated, removed by hand), case 31 (short files)
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        one, two = file_of(it, 0), file_of(it, 1)
        spare = one.with_name("spare")
        one.rename(spare)
        two.rename(one)
        spare.rename(two)
        assert await it.get(keys) == 0
        for size in (0, 1, 4095, 4096, 8191, it.store.form.file_bytes - 1):
            await it.store.drain()
            await it.put(keys)
            with file_of(it, 2).open("r+b") as file:
                file.truncate(size)
            assert await it.get(keys) == 2
            assert it.store.match(keys) == 2
        await it.store.drain()
        await it.put(keys)
        file_of(it, 0).unlink()
        assert await it.get(keys) == 0
        assert it.store.match(keys) == 0
        await it.store.drain()
        assert await it.get((await it.put(keys), keys)[1]) == 3


@ON_DISK
async def test_hostile_lengths_are_refused_before_anything_is_taken(
    tmp_path: Path, placement: Placement
) -> None:
    # case 31 (lengths that are huge, wrapped, negative)
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        for offset, size in ((16, 8), (28, 4), (32, 4), (200, 8), (208, 8), (224, 4)):
            for value in (0, 2 ** (8 * size) - 1, 2 ** (8 * size - 1)):
                await it.put(keys)
                with file_of(it, 0).open("r+b") as file:
                    file.seek(offset)
                    file.write(struct.pack("<Q" if size == 8 else "<I", value))
                assert await it.get(keys) == 0
                await it.store.drain()


@ON_DISK
async def test_code_in_a_file_is_not_run(tmp_path: Path, placement: Placement) -> None:
    # case 32 (a planted pickle)
    marker = tmp_path / "marker"
    planted = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    keys = keys_of(3)
    async with rig(tmp_path / "store", placement=placement) as it:
        await it.put(keys)
        path = file_of(it, 0)
        path.write_bytes(planted.ljust(it.store.form.file_bytes, b"\0"))
        assert await it.get(keys) == 0
    assert not await anyio.Path(marker).exists()


@ON_DISK
async def test_a_passing_fault_keeps_the_file(tmp_path: Path, placement: Placement) -> None:
    # case 25 (one EIO, then fine)
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        for error in (errno.EIO, errno.EMFILE):
            it.calls.nth(1, error, only=["open"])
            assert await it.get(keys) < 3
            assert await it.get(keys) == 3
        faults = it.store.statistics().faults
        assert dict(faults) == {"EIO": 1, "EMFILE": 1}
        assert len(it.files()) == 3


async def test_a_file_that_never_reads_is_given_up(tmp_path: Path) -> None:
    # case 25 (the number of tries is bounded)
    keys = keys_of(1)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys)
        it.calls.every(errno.EIO, only=["read"])
        for _ in range(3):
            assert it.store.match(keys) == 1
            assert await it.get(keys) == 0
        assert it.store.match(keys) == 0
        await it.store.drain()
        assert it.files() == []


async def test_a_tier_that_cannot_be_read_costs_nobody_the_wait(tmp_path: Path) -> None:
    # case 52 (a tier that refuses for long and comes back)
    keys = [keys_of(1, start=start) for start in range(30)]
    async with rig(tmp_path, placement=Placement.WHOLE_DISK, quota=None) as it:
        for one in keys:
            await it.put(one)
        it.calls.every(errno.EIO, only=["read"])
        before = it.calls.made
        for _ in range(30):
            for one in keys:
                assert await it.get(one) == 0
        assert it.store.read_health().degraded
        assert it.calls.made - before < 300
        it.calls.fail = None
        await until(lambda: it.store.match(keys[0]) or it.store.match(keys[-1]))
        with anyio.fail_after(30):
            while it.store.read_health().degraded:
                await it.get(keys[-1])
                await anyio.sleep(0.01)
        assert it.store.read_health().recoveries == 1
        assert await it.get(keys[-1]) == 1


@ON_DISK
async def test_half_of_a_page_is_no_page(tmp_path: Path, placement: Placement) -> None:
    # case 38 (one half is missing), evict the keys while the values are being read
    keys = keys_of(3)
    async with rig(tmp_path, placement=placement) as it:
        await it.put(keys)
        gate = it.calls.gates["read"] = threading.Event()
        with it.store.lookup(keys) as hit, it.lease(3) as pages:
            poison(pages)
            async with anyio.create_task_group() as tasks:

                async def fetch() -> None:
                    assert await it.store.fetch(hit, into=pages) == 3
                    assert wrong_pages(pages, keys, 3) == []

                tasks.start_soon(fetch)
                await until(it.calls.arrived.is_set)
                assert it.store.evict(3) == 0
                assert it.store.remove(keys) == 3
                assert it.store.match(keys) == 0
                gate.set()


async def test_a_read_does_not_wait_for_all_writes(tmp_path: Path) -> None:
    # case 43 (reads are not behind all writes)
    calls = Calls()
    old, new = keys_of(1), keys_of(12, start=1)
    async with rig(tmp_path, calls=calls, placement=Placement.WHOLE_DISK, writes_at_once=2) as it:
        await it.put(old)
        # Eight threads, two of which stand in a write; the others serve the read.
        gate = calls.gates["create"] = threading.Event()
        await it.put(new, wait=False)
        assert await it.get(old) == 1
        gate.set()


async def test_fetching_needs_no_room_that_writes_take(tmp_path: Path) -> None:
    # case 43 (staging full of writes does not block loads)
    calls = Calls()
    async with rig(tmp_path, calls=calls, write_behind_bytes=1, backpressure="refuse") as it:
        await it.put(keys_of(1))
        gate = calls.gates["create"] = threading.Event()
        ticket = await it.put(keys_of(3, start=1), wait=False)
        assert set(ticket.refused.values()) == {"write-behind full"}
        assert await it.get(keys_of(1)) == 1
        gate.set()


@pytest.mark.parametrize("placement", [Placement.SPLIT, Placement.WHOLE_DISK])
async def test_reads_that_wait_at_the_end_are_given_up(
    tmp_path: Path, placement: Placement
) -> None:
    # The disk stands still: what is under way is waited for, what is queued must not start later.
    keys = keys_of(5)
    async with rig(tmp_path, placement=placement, read_bytes=1, close_deadline=0.05) as it:
        await it.put(keys)
        gate = it.calls.gates["read"] = threading.Event()
        counts: list[int] = []

        async def fetch() -> None:
            counts.append(await it.get(keys))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await until(it.calls.arrived.is_set)
            with pytest.raises(PoolBusy):
                await it.store.aclose()
            assert it.store._flights.queued == 0
            gate.set()
        assert counts == [0]  # staging was given up: nothing of it is looked at any more
        assert it.engine.holders() == []
        for pool in it.store.pools():
            assert pool.counts().held == 0


async def test_a_load_that_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    # A fetch or a check that waited for the engine while the store was closed.
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        await it.put(keys_of(2))
        entries = list(it.store.entries())
        await it.store.aclose()
        with it.lease(2) as pages:
            for target in (None, pages):
                with pytest.raises(EngineClosed, match="closed"):
                    await Load(it.store._flights, entries, target).run(())
        assert it.store._flights.queued == 0
        await until(lambda: all(entry.quiet for entry in entries))
