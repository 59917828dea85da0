"""The GPU's rig on a GPU that is not there: a small model on the CPU, pages that claim to be a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.transfer import gpu_kit

from kvhold.bench import ttft_gpu
from kvhold.bench.ttft_cpu import PLACES, Where, fill
from kvhold.bench.ttft_gpu import GEOMETRY, LINK, PAGE, gpu_rig, make_model, run_gpu
from kvhold.serving_pages import cache_for
from tiers import TierError
from transfer.cuda import CudaDevice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from attention import PagedKVCache
    from kvhold.model import LanguageModel

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[LanguageModel]:
    """A small model; streams and pages are a stand-in's."""
    driver = gpu_kit.FakeDriver()
    stream = gpu_kit.CoreStream(driver.stream())

    def device(ordinal: int) -> CudaDevice:
        return CudaDevice(ordinal, driver=driver, kernels=gpu_kit.FakeKernels(driver))

    def pages(*args: Any, **options: Any) -> PagedKVCache:
        cache = cache_for(*args, **options)
        cache.pool.storage.kind = cache.pool.kind = "cuda:0"
        return cache

    def slots(layout: Any, blocks: int, *, name: str) -> Any:
        assert name
        return gpu_kit.pinned_pool(layout, blocks, driver)

    monkeypatch.setattr(ttft_gpu, "CudaDevice", device)
    monkeypatch.setattr(ttft_gpu, "PinnedPool", slots)
    monkeypatch.setattr(ttft_gpu, "cache_for", pages)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _ordinal: "no GPU")
    yield make_model(2, device="cpu", **SMALL)
    driver.stop()


def test_random_weights_are_the_same_every_time() -> None:
    one, other = (make_model(2, device="cpu", **SMALL) for _ in range(2))
    assert GEOMETRY.keys() == SMALL.keys()
    assert one.network.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    assert one.geometry == other.geometry
    assert one.geometry.layers == 2
    assert "500000" in one.rope
    for left, right in zip(one.network.parameters(), other.network.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("where", [None, *PLACES], ids=lambda w: "link" if w is None else w.name)
async def test_every_length_comes_back_and_is_timed(
    where: Where | None, model: LanguageModel, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    async with gpu_rig(model, where, 128, folder) as rig:
        for length in (PAGE, 64, 128):
            restored = await rig.restore(length)
            assert 0 < restored.fetch < restored.seconds
            assert await rig.recompute(length) > 0
        # 2 layers, 2 heads of 16 elements: 2 bytes of key, 1 of value, 4/16 of scale.
        assert rig.bytes_per_token == 2 * 2 * 16 * 3.25
    assert not folder.exists()


@pytest.mark.parametrize("where", [None, *PLACES], ids=lambda w: "link" if w is None else w.name)
async def test_what_comes_back_is_what_was_there(
    where: Where | None, model: LanguageModel, tmp_path: Path
) -> None:
    """Every bit of every page, after it went to the tiers and came back to zeroed pages."""
    async with gpu_rig(model, where, 128, tmp_path / "files") as rig:
        cache = rig._room.cache
        lease = await rig._room.take(8)
        keys = rig._provenance.keys(rig._prompts.prompt(128), extra=b"")
        assert await rig._fetch(keys, lease.handle) == 8
        found = bits(cache, lease.handle.ids)
        fill(cache, lease.handle)
        wanted = bits(cache, lease.handle.ids)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
            assert int(one.count_nonzero()) > 0
        rig._room.give_back(lease)


def bits(cache: PagedKVCache, ids: Any) -> list[torch.Tensor]:
    rows = torch.from_numpy(ids.copy())
    found = []
    for layer in range(cache.layers):
        view = cache.layer(layer)
        found += [view.key.view(torch.int16)[rows], view.value.view(torch.uint8)[rows]]
        found.append(view.scale.view(torch.int32)[rows])
    return found


async def test_pages_that_do_not_come_back_are_no_measurement(
    model: LanguageModel, tmp_path: Path
) -> None:
    async with gpu_rig(model, None, 64, tmp_path / "files") as rig:
        rig._known.popitem()
        with pytest.raises(TierError, match="3 pages of 64 tokens came back"):
            await rig.restore(64)
        assert (await rig.restore(32)).seconds > 0


async def test_all_placements_one_after_the_other(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttft_gpu, "make_model", lambda layers: model)
    steps: list[str] = []
    kept: list[dict[str, Any]] = []
    report = await run_gpu(
        (32, 64), rounds=1, folder=tmp_path, progress=steps.append, keep=kept.append, layers=2
    )
    assert next(iter(report["placements"])) == LINK
    assert len(report["placements"]) == len(kept) == 1 + len(PLACES)
    assert len(steps) == 2 * len(kept)
    assert report["gpu"] == "no GPU"
    assert "random weights" in report["model"]["name"]
    for placement in report["placements"].values():
        assert [point["length"] for point in placement["points"]] == [32, 64]
