"""Descriptors: what they read, write, move and are routed by; what they refuse before anything."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from tests.transfer.kit import nothing

from transfer._errors import BadWork, LayoutMismatch, StaleBlock
from transfer._extent import BlockLayout, Extent
from transfer._handle import Block, Blocks, Handle
from transfer._memory import HostPool
from transfer._work import (
    Copy,
    External,
    FileRead,
    FileRemove,
    FileWrite,
    Launch,
    SpanLike,
    Work,
    handle_of,
)

LAYOUT = BlockLayout.packed([Extent("a", (8,), "uint8"), Extent("b", (4,), "uint8")])


@pytest.fixture(name="pool")
def _pool() -> HostPool:
    return HostPool(LAYOUT, 8, name="slots")


def ids(handles: tuple[Handle, ...]) -> list[list[int]]:
    return [[int(i) for i in handle.ids] for handle in handles]


def test_a_copy_reads_one_side_and_writes_the_other(pool: HostPool) -> None:
    src, dst = pool.lease(2), pool.lease(2)
    work = Copy(src, dst.handle, names=iter(["a"]))
    assert work.route == (Copy, "host", "host")
    assert (ids(work.reads), ids(work.writes)) == ([[0, 1]], [[2, 3]])
    assert work.names == ("a",)
    assert work.nbytes == 2 * 8
    assert Copy(src, dst).nbytes == 2 * 12
    assert Copy(src, dst).runs.total == 12
    single = Copy(pool.lease(), pool.lease())
    assert (ids(single.reads), ids(single.writes)) == ([[4]], [[5]])


def test_a_copy_refuses_what_does_not_fit(pool: HostPool) -> None:
    src, dst = pool.lease(2).handle, pool.lease(3).handle
    with pytest.raises(LayoutMismatch, match="2 blocks cannot fill 3"):
        Copy(src, dst)
    with pytest.raises(BadWork, match="copied onto itself"):
        Copy(src, Blocks.gather([src[1], dst[0]]))
    with pytest.raises(BadWork, match="copied onto itself"):
        Copy(src[0], src[:1])
    other = HostPool(BlockLayout.packed([Extent("a", (8,), "int8")]), 2)
    with pytest.raises(LayoutMismatch):
        Copy(src, other.lease(2))
    with pytest.raises(LayoutMismatch, match="asked for"):
        Copy(src, dst[:2], names=["c"])


def test_equal_ids_of_two_pools_are_different_blocks(pool: HostPool) -> None:
    Copy(pool.lease(), HostPool(LAYOUT, 1).lease())


def test_nothing_to_copy_is_no_error(pool: HostPool) -> None:
    assert Copy(pool.lease(0), pool.lease(0)).nbytes == 0
    empty = HostPool(BlockLayout.raw(0), 2)
    assert Copy(empty.lease(), empty.lease()).nbytes == 0


def test_a_lease_stands_for_its_handle_until_it_is_released(pool: HostPool) -> None:
    lease = pool.lease()
    assert handle_of(lease) is lease.handle
    assert handle_of(lease.handle) is lease.handle
    lease.release()
    with pytest.raises(StaleBlock):
        Copy(lease, pool.lease())


@pytest.mark.parametrize("on", ["host", "cuda:1"])
def test_launches_and_external_work_are_routed_by_their_device(pool: HostPool, on: str) -> None:
    a, b = pool.lease(), pool.lease(2)
    launch = Launch(nothing, reads=[a], writes=[b], on=on, nbytes=7, stream="stream")
    assert launch.route == (Launch, on)
    assert (ids(launch.reads), ids(launch.writes)) == ([[0]], [[1, 2]])
    assert (launch.nbytes, launch.stream, launch.fn) == (7, "stream", nothing)
    external = External(reads=[b], writes=[a], on=on)
    assert external.route == (External, on)
    assert (ids(external.reads), ids(external.writes)) == ([[1, 2]], [[0]])
    assert external.nbytes == 0


def test_files_hold_every_block_once(pool: HostPool) -> None:
    one, two = pool.lease().handle, pool.lease().handle
    other = HostPool(LAYOUT, 2, name="other").lease()
    spans: list[SpanLike] = [one.span(0, 4), two.span(), one.span(4, 4), other]
    write = FileWrite("a/b", spans, publish=Path("c"), offset=8, sync="full")
    assert write.route == (FileWrite,)
    assert write.nbytes == 4 + 20 + 4 + 20
    assert (write.path, write.publish, write.offset, write.sync) == (
        Path("a/b"),
        Path("c"),
        8,
        "full",
    )
    assert ids(write.reads) == [[0, 1], [0]]
    assert write.reads[0].pool is pool
    assert write.writes == ()
    read = FileRead("a/b", spans, offset=8)
    assert read.route == (FileRead,)
    assert (read.nbytes, read.reads) == (write.nbytes, ())
    assert ids(read.writes) == [[0, 1], [0]]


@pytest.mark.parametrize("kind", ["span", "block", "lease"])
def test_one_span_needs_no_list(pool: HostPool, kind: str) -> None:
    lease = pool.lease()
    kinds: dict[str, SpanLike] = {
        "span": lease.handle.span(),
        "block": lease.handle,
        "lease": lease,
    }
    given = kinds[kind]
    work = FileRead("f", given)
    assert work.nbytes == LAYOUT.nbytes
    assert isinstance(work.writes[0], Block)
    assert FileWrite("f", given).publish is None


def test_files_of_nothing() -> None:
    assert FileWrite("f", []).reads == ()
    assert FileRead("f", []).nbytes == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda block: FileWrite("f", block, sync="maybe"),  # type: ignore[arg-type]
        lambda block: FileWrite("f", block, offset=-1),
        lambda block: FileRead("f", block, offset=-1),
    ],
)
def test_wrong_file_work_is_refused(pool: HostPool, make: object) -> None:
    assert callable(make)
    with pytest.raises(BadWork, match="expected"):
        make(pool.lease())


def test_removing_a_file_touches_no_block() -> None:
    work = FileRemove("f", missing_ok=True)
    assert work.route == (FileRemove,)
    assert (work.path, work.missing_ok, work.nbytes) == (Path("f"), True, 0)
    assert (work.reads, work.writes) == ((), ())
    assert not FileRemove("f").missing_ok


def test_descriptors_are_frozen(pool: HostPool) -> None:
    works: list[Work] = [
        Copy(pool.lease(), pool.lease()),
        Launch(nothing),
        External(),
        FileWrite("f", []),
        FileRead("f", []),
        FileRemove("f"),
    ]
    for work in works:
        field = next(iter(type(work).__dataclass_fields__))  # type: ignore[attr-defined]
        with pytest.raises(FrozenInstanceError):
            setattr(work, field, None)
