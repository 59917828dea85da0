"""The store against LMCache's file-system adapter, alternated, on files of the same number and size.

The adapter stores bytes as they are; the store is given values that are FP8 already, which it stores as
they are, with checksums, identity and an index. Both bypass the page cache.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from kvhold.bench import store as bench
from tiers import DiskTier, KVStore, Placement, Provenance
from tiers._form import Form
from transfer import Engine, FileDevice, HostDevice, HostPool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from kvhold.bench.pairs import Pair

SCRIPT: Final = Path(__file__).with_name("_lmcache_files.py")


class Peer:
    """The other program.

    Args:
        command: how it is started, without its arguments.
        folder: where it keeps files.
        count: objects.
        nbytes: of each.
    """

    def __init__(self, command: Sequence[str], folder: Path, count: int, nbytes: int) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - the caller names its own interpreter
            [*command, str(folder), str(count), str(nbytes), "direct"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        ready = False
        try:
            self._answer("ready")
            ready = True
        finally:
            if not ready:
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the other program end."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()

    def ask(self, verb: str, number: int) -> float:
        """Seconds that ``store`` or ``load`` of a round took."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(f"{verb} {number}\n")
        self._process.stdin.flush()
        return float(self._answer("seconds"))

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        for line in self._process.stdout:
            first, _, rest = line.partition(" ")
            if first.strip() == word:
                return rest
        raise RuntimeError("the other program ended")


async def _rounds(
    command: Sequence[str], folder: Path, rounds: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Alternate; (theirs, ours, theirs) of every round, after one that is not counted."""
    layout, pages = bench.THROUGH, bench.PAGES
    form = Form(layout, Placement.WHOLE_DISK)
    provenance = Provenance(model="bench", revision="1", layout=layout)
    found: dict[str, list[tuple[float, float, float]]] = {"put": [], "fetch": []}
    with (
        HostPool(layout, pages) as pool,
        Peer(command, folder / "theirs", pages, form.file_bytes) as peer,
    ):
        async with (
            Engine(HostDevice(), FileDevice(threads=bench.FILE_THREADS)) as engine,
            KVStore(
                engine,
                layout=layout,
                placement=Placement.WHOLE_DISK,
                disk=DiskTier(folder / "ours"),
                write_behind_bytes=2 * pages * form.file_bytes,
                read_bytes=bench.READ_PAGES * form.file_bytes,
            ) as store,
        ):
            await store.recovered()
            with pool.lease(pages) as blocks:
                bench._noise(blocks)
                for number in range(rounds + 1):
                    keys = provenance.keys([number] * (pages * layout.page_size), extra=b"")
                    before = peer.ask("store", 2 * number)
                    begun = time.perf_counter()
                    await (await store.put(keys, blocks)).resident()
                    ours = time.perf_counter() - begun
                    found["put"].append((before, ours, peer.ask("store", 2 * number + 1)))
                    before = peer.ask("load", 2 * number)
                    begun = time.perf_counter()
                    with store.lookup(keys) as hit:
                        await store.fetch(hit, into=blocks)
                    ours = time.perf_counter() - begun
                    found["fetch"].append((before, ours, peer.ask("load", 2 * number + 1)))
                    store.remove(keys)
                    await store.drain()
    return {name: times[1:] for name, times in found.items()}


def lmcache(rounds: int, folder: Path, python: Path) -> list[Pair]:
    """Put and fetch against LMCache; its interpreter is `python`."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvhold-bench-") as name:
        times = anyio.run(
            _rounds,
            [str(python), str(SCRIPT)],
            Path(name),
            rounds,
            backend_options=bench.UVLOOP,
        )
    nbytes = bench.PAGES * Form(bench.THROUGH, Placement.WHOLE_DISK).file_bytes
    return [
        bench._pair(f"{verb} (against LMCache, direct)", times[verb], nbytes, 1.0)
        for verb in ("put", "fetch")
    ]
