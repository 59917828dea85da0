"""The books of a store: capacity, doom, generations, stuck removals; each output to its own tier."""

import errno
import itertools
import random
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from tests.tiers.store_kit import LAYOUT, PROVENANCE, keys_of, page_bytes, rig, until

from tiers import Placement, PutFailed
from tiers._form import dense, memory
from tiers.codec import K16V8Codec

pytestmark = pytest.mark.anyio
ON_DISK = pytest.mark.parametrize("placement", [Placement.SPLIT, Placement.WHOLE_DISK])


@pytest.mark.may_block
@ON_DISK
async def test_bytes_are_exact_after_every_step(
    tmp_path: Path, placement: Placement, seed: int
) -> None:
    # case 26 (random put, repeat, remove, failed put, evict)
    dice = random.Random(seed)
    others = itertools.count(10)
    quota = 6 * (12288 if placement is Placement.SPLIT else 16384)
    async with rig(tmp_path, placement=placement, blocks=6, quota=quota) as it:
        for number in range(400):
            keys = keys_of(dice.randint(1, 3), start=dice.randrange(5))
            verb = dice.choice(["put", "put", "put", "remove", "evict", "fail"])
            if verb == "fail":
                it.calls.nth(1, errno.EIO, only=["write"])
            if verb in {"put", "fail"}:
                ticket = await it.put(keys, wait=False)
                assert len(ticket.refused) + ticket.stored + ticket.present == len(keys)
            elif verb == "remove":
                it.store.remove(keys)
            else:
                it.store.evict(dice.randint(1, 2))
            await it.store.drain()
            it.calls.fail = None
            it.check()
            assert it.store.statistics().tiers["disk"].charged <= quota
            if number % 20 == 0:
                while it.store.health().degraded:  # only a page that is not there yet is written
                    await it.put(keys_of(1, start=next(others)), wait=False)
                    await it.store.drain()
                    await anyio.sleep(0.01)
        found = it.store.statistics()
        assert found.offered >= found.stored + found.failed + sum(found.refused.values())


@ON_DISK
async def test_a_late_write_of_an_old_put_changes_nothing(
    tmp_path: Path, placement: Placement
) -> None:
    # case 21 (generations)
    keys = keys_of(2)
    async with rig(tmp_path, placement=placement) as it:
        gate = it.calls.gates["write"] = threading.Event()
        old = await it.put(keys, wait=False)
        await until(it.calls.arrived.is_set)
        it.store.remove(keys)
        del it.calls.gates["write"]
        new = await it.put(keys)
        assert new.stored == 2
        gate.set()
        await old.gone()
        assert await it.get(keys) == 2
        assert len(it.files()) == 2


async def test_a_file_that_cannot_be_removed_counts_until_it_is_gone(tmp_path: Path) -> None:
    keys = keys_of(2)
    async with rig(tmp_path, placement=Placement.WHOLE_DISK) as it:
        ticket = await it.put(keys)
        it.calls.every(errno.EROFS, only=["unlink"])
        assert it.store.evict(2) == 2
        await it.store.drain()
        found = it.store.statistics()
        assert found.stuck_removals == 2
        assert found.tiers["disk"].freeing == 2 * it.store.form.file_bytes
        assert found.health.degraded
        it.calls.fail = None
        with anyio.fail_after(30):
            while it.store.statistics().stuck_removals:
                await it.put(keys_of(1, start=3), wait=False)
                await it.store.drain()
                await anyio.sleep(0.01)
        await ticket.gone()


async def test_each_output_reaches_its_tier_with_its_own_bytes(tmp_path: Path) -> None:
    """With X the bytes of the FP8 values: 3X together, 2X in host memory and 1X on disk when split."""
    layout = replace(LAYOUT, layers=4, page_size=16, kv_heads=4, head_dim=64, value_dim=64)
    keys = keys_of(2, provenance=replace(PROVENANCE, layout=layout))
    codec = K16V8Codec(layout)
    plain = layout.component("value").nbytes // 2
    async with rig(tmp_path, layout=layout) as it:
        await it.put(keys)
        form = it.store.form
        for entry, digest in zip(it.store.entries(), keys.digests, strict=True):
            page = page_bytes(digest, layout)
            ends = {name: layout.block_layout.extent(name, 0).offset for name in codec.inputs}
            source = {n: page[at:][: layout.component(n).nbytes] for n, at in ends.items()}
            into = {name: bytearray(out.capacity) for name, out in codec.outputs.items()}
            codec.encode(source, into)
            assert entry.host is not None
            assert entry.disk is not None
            assert it.store._disk is not None
            pool = entry.host.block.pool
            places = dense(pool.layout, form.stored, ("key",))
            held = memory(pool, entry.host.block.id, places or {}, form.stored)
            assert bytes(held["key"]) == bytes(into["key"]) == bytes(source["key"])
            blob = memoryview(it.store._disk.path(entry.disk).read_bytes())
            assert form.blob is not None
            for name in ("value", "value_scale"):
                assert bytes(form.blob.plan.view(blob, name)) == bytes(into[name])
            assert b"".join(bytes(source["key"][i : i + 64]) for i in (0, 64)) not in bytes(blob)
        assert form.host_bytes == 2 * plain
        assert form.disk_parts[0].nbytes == plain
    async with rig(tmp_path / "whole", layout=layout, placement=Placement.WHOLE_DISK) as it:
        assert sum(p.nbytes for p in it.store.form.disk_parts[:2]) == 3 * plain


@ON_DISK
async def test_the_end_of_a_write_that_cannot_be_learnt(
    tmp_path: Path, placement: Placement
) -> None:
    # case 11 (a lost event)
    keys = keys_of(1)
    async with rig(tmp_path, placement=placement) as it:
        gate = it.calls.gates["write"] = threading.Event()
        ticket = await it.put(keys, wait=False)
        await until(it.calls.arrived.is_set)
        (op,) = [op for op in it.engine.holders() if op.name == "write behind"]
        it.engine._ledger.lose(op, TimeoutError("lost"))
        with pytest.raises(Exception, match="cannot be learnt"):
            await ticket.resident()
        assert it.store.match(keys) == 0
        charged = it.store.statistics().tiers["disk"]
        assert charged.filling + charged.freeing == it.store.form.file_bytes
        gate.set()
        await until(lambda: not op.lane.lost)
        await ticket.gone()
        assert it.files() == []
        await it.put(keys)
        assert await it.get(keys) == 1


async def test_put_failed_is_told_of_many_pages() -> None:
    error = PutFailed(dict.fromkeys(range(20), "disk full"))
    assert "20 pages are not resident: 0 (disk full)" in str(error)
    assert str(error).endswith("and 12 more")
