"""The folder: names that lead back to keys, live and dead writers, leftovers."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers.store_kit import PROVENANCE, keys_of

from tiers import TierBusy, TierError
from tiers import _folder as module
from tiers._folder import ASIDE_MAX, SHARDS, Folder, Name

KEY = bytes(range(32))
SOURCE = Path(__file__).parent.parent.parent / "src"


def put_id(writer: bytes, number: int = 1) -> bytes:
    return writer + number.to_bytes(8, "big")


def leave(folder: Folder, name: Name, size: int = 4096) -> Path:
    path = folder.path(name)
    path.write_bytes(b"x" * size)
    return path


def test_a_name_leads_back_to_its_key_and_put() -> None:
    # case 34 (file names)
    for kind in ("whole", "part"):
        for temporary in (False, True):
            name = Name(KEY, bytes(range(16)), kind, temporary)
            assert Name.parse(str(name)) == name
            assert len(str(name)) <= 143
            assert set(str(name)) <= set("0123456789abcdefghijklmnopqrstuvwxyz-.")
    good = str(Name(KEY, bytes(16), "whole"))
    for bad in ("", "..", good + "x", good.upper(), "../" + good, good[1:], good.replace("-", "_")):
        assert Name.parse(bad) is None


def test_every_path_stays_below_the_root(tmp_path: Path) -> None:
    # case 34 (slashes, dots and NUL in what a key is made of)
    folder = Folder(tmp_path, shared=False)
    for model in ("../../etc/passwd", "/etc/passwd", "a\0b", "..", ""):
        provenance = PROVENANCE.__class__(
            model=model, revision=model, tenant=model, layout=PROVENANCE.layout
        )
        for digest in keys_of(3, provenance=provenance, extra=model.encode()).digests:
            path = folder.path(Name(digest, bytes(16), "whole"))
            assert path.resolve().is_relative_to(tmp_path.resolve() / "data")


def test_folders_and_files_are_the_owners_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new", shared=False)
    folder.open()
    try:
        for path in [folder.root, *folder.root.rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600)
        assert len(SHARDS) == 256
    finally:
        folder.close()


def test_one_writer_unless_all_share(tmp_path: Path) -> None:
    alone = Folder(tmp_path, shared=False)
    alone.open()
    for shared in (False, True):
        with pytest.raises(TierBusy, match="another writer"):
            Folder(tmp_path, shared=shared).open()
    alone.close()
    alone.close()
    first, second = Folder(tmp_path, shared=True), Folder(tmp_path, shared=True)
    first.open()
    second.open()
    assert first.writer != second.writer
    with pytest.raises(TierBusy):
        Folder(tmp_path, shared=False).open()
    first.close()
    second.close()
    assert list((tmp_path / "writers").iterdir()) == []
    Folder(tmp_path, shared=False).open()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    # case 29 (crash leftovers; a live writer's are left alone)
    living, looking = Folder(tmp_path, shared=True), Folder(tmp_path, shared=True)
    living.open()
    looking.open()
    dead = b"deadbeef"
    names = {
        (who, kind, temporary): Name(KEY, put_id(writer, number), kind, temporary)
        for number, (who, writer) in enumerate([("dead", dead), ("living", living.writer)])
        for kind in ("whole", "part")
        for temporary in (False, True)
    }
    paths = {key: leave(looking, name) for key, name in names.items()}
    stranger = looking.path(names["dead", "whole", False]).with_name("README")
    stranger.write_bytes(b"y" * 100)
    found = looking.scan("00")
    assert [item.name for item in found.whole] == [names["dead", "whole", False]]
    assert (found.temporaries, found.orphans) == (2, 1)
    assert found.live_bytes == 4 * 4096 + stranger.stat().st_blocks * 512
    left = {key for key, path in paths.items() if path.exists()}
    assert left == {key for key in paths if key[0] == "living"} | {("dead", "whole", False)}
    living.close()
    again = Folder(tmp_path, shared=True)
    again.open()
    assert again.scan("00").temporaries == 2
    looking.close()
    again.close()


def test_a_forked_child_does_not_keep_a_writer_alive(tmp_path: Path) -> None:
    folder = Folder(tmp_path, shared=True)
    folder.open()
    writer = folder.writer
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)  # the child runs, and has closed what it inherited
        other = Folder(tmp_path, shared=True)
        other.open()
        assert other.lives(writer)
        folder.drop_locks()  # as when the parent dies
        assert not other.lives(writer)
        other.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def test_a_killed_writer_is_dead(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tiers._folder import Folder;"
        "f = Folder(Path(sys.argv[1]), shared=True); f.open();"
        "print(f.writer.hex(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env={"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        writer = bytes.fromhex(child.stdout.readline())
        folder = Folder(tmp_path, shared=True)
        folder.open()
        assert folder.lives(writer)
        assert folder.clear_writers() == 0
        child.kill()
        child.wait()
        assert folder.clear_writers() == 1
        assert not folder.lives(writer)
        folder.close()


def test_an_announcement_that_was_taken_for_dead_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = Folder(tmp_path, shared=True), Folder(tmp_path, shared=True)
    other.open()
    first = folder.writer
    lock = module._lock
    struck: list[Path] = []

    def meddle(fd: int, operation: int) -> bool:
        path = tmp_path / "writers" / first.hex()
        if path.exists() and not struck:
            struck.append(path)
            path.unlink()  # a scan between the making of the file and its lock
        return lock(fd, operation)

    monkeypatch.setattr(module, "_lock", meddle)
    folder.open()
    assert struck
    assert folder.writer != first
    assert other.lives(folder.writer)
    folder.close()
    other.close()


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    folder = Folder(tmp_path, shared=False)
    with pytest.raises(TierError, match="no flock"):
        folder.open()
    assert folder._fds == []


def test_what_is_set_aside_is_bounded(tmp_path: Path) -> None:
    folder = Folder(tmp_path, shared=False)
    folder.open()
    for number in range(ASIDE_MAX + 5):
        name = Name(KEY, put_id(folder.writer, number), "whole")
        leave(folder, name, 10)
        folder.set_aside(name)
        folder.set_aside(name)  # it is gone already
        assert not folder.path(name).exists()
    assert len(list((tmp_path / "aside").iterdir())) == ASIDE_MAX
    folder.close()


def test_what_vanished_is_made_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a", shared=True)
    folder.open()
    (tmp_path / "a").rename(tmp_path / "b")
    folder.repair()
    other = Folder(tmp_path / "a", shared=True)
    other.open()
    assert other.lives(folder.writer)
    other.close()
    folder.close()
