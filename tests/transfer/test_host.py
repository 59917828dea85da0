"""HostDevice: every byte of a copy and no other, where it is done, and callables."""

import functools
import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.transfer.device_kit import PATIENCE, Ends, Gate, filled, raw_pool, started

from transfer import host
from transfer._errors import WrongDevice
from transfer._extent import BlockLayout, Extent
from transfer._fence import Fence
from transfer._handle import Blocks
from transfer._memory import HostPool, Pool
from transfer._storage import own_layout
from transfer._work import Copy, External, FileRemove, Launch
from transfer.host import HostDevice


@pytest.fixture
def device() -> Iterator[tuple[HostDevice, Ends]]:
    host_device = HostDevice(threads=2)
    with started(host_device) as ends:
        yield host_device, ends


def contents(blocks: Blocks) -> list[bytes]:
    return [bytes(block.view()) for block in blocks]


def shuffled(blocks: Blocks, seed: int) -> Blocks:
    order = np.random.default_rng(seed).permutation(len(blocks))
    return Blocks(blocks.pool, blocks.ids[order], blocks.generations[order])


SIZES = [1, 64, 4095, 4096, 16 << 10, (64 << 10) - 1, 64 << 10, (1 << 20) + 1, (5 << 20) + 3]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 3, 8, 65])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_batch_arrives_whole_and_in_order(nbytes: int, count: int, threads: int) -> None:
    if nbytes * count > 64 << 20:
        count = (64 << 20) // nbytes
    source, target = raw_pool(nbytes, count + 2), raw_pool(nbytes, count + 2)
    everything = filled(target, count + 2, seed=99)
    before = contents(everything)
    src, dst = filled(source, count), everything[1 : count + 1]
    device = HostDevice(threads=threads)
    with started(device) as ends:
        for pair in ((src, dst), (shuffled(src, 1), dst), (src, shuffled(dst, 2))):
            fence = device.enqueue(Copy(*pair), ())
            assert ends.wait(1).pop() == (fence, None, False, False)
            assert contents(pair[1]) == contents(pair[0])
    after = contents(everything)
    assert (after[0], after[-1]) == (before[0], before[-1])


def test_order_counts_where_only_the_ends_look_consecutive(
    device: tuple[HostDevice, Ends],
) -> None:
    source, target = raw_pool(4096, 16), raw_pool(4096, 16)
    src, dst = filled(source, 16), target.lease(16).handle
    order = np.array([0, *range(14, 0, -1), 15])
    mixed = Blocks(source, src.ids[order], src.generations[order])
    device[0].enqueue(Copy(mixed, dst), ())
    device[1].wait(1)
    assert contents(dst) == contents(mixed)


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_single_block_arrives_whole(device: tuple[HostDevice, Ends], nbytes: int) -> None:
    source, target = raw_pool(nbytes, 2), raw_pool(nbytes, 2)
    src, dst = filled(source, 2), filled(target, 2, seed=7)
    other = bytes(dst[0].view())
    device[0].enqueue(Copy(src[0], dst[1]), ())
    device[1].wait(1)
    assert bytes(dst[1].view()) == bytes(src[0].view())
    assert bytes(dst[0].view()) == other


def extents(rows: int, width: int) -> list[Extent]:
    return [
        Extent(name, (rows, width), "uint8", layer=layer)
        for layer in range(3)
        for name in ("key", "value")
    ]


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("width", [24, 4096, 40 << 10])
def test_padding_and_other_tensors_are_not_touched(
    device: tuple[HostDevice, Ends], width: int, count: int
) -> None:
    plain = BlockLayout.packed(extents(3, width), align=1)
    padded = BlockLayout.packed(extents(3, width), align=128)
    source, target = HostPool(plain, count), HostPool(padded, count)
    src, dst = filled(source, count), filled(target, count, seed=5)
    expected = []
    for one, two in zip(src, dst, strict=True):
        image = bytearray(two.view())
        for layer in range(3):
            a, b = plain.extent("value", layer), padded.extent("value", layer)
            image[b.offset : b.offset + b.nbytes] = one.view()[a.offset : a.offset + a.nbytes]
        expected.append(bytes(image))
    device[0].enqueue(Copy(src, dst, names=("value",)), ())
    device[1].wait(1)
    assert contents(dst) == expected


