"""The other side of the store bench moves what it says, in new files, and keeps what it retires."""

from pathlib import Path

import pytest

from kvhold.bench.store import LAYOUT, _noise
from kvhold.bench.store_bare import Bare, CodecAlone, Retired
from tiers import Placement
from tiers._form import Form
from transfer import Engine, HostDevice, HostPool

pytestmark = pytest.mark.anyio


def test_bare_threads_move_whole_new_files(tmp_path: Path) -> None:
    retired = Retired(tmp_path / "retired")
    bare = Bare(tmp_path, 8192, 3, retired)
    assert bare.write() > 0
    first = {path.name: path.stat().st_ino for path in tmp_path.glob("bare-*")}
    assert {path.read_bytes() for path in tmp_path.glob("bare-*")} == {b"\x5a" * 8192}
    assert bare.write() > 0
    second = {path.name: path.stat().st_ino for path in tmp_path.glob("bare-*")}
    assert len(first) == len(second) == 3
    assert not set(first) & set(second)
    assert not set(first.values()) & set(second.values())
    assert bare.read() > 0
    bare.close()
    retired.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_has_become_short_is_noticed(tmp_path: Path) -> None:
    retired = Retired(tmp_path / "retired")
    bare = Bare(tmp_path, 8192, 2, retired)
    bare.write()
    next(tmp_path.glob("bare-*")).write_bytes(bytes(4096))
    with pytest.raises(RuntimeError, match="1 of 2"):
        bare.read()
    bare.close()


def test_a_retired_file_keeps_its_inode_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(5000))
    inode = path.stat().st_ino
    retired = Retired(tmp_path / "retired")
    retired.keep(path)
    path.unlink()
    (kept,) = (tmp_path / "retired").iterdir()
    assert (kept.stat().st_ino, kept.stat().st_size) == (inode, 0)
    retired.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("placement", [Placement.SPLIT, Placement.WHOLE_DISK])
async def test_the_codec_alone_does_the_whole_work(placement: Placement) -> None:
    form = Form(LAYOUT, placement)
    with HostPool(LAYOUT, 2) as pool, pool.lease(2) as pages:
        _noise(pages)
        async with Engine(HostDevice()) as engine:
            with CodecAlone(engine, form, pages) as codec:
                assert await codec.encode() > 0
                wanted = [page.tensor("value", layer=3).clone() for page in pages]
                for page in pages:
                    page.tensor("value", layer=3, write=True).zero_()
                assert await codec.decode() > 0
        for page, values in zip(pages, wanted, strict=True):
            error = (page.tensor("value", layer=3) - values).abs().max()
            assert 0 < error < 0.25
