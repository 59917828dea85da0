"""Ownership on a real GPU when things go wrong."""

import os
import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from tests.gpu.transfer.rig import (
    Breaking,
    cu,
    device,
    fill_device,
    fill_host,
    layout,
    pools,
    same,
    scattered,
    sleep,
)

from transfer import (
    Copy,
    Engine,
    Launch,
    LeaseError,
    OperationFailed,
    PoolExhausted,
    State,
    SubmitError,
)
from transfer.cuda import CudaDevice, PinnedPool, Way

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.may_block]


async def test_cancelled_copies_keep_their_blocks() -> None:  # case 1, case 9
    stream = cu.Stream()
    with pools(8, 8, layout(2)) as (gpu, host):
        async with Engine(device()) as engine:
            for number in range(20):
                pages, slots = gpu.lease(8), host.lease(8)
                gpu.cache("key", 0).fill_(1.0)
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    sleep(3)
                with anyio.move_on_after(0.001) as scope:
                    await engine.copy(pages, slots, after=stream)
                kept = slots.handle
                pages.release()
                slots.release()
                if scope.cancelled_caught and gpu.counts().held:
                    with pytest.raises(PoolExhausted):
                        gpu.lease(8)
                    with pytest.raises(LeaseError):
                        kept[0].tensor("key", 0)
                fresh = await gpu.wait_lease(8)
                gpu.cache("key", 0).fill_(2.0)
                torch.cuda.synchronize()
                again = await host.wait_lease(8)
                seen = again.handle[0].tensor("key", 0)
                assert bool((seen == 1.0).all()), number
                again.handle[0].tensor("key", 0, write=True).zero_()
                fresh.release()
                again.release()
            assert engine.statistics() is not None


@pytest.mark.parametrize(
    ("way", "call"),
    [
        (Way.DMA, "copy"),
        (Way.BATCH, "copy_batch"),
        (Way.STAGED, "copy"),
        (Way.STAGED, "record"),
        (Way.STAGED, "wait"),
        (Way.MAPPED, "wait"),
        (Way.MAPPED, "record"),
    ],
)
async def test_the_nth_call_fails(way: Way, call: str) -> None:  # case 4, case 10
    """For every n until nothing fires: failed once, blocks back, the next copy is right."""
    driver = Breaking()
    with pools(60, 60, layout(2)) as (gpu, host):
        fill_device(gpu)
        async with Engine(device(ways=(way,), driver=driver)) as engine:
            fired = 0
            for nth in range(1, 60):
                pages, slots = gpu.lease(40), host.lease(40)
                driver.fail(call, nth)
                try:
                    await engine.copy(pages, slots, after=())
                except (SubmitError, OperationFailed):
                    fired += 1
                assert not gpu.counts().quarantined
                assert not gpu.counts().held
                done = call in driver.left
                driver.left.clear()
                await engine.copy(pages, slots, after=())
                assert same(pages.handle, slots.handle)
                pages.release()
                slots.release()
                if done:
                    break
            assert fired >= 1


async def test_leaving_waits_for_work_in_flight() -> None:
    stream = cu.Stream()
    with pools(40, 40) as (gpu, host):
        fill_device(gpu)
        pages, slots = gpu.lease(40).handle, host.lease(40).handle
        async with Engine(device()) as engine:
            with torch.cuda.stream(stream):
                sleep(20)
            ops = [
                await engine.submit(Copy(pages[i : i + 4], slots[i : i + 4]), after=stream)
                for i in range(0, 40, 4)
            ]
        assert all(op.state is State.COMPLETED for op in ops)
        assert same(pages, slots)