def test_pages_of_a_tensor_per_layer_become_slots_and_come_back(
    device: tuple[HostDevice, Ends],
) -> None:
    # Real memory with gaps between the pages, as a host program lays it out.
    pages: dict[tuple[str, int | None], torch.Tensor] = {
        (name, layer): torch.randint(0, 255, (50, 3, 4, 128), dtype=torch.uint8)[:, ::2]
        for layer in range(4)
        for name in ("key", "value")
    }
    before = {key: tensor.clone() for key, tensor in pages.items()}
    foreign = Pool.over(pages, own_layout(pages))
    slots = HostPool(
        BlockLayout.packed(
            [Extent(name, (2, 4, 128), "uint8", layer=layer) for name, layer in pages]
        ),
        64,
    )
    ids = np.random.default_rng(3).permutation(50)[:30]
    lease = slots.lease(30)
    device[0].enqueue(Copy(foreign.blocks_of(ids), lease), ())
    device[1].wait(1)
    for slot, page in zip(lease.handle, ids.tolist(), strict=True):
        for (name, layer), tensor in pages.items():
            assert torch.equal(slot.tensor(name, layer), tensor[page])
    for tensor in pages.values():
        tensor.zero_()
    device[0].enqueue(Copy(lease, foreign.blocks_of(ids)), ())
    device[1].wait(2)
    for key, tensor in pages.items():
        assert torch.equal(tensor[ids], before[key][ids])
        rest = np.setdiff1d(np.arange(50), ids)
        assert not tensor[rest].any()


def test_blocks_of_one_pool_are_copied_among_themselves(device: tuple[HostDevice, Ends]) -> None:
    pool = raw_pool(4096, 64)
    blocks = shuffled(filled(pool, 64), 4)
    device[0].enqueue(Copy(blocks[:32], blocks[32:]), ())
    device[1].wait(1)
    assert contents(blocks[32:]) == contents(blocks[:32])
    ordered = filled(raw_pool(4096, 64), 64)
    device[0].enqueue(Copy(ordered[:32], ordered[32:]), ())
    device[1].wait(2)
    assert contents(ordered[32:]) == contents(ordered[:32])


@pytest.mark.parametrize("count", [None, 0, 3])
def test_no_bytes_are_a_completed_copy(device: tuple[HostDevice, Ends], count: int | None) -> None:
    nbytes = 64 if count == 0 else 0
    source, target = raw_pool(nbytes, 4), raw_pool(nbytes, 4)
    if count is None:
        work = Copy(source.lease(), target.lease())
    else:
        work = Copy(source.lease(count), target.lease(count))
    fence = device[0].enqueue(work, ())
    assert device[1].wait(1) == [(fence, None, False, False)]


def test_small_copies_are_done_at_once_and_large_ones_leave_the_thread(
    device: tuple[HostDevice, Ends],
) -> None:
    host_device, ends = device
    gates = [Gate(), Gate()]
    for gate in gates:
        host_device.enqueue(Launch(gate), ())
        gate.wait_entered()
    limit = host.INLINE_BYTES_MAX
    pools = [raw_pool(size, 2) for size in (limit, limit, limit + 1, limit + 1)]
    small = host_device.enqueue(Copy(filled(pools[0], 1)[0], pools[1].lease()), ())
    assert ends.look() == [(small, None, False, False)]  # no worker is free
    lease = pools[3].lease()
    large = host_device.enqueue(Copy(filled(pools[2], 1)[0], lease), ())
    assert len(ends.look()) == 1
    assert not any(lease.handle.view())
    for gate in gates:
        gate.open()
    assert large in {c.fence for c in ends.wait(4)}
    assert any(lease.handle.view())


def test_no_copy_is_inline_when_told_so() -> None:
    host_device = HostDevice(threads=1, inline_bytes_max=0)
    with started(host_device) as ends:
        gate = Gate()
        host_device.enqueue(Launch(gate), ())
        gate.wait_entered()
        pools = raw_pool(64, 1), raw_pool(64, 1)
        host_device.enqueue(Copy(pools[0].lease(), pools[1].lease()), ())
        assert not ends.look()
        gate.open()
        ends.wait(2)


def test_many_tiny_runs_are_not_inline() -> None:
    work = copy_of(64, 128)
    device = HostDevice(threads=1)
    assert not device._inline(work, work.nbytes)
    assert device._inline(copy_of(64, 64), 4096)


def copy_of(nbytes: int, count: int) -> Copy:
    return Copy(raw_pool(nbytes, count).lease(count), raw_pool(nbytes, count).lease(count))


@pytest.mark.parametrize(("nbytes", "count"), [(8 << 20, 1), (1 << 20, 8)])
def test_a_large_copy_is_shared_by_idle_workers(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, count: int
) -> None:
    together = threading.Barrier(3)
    first: set[int] = set()

    def meet() -> None:
        if threading.get_ident() not in first:
            first.add(threading.get_ident())
            together.wait(PATIENCE)  # passed only when three threads are inside

    real_rows, real_blocks = host._copy_rows, host._copy_blocks

    def rows(given: list[tuple[int, int, int]]) -> None:
        meet()
        real_rows(given)

    def blocks(work: Copy, start: int, stop: int) -> None:
        meet()
        real_blocks(work, start, stop)

    monkeypatch.setattr(host, "_copy_rows", rows)
    monkeypatch.setattr(host, "_copy_blocks", blocks)
    source, target = raw_pool(nbytes, count), raw_pool(nbytes, count)
    src, lease = filled(source, count), target.lease(count)
    host_device = HostDevice(threads=3)
    with started(host_device) as ends:
        host_device.enqueue(Copy(src, lease), ())
        assert ends.wait(1)[0].error is None
    assert contents(lease.handle) == contents(src)
    assert len(first) == 3


