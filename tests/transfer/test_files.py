"""FileDevice: whole files or none, direct I/O where it can be had, and every way to fail."""

import errno
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.transfer.device_kit import PATIENCE, Ends, Gate, filled, raw_pool, started

from transfer._errors import AlignmentError, WrongDevice
from transfer._extent import BlockLayout
from transfer._memory import HostPool
from transfer._storage import PAGE
from transfer._work import FileRead, FileRemove, FileWrite, Launch, Sync
from transfer.files import FileDevice, FileStatistics, SystemCalls


class Shim(SystemCalls):
    """Counts calls, calls every file system willing, and fails or shortens what a test asks for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.fail: Callable[[str, int], OSError | None] = lambda _name, _number: None
        self.shorten: Callable[[int, int], int] = lambda _number, size: size
        self.lock = threading.Lock()
        self.open_files = 0
        self.moves = 0

    def note(self, name: str) -> None:
        with self.lock:
            self.names.append(name)
            error = self.fail(name, len(self.names))
        if error is not None:
            raise error

    def open(self, path: Path, flags: int, mode: int) -> int:
        assert flags & os.O_CLOEXEC
        self.note("open")
        fd = super().open(path, flags, mode)
        with self.lock:
            self.open_files += 1
        return fd

    def set_direct(self, fd: int, *, on: bool) -> None:
        self.note("direct" if on else "buffered")

    def _cut(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        size = sum(map(len, buffers))
        with self.lock:
            self.moves += 1
            room = self.shorten(self.moves, size)
        out = []
        for buffer in buffers:
            out.append(buffer[:room])
            room -= len(out[-1])
        return out

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.note("preadv")
        return super().preadv(fd, self._cut(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.note("pwritev")
        return super().pwritev(fd, self._cut(buffers), offset)

    def fdatasync(self, fd: int) -> None:
        self.note("fdatasync")

    def fsync(self, fd: int) -> None:
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        self.note("fsync folder" if folder else "fsync")

    def link(self, path: Path, name: Path) -> None:
        self.note("link")
        super().link(path, name)

    def unlink(self, path: Path) -> None:
        self.note("unlink")
        super().unlink(path)

    def close(self, fd: int) -> None:
        super().close(fd)
        with self.lock:
            self.open_files -= 1
        self.note("close")


@pytest.fixture
def shim() -> Shim:
    return Shim()


@pytest.fixture
def disk(shim: Shim) -> Iterator[tuple[FileDevice, Ends]]:
    device = FileDevice(threads=2, calls=shim)
    with started(device) as ends:
        yield device, ends
    assert shim.open_files == 0


Disk = tuple[FileDevice, Ends]


def shim_of(disk: Disk) -> Shim:
    calls = disk[0]._calls
    assert isinstance(calls, Shim)
    return calls


def failing(call: int, code: int) -> Callable[[str, int], OSError | None]:
    """Fail one call, counted from 1."""
    return lambda _name, number: OSError(code, os.strerror(code)) if number == call else None


def run(disk: Disk, work: FileWrite | FileRead | FileRemove) -> BaseException | None:
    """Do one operation; give back its error."""
    device, ends = disk
    device.check(work)
    ends.seen.clear()
    fence = device.enqueue(work, ())
    (done,) = ends.wait(1)
    assert done.fence is fence
    assert not done.lost
    return done.error


# --- The bytes


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize(
    ("nbytes", "count", "offset"),
    [
        (1, 1, 0),
        (4096, 1, 0),
        (4096, 3, 4096),
        (4096, 3, 5),
        (5000, 3, 0),
        (1 << 20, 4, 8192),
        (24, 2500, 0),  # more spans than one call takes
    ],
)
def test_what_is_written_is_read_back(
    tmp_path: Path, nbytes: int, count: int, offset: int, direct: bool | None
) -> None:
    device = FileDevice(threads=2, direct=direct)
    pool = raw_pool(nbytes, 2 * count)
    src, dst = filled(pool, count), pool.lease(count).handle
    temporary, final = tmp_path / "temporary", tmp_path / "final"
    with started(device) as ends:
        work = FileWrite(temporary, list(src), publish=final, offset=offset)
        assert run((device, ends), work) is None
        expected = bytes(offset) + b"".join(bytes(block.view()) for block in src)
        assert final.read_bytes() == expected
        assert not temporary.exists()
        assert run((device, ends), FileRead(final, list(dst), offset=offset)) is None
    assert [bytes(b.view()) for b in dst] == [bytes(b.view()) for b in src]
    assert device.statistics().direct + device.statistics().buffered == 2
    if direct is False:
        assert device.statistics().mode == "buffered"


def test_direct_bytes_are_the_files_own(tmp_path: Path) -> None:
    device = FileDevice(threads=2, direct=True)
    pool = raw_pool(1 << 20, 2)
    src, dst = filled(pool, 1)[0], pool.lease().handle
    with started(device) as ends:
        error = run((device, ends), FileWrite(tmp_path / "a", src, sync="full"))
        if isinstance(error, OSError) and error.errno == errno.EINVAL:
            pytest.skip("the file system of the temporary folder has no direct I/O")
        assert error is None
        assert (tmp_path / "a").read_bytes() == bytes(src.view())
        assert run((device, ends), FileRead(tmp_path / "a", dst)) is None
    assert bytes(dst.view()) == bytes(src.view())
    assert device.statistics() == FileStatistics(direct=2, buffered=0, refused=0)
    assert device.statistics().mode == "direct"


def test_parts_of_blocks_are_moved_in_the_order_given(tmp_path: Path, disk: Disk) -> None:
    pool = raw_pool(100, 2)
    one, two = filled(pool, 2)
    spans = [two.span(10, 20), one.span(0, 5), two.span(50, 0), two.span(90, 10)]
    assert run(disk, FileWrite(tmp_path / "a", spans)) is None
    expected = b"".join(bytes(s.block.view()[s.offset : s.offset + s.nbytes]) for s in spans)
    assert (tmp_path / "a").read_bytes() == expected
    before = bytes(one.view())
    two.view(write=True)[:] = bytes(100)
    assert run(disk, FileRead(tmp_path / "a", [two.span(3, 20), two.span(70, 15)])) is None
    assert bytes(two.view()[3:23]) + bytes(two.view()[70:85]) == expected
    assert not any(two.view()[:3]) + any(two.view()[23:70]) + any(two.view()[85:])
    assert bytes(one.view()) == before


def test_no_bytes_are_a_completed_operation(tmp_path: Path, disk: Disk, shim: Shim) -> None:
    pool = raw_pool(64, 1)
    empty = pool.lease().handle.span(0, 0)
    assert run(disk, FileRead(tmp_path / "not there", empty)) is None
    assert run(disk, FileRead(tmp_path / "not there", ())) is None
    assert shim.names == []
    assert run(disk, FileWrite(tmp_path / "a", empty, publish=tmp_path / "b")) is None
    assert (tmp_path / "b").read_bytes() == b""


# case 27, one call moves at most about 2 GiB, and offsets need more than 32 bits.
def test_a_file_above_two_gib_is_moved_in_calls_of_at_most_one(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    class Pretend(Shim):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            asked.append((offset, sum(map(len, buffers))))
            return asked[-1][1]

        preadv = pwritev

    size = (1 << 31) + (1 << 29) + 4096
    device = FileDevice(threads=1, calls=Pretend())
    block = raw_pool(size, 1).lease().handle  # mapped, and no page of it touched
    (tmp_path / "a").touch()
    with started(device) as ends:
        assert run((device, ends), FileWrite(tmp_path / "b", block, offset=PAGE)) is None
        assert run((device, ends), FileRead(tmp_path / "a", block, offset=PAGE)) is None
    gib = 1 << 30
    calls = [(PAGE, gib), (PAGE + gib, gib), (PAGE + 2 * gib, size - 2 * gib)]
    assert asked == calls * 2


def test_bytes_beyond_four_gib_of_a_sparse_file(tmp_path: Path, disk: Disk) -> None:
    far = (1 << 32) + (1 << 31) + PAGE
    pool = raw_pool(4096, 2)
    src, dst = filled(pool, 1)[0], pool.lease().handle
    assert run(disk, FileWrite(tmp_path / "a", src, offset=far)) is None
    assert (tmp_path / "a").stat().st_size == far + 4096
    assert run(disk, FileRead(tmp_path / "a", dst, offset=far)) is None
    assert bytes(dst.view()) == bytes(src.view())
    assert run(disk, FileRead(tmp_path / "a", dst, offset=far - (1 << 32))) is None
    assert not any(dst.view())


# --- Publishing


def test_a_new_file_is_its_owners_alone(tmp_path: Path, disk: Disk) -> None:
    block = raw_pool(64, 1).lease().handle
    assert run(disk, FileWrite(tmp_path / "a", block)) is None
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_nothing_is_ever_replaced(tmp_path: Path, disk: Disk) -> None:
    block = filled(raw_pool(64, 1), 1)[0]
    temporary, final = tmp_path / "temporary", tmp_path / "final"
    final.write_text("old")
    error = run(disk, FileWrite(temporary, block, publish=final))
    assert isinstance(error, FileExistsError)
    assert final.read_text() == "old"
    assert not temporary.exists()
    temporary.write_text("someone's")
    error = run(disk, FileWrite(temporary, block, publish=tmp_path / "other"))
    assert isinstance(error, FileExistsError)
    assert error.filename is not None
    assert temporary.read_text() == "someone's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["final", "temporary"]


@pytest.mark.parametrize(
    ("sync", "publish", "expected"),
    [
        ("none", True, ["open", "pwritev", "close", "link", "unlink"]),
        ("data", True, ["open", "pwritev", "fdatasync", "close", "link", "unlink"]),
        (
            "full",
            True,
            [
                "open",
                "pwritev",
                "fsync",
                "close",
                "link",
                "unlink",
                "open",
                "fsync folder",
                "close",
            ],
        ),
        ("full", False, ["open", "pwritev", "fsync", "close", "open", "fsync folder", "close"]),
        ("data", False, ["open", "pwritev", "fdatasync", "close"]),
    ],
)
def test_a_file_is_synced_before_it_is_published(
    tmp_path: Path, disk: Disk, sync: Sync, publish: bool, expected: list[str]
) -> None:
    shim = shim_of(disk)
    block = filled(raw_pool(64, 1), 1)[0]
    final = tmp_path / "b" if publish else None
    assert run(disk, FileWrite(tmp_path / "a", block, publish=final, sync=sync)) is None
    assert shim.names == expected


def test_reading_and_removing(tmp_path: Path, disk: Disk) -> None:
    block = raw_pool(64, 1).lease().handle
    path = tmp_path / "a"
    error = run(disk, FileRead(path, block))
    assert isinstance(error, FileNotFoundError)
    assert error.filename == str(path) or error.filename == path
    assert not path.exists()
    assert isinstance(run(disk, FileRemove(path)), FileNotFoundError)
    assert run(disk, FileRemove(path, missing_ok=True)) is None
    path.write_bytes(b"x")
    assert run(disk, FileRemove(path)) is None
    assert not path.exists()


# --- Faults

SHORT: dict[str, Callable[[int], int]] = {
    "one": lambda _size: 1,
    "half": lambda size: max(size // 2, 1),
    "all but one": lambda size: max(size - 1, 1),
    "pages": lambda size: min(size, PAGE),
}


# case 27, short counts at the first, middle and last call, of reads and writes.
@pytest.mark.parametrize("count", list(SHORT))
@pytest.mark.parametrize("at", [1, 2, 3, 0])
@pytest.mark.parametrize("nbytes", [4096, 5000])
def test_short_counts_go_on_with_the_rest(
    tmp_path: Path, disk: Disk, count: str, at: int, nbytes: int
) -> None:
    shim = shim_of(disk)
    pool = raw_pool(nbytes, 6)
    src, dst = filled(pool, 3), pool.lease(3).handle
    every = at == 0 and count != "one"

    def shorten(number: int, size: int) -> int:
        return SHORT[count](size) if every or number == at else size

    shim.shorten = shorten
    write = FileWrite(tmp_path / "a", list(src), publish=tmp_path / "b")
    assert run(disk, write) is None
    shim.moves = 0
    assert run(disk, FileRead(tmp_path / "b", list(dst))) is None
    expected = b"".join(bytes(block.view()) for block in src)
    assert (tmp_path / "b").read_bytes() == expected
    assert b"".join(bytes(block.view()) for block in dst) == expected


def test_after_a_count_between_pages_the_rest_is_buffered(
    tmp_path: Path, disk: Disk, shim: Shim
) -> None:
    block = filled(raw_pool(3 * PAGE, 1), 1)[0]
    shim.shorten = lambda number, size: [PAGE, 100, size][number - 1]
    assert run(disk, FileWrite(tmp_path / "a", block)) is None
    assert shim.names == [*("open", "direct", "pwritev", "pwritev", "buffered", "pwritev", "close")]
    assert disk[0].statistics() == FileStatistics(direct=0, buffered=1, refused=0)


@pytest.mark.parametrize("kept", [0, 1, 4095, 4096, 5000, 8191])
def test_a_file_that_ends_early_is_a_failure(tmp_path: Path, disk: Disk, kept: int) -> None:
    (tmp_path / "a").write_bytes(b"x" * kept)
    block = raw_pool(8192, 1).lease().handle
    error = run(disk, FileRead(tmp_path / "a", block))
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.ENODATA, str(tmp_path / "a"))
    assert f"{8192 - kept} are left" in str(error)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_write_that_moves_nothing_is_a_failure(
    tmp_path: Path, disk: Disk, shim: Shim, at: int
) -> None:
    block = raw_pool(8192, 1).lease().handle
    shim.shorten = lambda number, _size: 0 if number == at else 1
    error = run(disk, FileWrite(tmp_path / "a", block, publish=tmp_path / "b"))
    assert isinstance(error, OSError)
    assert error.errno == errno.ENODATA
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [4096, 100])
def test_an_interrupted_call_is_made_again(
    tmp_path: Path, disk: Disk, shim: Shim, nbytes: int
) -> None:
    pool = raw_pool(nbytes, 2)
    src, dst = filled(pool, 1)[0], pool.lease().handle
    times = {"pwritev": 3, "preadv": 3}

    def fail(name: str, _number: int) -> OSError | None:
        if times.get(name, 0):
            times[name] -= 1
            return InterruptedError(errno.EINTR, "interrupted")
        return None

    shim.fail = fail
    assert run(disk, FileWrite(tmp_path / "a", src)) is None
    assert run(disk, FileRead(tmp_path / "a", dst)) is None
    assert bytes(dst.view()) == bytes(src.view())
    assert times == {"pwritev": 0, "preadv": 0}


# cases 10 and 27, fail the Nth call, N = 1, 2, 3 … until none fails.
@pytest.mark.parametrize("sync", ["none", "data", "full"])
@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_a_write_whose_nth_call_fails_leaves_nothing(
    tmp_path: Path, disk: Disk, code: int, publish: bool, sync: Sync
) -> None:
    shim = shim_of(disk)
    block = filled(raw_pool(3 * PAGE, 1), 1)[0]
    shim.shorten = lambda _number, size: min(size, PAGE)
    failed = 0
    while True:
        shim.names.clear()
        shim.fail = failing(failed + 1, code)
        final = tmp_path / "b" if publish else None
        error = run(disk, FileWrite(tmp_path / "a", block, publish=final, sync=sync))
        assert shim.open_files == 0
        if error is None:
            break
        failed += 1
        assert isinstance(error, OSError)
        assert error.errno == code
        assert error.filename is not None
        assert list(tmp_path.iterdir()) == []
    assert failed == len(shim.names)  # each call failed once, and then none
    written = (tmp_path / ("b" if publish else "a")).read_bytes()
    assert written == bytes(block.view())
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_read_whose_nth_call_fails_is_a_failure(
    tmp_path: Path, disk: Disk, shim: Shim, code: int
) -> None:
    block = raw_pool(3 * PAGE, 1).lease().handle
    (tmp_path / "a").write_bytes(bytes(range(256)) * (3 * PAGE // 256))
    shim.shorten = lambda _number, size: min(size, PAGE)
    failed = 0
    while True:
        shim.names.clear()
        shim.fail = failing(failed + 1, code)
        error = run(disk, FileRead(tmp_path / "a", block))
        assert shim.open_files == 0
        if error is None:
            break
        failed += 1
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (code, str(tmp_path / "a"))
    assert failed == len(shim.names) == 6
    assert bytes(block.view()) == (tmp_path / "a").read_bytes()


def test_a_name_that_cannot_be_taken_back_is_told_with_the_first_error(
    tmp_path: Path, disk: Disk, shim: Shim
) -> None:
    def fail(name: str, _number: int) -> OSError | None:
        if name == "pwritev":
            return OSError(errno.ENOSPC, "full")
        return OSError(errno.EROFS, "read-only") if name == "unlink" else None

    shim.fail = fail
    block = raw_pool(PAGE, 1).lease().handle
    error = run(disk, FileWrite(tmp_path / "a", block, publish=tmp_path / "b"))
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert error.__notes__ == [f"{tmp_path / 'a'} could not be removed: [Errno 30] read-only"]


# --- Direct I/O


# case 46, refused at the switch or at the first call, it is buffered, said once, and visible.
@pytest.mark.parametrize("where", ["direct", "pwritev", "preadv"])
def test_refused_direct_io_becomes_buffered_once_per_file_system(
    tmp_path: Path, disk: Disk, shim: Shim, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_direct = False

    def fail(name: str, _number: int) -> OSError | None:
        nonlocal is_direct
        if name in {"direct", "buffered", "open"}:
            is_direct = name == "direct"
        refuse = name == where and (name == "direct" or is_direct)
        return OSError(errno.EINVAL, "Invalid argument") if refuse else None

    shim.fail = fail
    pool = raw_pool(PAGE, 2)
    src, dst = filled(pool, 1)[0], pool.lease().handle
    for name in "abc":
        assert run(disk, FileWrite(tmp_path / name, src)) is None
        assert run(disk, FileRead(tmp_path / name, dst)) is None
        assert bytes(dst.view()) == bytes(src.view())
    (record,) = caplog.records
    assert record.name == "kvhold.files"
    assert "refuses direct I/O" in record.message
    assert shim.names.count(where) == (1 if where == "direct" else 4)
    statistics = disk[0].statistics()
    assert statistics.refused == 1
    assert statistics.mode == ("mixed" if where == "preadv" else "buffered")


def test_a_refusal_met_by_several_threads_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    together = threading.Barrier(3)

    class Refusing(Shim):
        def set_direct(self, fd: int, *, on: bool) -> None:
            together.wait(PATIENCE)  # all three have asked before one is told
            raise OSError(errno.EINVAL, "no")

    blocks = raw_pool(PAGE, 3).lease(3).handle
    device = FileDevice(threads=3, calls=Refusing())
    with started(device) as ends:
        for block in blocks:
            device.enqueue(FileWrite(tmp_path / f"{block.id}", block), ())
        assert all(done.error is None for done in ends.wait(3))
    assert len(caplog.records) == 1
    assert device.statistics() == FileStatistics(direct=0, buffered=3, refused=1)


def test_other_file_systems_stay_direct(tmp_path: Path, shim: Shim) -> None:
    class TwoSystems(Shim):
        last = ""

        def open(self, path: Path, flags: int, mode: int) -> int:
            self.last = path.name
            return super().open(path, flags, mode)

        def file_system(self, fd: int) -> int:
            return len(self.last)

    calls = TwoSystems()
    calls.fail = lambda name, _number: (
        OSError(errno.EINVAL, "") if name == "direct" and len(calls.last) == 1 else None
    )
    block = raw_pool(PAGE, 1).lease().handle
    device = FileDevice(threads=1, calls=calls)
    with started(device) as ends:
        for name in ("a", "bb", "c", "dd"):
            assert run((device, ends), FileWrite(tmp_path / name, block)) is None
    assert device.statistics() == FileStatistics(direct=2, buffered=2, refused=1)


def test_einval_that_the_page_cache_gives_too_is_no_refusal(
    tmp_path: Path, disk: Disk, shim: Shim, caplog: pytest.LogCaptureFixture
) -> None:
    shim.fail = lambda name, _number: OSError(errno.EINVAL, "") if name == "pwritev" else None
    block = raw_pool(PAGE, 1).lease().handle
    error = run(disk, FileWrite(tmp_path / "a", block))
    assert isinstance(error, OSError)
    assert error.errno == errno.EINVAL
    assert disk[0].statistics().refused == 0
    assert not caplog.records


@pytest.mark.parametrize("where", ["direct", "pwritev"])
def test_demanded_direct_io_is_never_downgraded(tmp_path: Path, shim: Shim, where: str) -> None:
    shim.fail = lambda name, _number: OSError(errno.EINVAL, "no") if name == where else None
    block = raw_pool(PAGE, 1).lease().handle
    device = FileDevice(threads=1, direct=True, calls=shim)
    with started(device) as ends:
        error = run((device, ends), FileWrite(tmp_path / "a", block))
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.EINVAL, str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


def aligned_block(nbytes: int = 4 * PAGE) -> HostPool:
    return raw_pool(nbytes, 2)


@pytest.mark.parametrize(
    ("cut", "offset", "found"),
    [
        ((0, PAGE), 512, "file offset 512"),
        ((64, PAGE), 0, r"span 1 of 4096 bytes at address 0x[0-9a-f]+040"),
        ((0, 100), 0, r"span 1 of 100 bytes at address 0x[0-9a-f]+000"),
    ],
)
def test_misaligned_demanded_direct_io_is_refused_before_anything(
    tmp_path: Path, cut: tuple[int, int], offset: int, found: str
) -> None:
    one, two = aligned_block().lease(2).handle
    spans = [one.span(), two.span(*cut)]
    expected = r"files: direct I/O of .*a expects multiples of 4096 bytes; found " + found
    strict = FileDevice(direct=True)
    for work in (
        FileWrite(tmp_path / "a", spans, offset=offset),
        FileRead(tmp_path / "a", spans, offset=offset),
    ):
        with pytest.raises(AlignmentError, match=expected):
            strict.check(work)
        FileDevice().check(work)  # goes through the page cache instead
    strict.check(FileWrite(tmp_path / "a", [one.span(), two.span(PAGE, PAGE)], offset=PAGE))
    strict.check(FileRemove(tmp_path / "a"))


def test_misaligned_bytes_are_buffered_without_a_word(
    tmp_path: Path, disk: Disk, shim: Shim, caplog: pytest.LogCaptureFixture
) -> None:
    block = raw_pool(PAGE, 1).lease().handle
    assert disk[0].statistics().mode == "unused"
    assert run(disk, FileWrite(tmp_path / "a", block, offset=1)) is None
    assert run(disk, FileWrite(tmp_path / "b", block.span(64))) is None
    assert "direct" not in shim.names
    assert disk[0].statistics() == FileStatistics(direct=0, buffered=2, refused=0)
    assert not caplog.records


# --- Whose memory and which thread


def test_other_memory_and_other_work_are_refused(tmp_path: Path) -> None:
    device = FileDevice()
    pool = HostPool(BlockLayout.raw(64), 1)
    block = pool.lease().handle
    pool.kind = "cuda:0"
    for work in (FileRead(tmp_path / "a", block), FileWrite(tmp_path / "a", block)):
        with pytest.raises(WrongDevice, match=r"files moves host memory; .* is cuda:0 memory"):
            device.check(work)
    with pytest.raises(WrongDevice, match=r"files serves \(FileRead\), .*; found \(Launch, host\)"):
        device.check(Launch(print))


def test_files_are_moved_side_by_side(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    class Meet(SystemCalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            together.wait(PATIENCE)  # passed only when four writes are under way
            return super().pwritev(fd, buffers, offset)

    blocks = raw_pool(PAGE, 8).lease(8).handle
    device = FileDevice(threads=4, calls=Meet())
    with started(device) as ends:
        for block in blocks:
            device.enqueue(FileWrite(tmp_path / f"{block.id}", block), ())
        assert all(done.error is None for done in ends.wait(8))


# case 65, the thread goes on writing into the buffer whatever becomes of the caller.
def test_the_interpreter_itself_says_that_memory_is_in_use_until_the_thread_returned(
    tmp_path: Path,
) -> None:
    """Independent of our own books: a view cannot be released while C code uses its memory."""
    size = 64 << 20
    with (tmp_path / "a").open("wb") as file:
        file.truncate(size)
    under_way: list[memoryview] = []
    entering = threading.Event()

    class Watched(SystemCalls):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            under_way[:] = buffers
            entering.set()
            return super().preadv(fd, buffers, offset)

    device = FileDevice(threads=1, direct=False, calls=Watched())
    block = raw_pool(size, 1).lease().handle
    with started(device) as ends:
        for attempt in range(100):
            entering.clear()
            device.enqueue(FileRead(tmp_path / "a", block), ())
            assert entering.wait(PATIENCE)
            try:
                under_way[0].release()  # too early or too late: the read may fail; try again
            except BufferError:
                assert not ends.look()[attempt:]
                ends.wait(attempt + 1)
                under_way[0].release()  # returned: nothing uses it any more
                return
            ends.wait(attempt + 1)
    pytest.fail("the memory was never seen in use")


def test_memory_is_let_go_after_a_failure(tmp_path: Path, disk: Disk, shim: Shim) -> None:
    shim.fail = lambda name, _number: OSError(errno.EIO, "") if name == "preadv" else None
    (tmp_path / "a").touch()
    pool = raw_pool(PAGE, 1)
    error = run(disk, FileRead(tmp_path / "a", pool.lease()))
    assert isinstance(error, OSError)
    mapping = weakref.ref(pool.storage._map)  # type: ignore[attr-defined] # mapped storage
    pool.close()
    # The error is still at hand, and so is all that its traceback refers to.
    assert mapping() is None
    assert error.__traceback__ is not None


def test_a_gated_read_ends_only_when_its_thread_returns(tmp_path: Path) -> None:
    gate = Gate()

    class Gated(SystemCalls):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            moved = super().preadv(fd, buffers, offset)
            gate()
            return moved

    (tmp_path / "a").write_bytes(bytes(PAGE))
    device = FileDevice(threads=2, calls=Gated())
    block = raw_pool(PAGE, 1).lease().handle
    with started(device) as ends:
        fence = device.enqueue(FileRead(tmp_path / "a", block), ())
        gate.wait_entered()
        device.close()
        assert not ends.look()
        gate.open()
        assert ends.wait(1) == [(fence, None, False, False)]