async def test_a_callable_that_raises_fails_behind_what_it_posted() -> None:
    with pools(1, 1, layout(1)) as (gpu, _host):
        page = gpu.lease().handle

        def broken(stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                sleep(3)
                gpu.cache("key", 0)[page.id].fill_(5.0)
            raise ValueError("half way")

        async with Engine(device()) as engine:
            op = await engine.submit(Launch(broken, writes=(page,), on=gpu.kind), after=())
            assert not op.settled
            with pytest.raises(OperationFailed, match="half way"):
                await op.wait()
            assert bool((gpu.cache("key", 0)[page.id] == 5.0).all())


async def test_reuse_under_pressure(seed: int) -> None:
    """Few pages, many owners: what each stored is what each wrote."""
    chance = np.random.default_rng(seed)
    stream = cu.Stream()
    with pools(24, 400, layout(2)) as (gpu, host):
        fill_host(host)
        wrong: list[int] = []

        async def owner(engine: Engine, number: int) -> None:
            for turn in range(12):
                lease = await gpu.wait_lease(4)
                slots = host.lease(4)
                value = float((number * 12 + turn) % 250 + 1)
                with torch.cuda.stream(stream):
                    for block_id in lease.handle.ids.tolist():
                        gpu.cache("value", 1)[block_id].fill_(value)
                op = await engine.submit(Copy(lease, slots), after=stream)
                lease.release()
                if chance.random() < 0.3:
                    op.cancel()
                    await slots.handle.wait_unheld()
                else:
                    await op.wait()
                if not all((b.tensor("value", 1) == value).all() for b in slots.handle):
                    wrong.append(number)
                slots.release()

        async with Engine(device()) as engine, anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(owner, engine, number)
        assert not wrong


@pytest.mark.parametrize("spin", [0.0, 200e-6, float("inf")])
async def test_every_way_of_waiting_ends(spin: float) -> None:
    with pools(64, 64) as (gpu, host):
        fill_device(gpu)
        pages, slots = scattered(gpu, 30), host.lease(30).handle
        async with Engine(CudaDevice(0, spin=spin)) as engine:
            for _ in range(50):
                await engine.copy(pages[:1], slots[:1], after=())
            await engine.copy(pages, slots, after=())
            assert same(pages, slots)


POISON = """
import anyio, sys, torch
from transfer import *
from transfer.cuda import CudaDevice, DevicePool, PinnedPool
import triton, triton.language as tl

@triton.jit
def wild(at):
    tl.store(at.to(tl.pointer_type(tl.int32)), 1)

async def main(folder):
    plan = BlockLayout.packed([Extent("key", (16, 8, 128), "bfloat16", layer=0)])
    gpu, host, plain = DevicePool(plan, 4), PinnedPool(plan, 4), HostPool(plan, 4)
    async with Engine(CudaDevice(0), HostDevice(), FileDevice(), drain_deadline=5) as engine:
        page, slot = gpu.lease().handle, host.lease().handle
        await engine.copy(page, slot, after=())
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            wild[(1,)](0x123456789000)
        op = await engine.submit(Copy(page, slot), after=stream)
        try:
            await op.wait()
            print("completed")
        except CompletionLost:
            print("lost")
        print("quarantined", gpu.counts().quarantined, host.counts().quarantined)
        try:
            await engine.copy(gpu.lease().handle, host.lease().handle, after=())
            print("accepted")
        except (DevicePoisoned, SubmitError) as error:
            print("refused", type(error).__name__)
        a, b = plain.lease().handle, plain.lease().handle
        a.view(write=True)[:4] = b"disk"
        await engine.run(FileWrite(folder + "/x", a))
        await engine.run(FileRead(folder + "/x", b))
        print(bytes(b.view()[:4]).decode())
    for pool in (gpu, host):
        try:
            pool.close()
            print("closed")
        except PoolBusy:
            print("busy")

try:
    anyio.run(main, sys.argv[1])
except CompletionLost:
    print("drained with losses")
"""


def test_a_lost_context_poisons_its_gpu_alone(tmp_path: Path) -> None:  # case 10, case 11
    script = tmp_path / "poison.py"
    script.write_text(POISON, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-u", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    words = done.stdout.split("\n")
    assert words[:2] == ["lost", "quarantined 1 1"], done.stdout + done.stderr
    assert words[2].startswith("refused")
    assert words[3:6] == ["disk", "busy", "busy"], done.stdout + done.stderr


def test_page_locked_memory_can_be_had_and_given_back() -> None:  # case 83
    steps: list[tuple[int, int]] = []
    pool = PinnedPool(
        layout(2),
        12_000,
        progress=lambda done, whole: steps.append((done, whole)),
        huge_pages=True,
        numa_node="gpu",
    )
    assert pool.placement.nbytes == steps[-1][0] == steps[-1][1]
    assert len(steps) == pool.placement.registrations == 2
    assert torch.frombuffer(pool.storage._map, dtype=torch.uint8).is_pinned()  # type: ignore[attr-defined]
    pool.close()
    assert torch.ones(2, device="cuda").sum().item() == 2