def test_a_large_copy_is_not_split_while_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    real = host._copy_blocks

    def blocks(work: Copy, start: int, stop: int) -> None:
        calls.append((start, stop))
        real(work, start, stop)

    monkeypatch.setattr(host, "_copy_blocks", blocks)
    host_device = HostDevice(threads=2)
    with started(host_device) as ends:
        gate = Gate()
        host_device.enqueue(Launch(gate), ())
        gate.wait_entered()
        host_device.enqueue(copy_of(4 << 20, 4), ())
        ends.wait(1)
        gate.open()
        ends.wait(2)
    assert calls == [(0, 4)]


@pytest.mark.parametrize("hands", [2, 3, 4])
@pytest.mark.parametrize(("nbytes", "count"), [(4 << 20, 64), (5000, 3000), (1 << 20, 5)])
def test_parts_of_a_split_batch_cover_every_block_once(nbytes: int, count: int, hands: int) -> None:
    work = copy_of(nbytes, count)
    covered: list[int] = []
    for part in host._parts(work, work.nbytes, hands, 1 << 20):
        assert isinstance(part, functools.partial)
        covered += range(*part.args[1:])
        assert len(range(*part.args[1:])) * nbytes <= 4 << 20
    assert covered == list(range(count))


def test_parts_of_a_split_block_cover_every_byte_once() -> None:
    work = copy_of((9 << 20) + 5, 1)
    rows = []
    for part in host._parts(work, work.nbytes, 2, 1 << 20):
        assert isinstance(part, functools.partial)
        rows += part.args[0]
    assert sum(run for _, _, run in rows) == work.nbytes
    (first,) = host._rows(work)
    assert rows[0][:2] == first[:2]
    for one, two in itertools.pairwise(rows):
        assert two[:2] == (one[0] + one[2], one[1] + one[2])
    assert len(rows) == 9


# case 12, the memory of a copy outlives the caller's references to it.
def test_memory_lives_until_the_copy_has_ended(device: tuple[HostDevice, Ends]) -> None:
    host_device, ends = device
    gates = [Gate(), Gate()]
    for gate in gates:
        host_device.enqueue(Launch(gate), ())
    source, target = raw_pool(1 << 20, 1), raw_pool(1 << 20, 1)
    storages = [weakref.ref(source.storage), weakref.ref(target.storage)]
    host_device.enqueue(Copy(source.lease(), target.lease()), ())
    del source, target
    assert all(storage() is not None for storage in storages)
    for gate in gates:
        gate.open()
    ends.wait(3)
    host_device.close()
    assert all(storage() is None for storage in storages)


# case 10, what a callable raises reaches the caller as a failure.
def test_a_callable_runs_on_a_worker_and_its_error_is_reported(
    device: tuple[HostDevice, Ends],
) -> None:
    host_device, ends = device
    where: list[str] = []

    def fail() -> None:
        where.append(threading.current_thread().name)
        raise ValueError("bad bytes")

    fence = host_device.enqueue(Launch(fail), ())
    (done,) = ends.wait(1)
    assert done.fence is fence
    assert isinstance(done.error, ValueError)
    assert where[0].startswith("kvhold-host-")


def test_external_work_ends_when_told(device: tuple[HostDevice, Ends]) -> None:
    host_device, ends = device
    fence = host_device.enqueue(External(), ())
    assert not ends.look()
    with pytest.raises(TypeError, match="no streams"):
        host_device.finish(fence, object())
    host_device.finish(fence, None)
    assert ends.wait(1) == [(fence, None, False, False)]


def test_other_devices_work_is_refused_by_name() -> None:
    device = HostDevice(threads=1)
    device.check(copy_of(64, 1))
    device.check(Launch(print))
    device.check(External())
    expected = r"host serves \(Copy, host, host\), \(External, host\), \(Launch, host\); found "
    with pytest.raises(WrongDevice, match=expected + r"\(Launch, cuda:0\)"):
        device.check(Launch(print, on="cuda:0"))
    with pytest.raises(WrongDevice, match=expected + r"\(FileRemove\)"):
        device.check(FileRemove(Path("x")))
    work = copy_of(64, 1)
    work.dst.pool.kind = "cuda:1"
    with pytest.raises(WrongDevice, match=expected + r"\(Copy, host, cuda:1\)"):
        device.check(work)
    with pytest.raises(WrongDevice, match="no streams"):
        device.check(Launch(print, stream=object()))


@pytest.mark.parametrize("wrong", [{"inline_bytes_max": -1}, {"split_bytes": 0}])
def test_numbers_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HostDevice(**wrong)  # type: ignore[arg-type] # numbers only


def test_there_is_nothing_to_wait_for_and_no_stream() -> None:
    device = HostDevice()
    assert device.threads <= 4
    assert not device.ordered
    assert not device.can_wait(Fence())
    assert not device.owns_stream(object())
