"""The CPU's rig: prefixes of every length come back from every placement, and are timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console
from tests.kvhold import reports, tiny
from typer.testing import CliRunner

from kvhold.bench.ttft import Prompts, render
from kvhold.bench.ttft_command import report_of
from kvhold.bench.ttft_cpu import PLACES, Where, cpu_rig, fill
from kvhold.cli import app
from kvhold.serving_pages import cache_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.name)
async def test_every_length_comes_back_and_is_timed(where: Where, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    async with cpu_rig(tiny.model(), where, 128, folder) as rig:
        for length in (32, 128):
            restored = await rig.restore(length)
            assert 0 < restored.fetch < restored.seconds
            assert await rig.recompute(length) > 0
        # 3 layers, 2 heads of 16 elements: 2 bytes of key, 1 of value, 4/16 of scale.
        assert rig.bytes_per_token == 3 * 2 * 16 * 3.25
        assert report_of(rig, {}, rounds=1)["model"]["name"] == "tiny"
    assert not folder.exists()


def test_prompts_share_their_beginnings_and_nothing_behind_them() -> None:
    prompts = Prompts(1000, 256)
    short, long = prompts.prompt(64), prompts.prompt(256)
    assert short[:64] == long[:64] == prompts.prefix[:64]
    assert short[64:] == long[256:]
    assert short[64:] != prompts.prefix[64:96]


def test_filled_pages_are_ordinary_numbers() -> None:
    cache = cache_for(tiny.model(), pages=4, page_size=32)
    lease = cache.lease(3)
    fill(cache, lease.handle)
    view = cache.layer(2)
    ids = lease.handle.ids
    assert view.key[ids].float().std() == pytest.approx(1, abs=0.1)
    values = view.value[ids].float() * view.scale[ids][..., None]
    assert torch.isfinite(values).all()
    assert values.abs().max() <= 1


def test_the_table_shows_each_length_and_the_break_even() -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render(reports.ttft()))
    text = shown.get()
    assert "L1 only" in text
    assert "512 ms" in text
    assert "restoring is faster from 111 tokens on" in text


def test_the_command_refuses_what_a_model_does_not_take(tmp_path: Path) -> None:
    model = str(tiny.folder(tmp_path / "model"))
    run = CliRunner().invoke
    shown = run(app, ["bench", "ttft", "--model", model, "--lengths", "32,2048"])
    assert shown.exit_code == 2
    assert "prefixes of 2048 tokens: model takes 1024" in shown.stderr
    shown = run(app, ["bench", "ttft", "--lengths", "33"])
    assert shown.exit_code == 2
    assert "multiples of 32" in shown.stderr
