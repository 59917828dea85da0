"""Pages that show when somebody reads what is not theirs."""

from __future__ import annotations

import anyio
import pytest
import torch
from tests.kvhold import tiny

from kvhold.serving_pages import PageRoom, cache_for, poison, provenance_of
from transfer import Engine, HostDevice
from transfer._work import External

pytestmark = pytest.mark.anyio


async def test_pages_are_taken_zero_and_given_back_as_nan() -> None:
    cache = cache_for(tiny.model(), pages=4, page_size=8)
    room = PageRoom(cache)
    lease = await room.take(3)
    ids = lease.handle.ids
    view = cache.layer(1)
    assert not view.key[ids].any()
    room.give_back(lease)
    assert view.key[ids].isnan().all()
    assert view.value[ids].float().isnan().all()
    assert view.scale[ids].isnan().all()
    assert room.still_held == 0
    untouched = [page for page in range(4) if page not in ids.tolist()]
    assert not view.key[untouched].any()


async def test_pages_that_are_held_are_left_alone_and_counted() -> None:
    cache = cache_for(tiny.model(), pages=4, page_size=8)
    room = PageRoom(cache)
    async with Engine(HostDevice()) as engine:
        lease = await room.take(3)
        ids = lease.handle.ids
        hold = engine.submit_nowait(External(writes=[lease.handle[:2]]), after=())
        room.give_back(lease)
        assert room.still_held == 2
        assert not cache.layer(0).key[ids].any()
        assert cache.pool.counts().free == 2
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.01):
                await room.take(4)
        hold.finish(None)
        again = await room.take(4)
        again.release()


async def test_poison_is_read_by_nobody_who_reads_other_pages() -> None:
    cache = cache_for(tiny.model(), pages=2, page_size=8)
    lease = cache.lease(2)
    poison(cache, lease.handle[:1])
    first, second = lease.handle.ids.tolist()
    for layer in range(cache.layers):
        assert cache.layer(layer).key[first].isnan().all()
        assert torch.equal(cache.layer(layer).key[second], torch.zeros_like(cache.layer(0).key[0]))


async def test_pages_of_another_model_dtype_or_chunk_have_other_keys() -> None:
    cache = cache_for(tiny.model(), pages=1, page_size=8)
    tokens = list(range(8))
    made = [
        provenance_of(model, cache, chunk=chunk).keys(tokens, extra=b"")[0].digest
        for model, chunk in (
            (tiny.model(), 16),
            (tiny.model(torch.float32), 16),
            (tiny.model(), 32),
            (tiny.model(), 16),
        )
    ]
    assert len(set(made)) == 3
    assert made[0] == made[3]
