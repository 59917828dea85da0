"""The system calls of files, and the loop over short counts on its own."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.transfer.device_kit import filled, raw_pool

from transfer._syscalls import CALL_BYTES_MAX, SystemCalls, Transfer
from transfer._work import FileRead, FileWrite


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    calls = SystemCalls()
    number = calls.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    yield number
    calls.close(number)


def test_every_call_does_what_it_says(tmp_path: Path, fd: int) -> None:
    calls = SystemCalls()
    assert calls.pwritev(fd, [memoryview(b"abc"), memoryview(b"de")], 2) == 5
    target = bytearray(4)
    assert calls.preadv(fd, [memoryview(target)[:1], memoryview(target)[1:]], 3) == 4
    assert target == b"bcde"
    assert calls.preadv(fd, [memoryview(target)], 100) == 0
    calls.fdatasync(fd)
    calls.fsync(fd)
    calls.link(tmp_path / "file", tmp_path / "other")
    with pytest.raises(FileExistsError):
        calls.link(tmp_path / "file", tmp_path / "other")
    calls.unlink(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert calls.file_system(fd) == tmp_path.stat().st_dev


def test_direct_io_is_switched_on_an_open_file(fd: int) -> None:
    calls = SystemCalls()
    try:
        calls.set_direct(fd, on=True)
    except OSError as error:
        assert error.errno == errno.EINVAL  # noqa: PT017 - the file system has none
        return
    pool = raw_pool(4096, 1)
    view = filled(pool, 1)[0].view(write=True)
    assert calls.pwritev(fd, [view], 0) == 4096
    calls.set_direct(fd, on=False)
    assert calls.pwritev(fd, [view[:7]], 1) == 7


@pytest.mark.parametrize("counts", [[10], [1, 9], [3, 1, 6], [1] * 10])
@pytest.mark.parametrize("sizes", [[10], [4, 6], [3, 1, 6], [0, 10, 0]])
def test_each_call_gets_what_is_left(counts: list[int], sizes: list[int]) -> None:
    block = filled(raw_pool(10, 1), 1)[0]
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    spans = [block.span(end - size, size) for end, size in zip(ends, sizes, strict=True)]
    whole = bytes(block.view())
    seen = b""
    left = iter(counts)

    def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal seen
        assert fd == 5
        assert offset == 100 + len(seen)
        assert b"".join(map(bytes, buffers)) == whole[len(seen) :]
        assert all(map(len, buffers))
        moved = next(left)
        seen += whole[len(seen) : len(seen) + moved]
        return moved

    with Transfer(5, FileWrite("x", spans, offset=100), call) as transfer:
        while transfer.left:
            transfer.step()
    assert seen == whole


def test_one_call_takes_a_bounded_number_of_spans_and_bytes() -> None:
    most = os.sysconf("SC_IOV_MAX")
    calls: list[int] = []

    def count(_fd: int, buffers: Sequence[memoryview], _offset: int) -> int:
        calls.append(len(buffers))
        return sum(map(len, buffers))

    block = raw_pool(2 * most + 5, 1).lease().handle
    spans = [block.span(n, 1) for n in range(2 * most + 5)]
    with Transfer(0, FileRead("x", spans), count) as transfer:
        while transfer.left:
            transfer.step()
    assert calls == [most, most, 5]

    sizes: list[int] = []

    def size(_fd: int, buffers: Sequence[memoryview], _offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return sizes[-1]

    big = raw_pool(CALL_BYTES_MAX + 3, 1).lease().handle  # mapped, never touched
    with Transfer(0, FileRead("x", big), size) as transfer:
        while transfer.left:
            transfer.step()
    assert sizes == [CALL_BYTES_MAX, 3]


def test_a_call_that_moves_nothing_is_an_error_and_memory_is_let_go() -> None:
    pool = raw_pool(10, 1)
    kept: list[memoryview] = []

    def call(_fd: int, buffers: Sequence[memoryview], _offset: int) -> int:
        kept.extend(buffers)
        return 0

    with (
        pytest.raises(OSError, match="no byte moved at 0, 10 are left") as caught,
        Transfer(0, FileRead("x", pool.lease()), call) as transfer,
    ):
        transfer.step()
    assert caught.value.errno == errno.ENODATA
    for view in kept:
        with pytest.raises(ValueError, match="released"):
            len(view)
