"""The store against its parts: bare threads on the same files, the encoder alone, the index alone.

Each pair is interleaved: the other way, ours, the other way. A pair's ratio is the other way's time
over ours, so that 1 is as fast and more is faster.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
from rich.table import Table

from kvhold.bench.pairs import Pair, percentile
from kvhold.bench.store_bare import Bare, CodecAlone, Retired
from tiers import (
    DiskTier,
    HostTier,
    KVStore,
    PageLayout,
    PageOrder,
    Placement,
    Provenance,
    ScaleScope,
)
from tiers._form import Form
from tiers._residency import Residency
from tiers._store_writes import Fill
from transfer import Engine, FileDevice, HostDevice, HostPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tiers._index import Index
    from transfer import Blocks

LAYOUT: Final = PageLayout(layers=16, page_size=16, kv_heads=8, head_dim=128, order=PageOrder.NHD)
"""A page of 1 MiB in BF16."""
THROUGH: Final = PageLayout(
    layers=16,
    page_size=16,
    kv_heads=8,
    head_dim=170,
    order=PageOrder.NHD,
    value="float8_e4m3fn",
    value_dim=170,
    scope=ScaleScope.HEAD,
)
"""A page of about 1 MiB with values that are FP8 already."""
PAGES: Final = 256
FILE_THREADS: Final = 4
"""Half of what the store has under way, so that none waits for the loop between two files."""
READ_PAGES: Final = 16
"""Pages on their way back: enough for the files, few enough to stay in a processor's cache."""
UVLOOP: Final = {"use_uvloop": True}
"""The loop that `EngineThread` takes as well."""


def _noise(pages: Blocks) -> None:
    import torch  # noqa: PLC0415 - seconds of import

    for block in pages:
        data = torch.randn(block.nbytes // 2).to(torch.bfloat16)
        block.view(write=True)[: 2 * len(data)] = data.view(torch.uint8).numpy().data
    for extent in pages.pool.layout.extents:
        if extent.name == "value_scale":
            for block in pages:
                block.tensor(extent.name, extent.layer, write=True).fill_(1.0)
        elif extent.dtype.startswith("float8"):
            for block in pages:
                raw = block.tensor(extent.name, extent.layer, write=True).view(torch.uint8)
                raw.bitwise_and_(0x77)


async def _files(
    folder: Path, layout: PageLayout, placement: Placement, rounds: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Interleaved rounds of put and fetch against bare threads: (theirs, ours, theirs)."""
    form = Form(layout, placement)
    pool = HostPool(layout, PAGES)
    host = HostTier.of(form.stored, form.host_names, blocks=PAGES) if form.host_names else None
    disk = DiskTier(folder / "tier")
    provenance = Provenance(model="bench", revision="1", layout=layout)
    retired = Retired(folder / "retired")
    bare = Bare(folder, form.file_bytes, PAGES, retired)
    found: dict[str, list[tuple[float, float, float]]] = {"put": [], "fetch": []}
    async with Engine(HostDevice(), FileDevice(threads=FILE_THREADS)) as engine:
        with pool.lease(PAGES) as pages, CodecAlone(engine, form, pages) as codec:
            _noise(pages)
            async with KVStore(
                engine,
                layout=layout,
                placement=placement,
                host=host,
                disk=disk,
                write_behind_bytes=2 * PAGES * form.file_bytes,
                read_bytes=READ_PAGES * form.file_bytes,
            ) as store:
                await store.recovered()
                for number in range(rounds + 1):
                    keys = provenance.keys([number] * (PAGES * layout.page_size), extra=b"")
                    gc.collect()
                    before = await _theirs(codec.encode, bare.write, placement)
                    begun = time.perf_counter()
                    await (await store.put(keys, pages)).resident()
                    ours = time.perf_counter() - begun
                    after = await _theirs(codec.encode, bare.write, placement)
                    found["put"].append((before, ours, after))
                    before = await _theirs(codec.decode, bare.read, placement)
                    begun = time.perf_counter()
                    with store.lookup(keys) as hit:
                        count = await store.fetch(hit, into=pages)
                    ours = time.perf_counter() - begun
                    if count != PAGES:
                        raise RuntimeError(f"{count} of {PAGES} pages came back")
                    after = await _theirs(codec.decode, bare.read, placement)
                    found["fetch"].append((before, ours, after))
                    _retire(store, disk, retired)
                    store.remove(keys)
                    await store.drain()
    bare.close()
    retired.close()
    pool.close()
    if host is not None:
        host.close()
    return {name: times[1:] for name, times in found.items()}


def _retire(store: KVStore, disk: DiskTier, retired: Retired) -> None:
    """Keep the inodes of the store's files, whose names are removed next."""
    for entry in store.entries():
        if entry.disk is not None:
            retired.keep(disk.path(entry.disk))


async def _theirs(
    codec: Callable[[], Awaitable[float]], files: Callable[[], float], placement: Placement
) -> float:
    """Bare threads; for the split placement, the codec alone and then bare threads."""
    alone = await codec() if placement is Placement.SPLIT else 0.0
    return alone + files()


def _pair(name: str, times: list[tuple[float, float, float]], nbytes: int, target: float) -> Pair:
    ratios = [(a + c) / 2 / b for a, b, c in times]
    same = [c / a for a, _, c in times]
    theirs = statistics.median([t for a, _, c in times for t in (a, c)])
    return Pair(
        name,
        nbytes / statistics.median([b for _, b, _ in times]) / 1e9,
        nbytes / theirs / 1e9,
        "GB/s",
        statistics.median(ratios),
        (percentile(same, 10), percentile(same, 90)),
        target,
        len(times),
    )


def files(rounds: int, folder: Path) -> list[Pair]:
    """Put and fetch of 256 pages of 1 MiB against bare O_DIRECT threads, in every placement."""
    pairs = []
    for title, layout, placement in (
        ("whole disk", LAYOUT, Placement.WHOLE_DISK),
        ("byte-through, whole disk", THROUGH, Placement.WHOLE_DISK),
        ("split", LAYOUT, Placement.SPLIT),
    ):
        with tempfile.TemporaryDirectory(dir=folder, prefix="kvhold-bench-") as name:
            times = anyio.run(_files, Path(name), layout, placement, rounds, backend_options=UVLOOP)
        nbytes = PAGES * Form(layout, placement).file_bytes
        alone = {"put": "", "fetch": ""}
        if placement is Placement.SPLIT:
            alone = {"put": "encoder alone + ", "fetch": "decoder alone + "}
        pairs += [
            _pair(f"{verb}, {title} (against {other}bare threads)", times[verb], nbytes, 0.9)
            for verb, other in alone.items()
        ]
    return pairs


def hashing() -> float:
    """Microseconds for the key of one page of 16 tokens, from a list of Python integers."""
    provenance = Provenance(model="bench", revision="1", layout=LAYOUT)
    tokens = [random.randrange(128000) for _ in range(16 * 4096)]
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        keys = provenance.keys(tokens, extra=b"")
        times.append((time.perf_counter() - begun) / len(keys))
    return 1e6 * statistics.median(times)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _entries(count: int, provenance: Provenance) -> Iterator[bytes]:
    tokens = itertools.count()
    for _ in range(count // 128):
        yield from provenance.keys([next(tokens)] * (128 * 16), extra=b"").digests


def index(count: int = 1_000_000) -> dict[str, float]:
    """Look-ups of 128-page prefixes among `count` records of split pages, and their memory."""
    provenance = Provenance(model="bench", revision="1", layout=LAYOUT)
    form = Form(LAYOUT, Placement.SPLIT)
    small = PageLayout(layers=1, page_size=1, kv_heads=1, head_dim=1, order=PageOrder.NHD)
    host = HostTier.of(Form(small, Placement.SPLIT).stored, ("key",), blocks=count)
    form.host_bytes = 1  # the records are those of large pages, the memory behind them is not
    disk = DiskTier("unused")
    digests = list(_entries(count, provenance))
    gc.collect()
    gc.disable()
    before = _resident_bytes()
    core = _bare_core(form, host, disk)
    for number, digest in enumerate(digests):
        fill = core.reserve(
            digest,
            provenance.digest,
            tenant="",
            depth=number % 128,
            stamp=0,
            raw=False,
            own=0,
            want=1,
        )
        assert isinstance(fill, Fill)  # noqa: S101 - there is room for all
        fill.entry.pending = 1
        if fill.stage is not None:
            fill.stage.release()
        core.end_part(fill.entry)
    memory = (_resident_bytes() - before) / count
    gc.enable()
    gc.freeze()
    figures = {"index memory (bytes per page)": memory}
    chains = [digests[start : start + 128] for start in range(0, count - 127, 128)]
    random.shuffle(chains)
    figures["look-up along a chain (us per page)"] = _lookups(core.index, chains[:2000])
    mixed = random.choices(digests, k=128 * 2000)
    groups = [mixed[start : start + 128] for start in range(0, len(mixed), 128)]
    figures["look-up in random order (us per page)"] = _lookups(core.index, groups)
    gc.unfreeze()
    return figures


def _bare_core(form: Form, host: HostTier, disk: DiskTier) -> Any:
    from tiers._form import Stages  # noqa: PLC0415 - inside of the store, for this alone
    from tiers._store_core import Core  # noqa: PLC0415 - as above

    engine = Engine(HostDevice(threads=1), FileDevice(threads=1))
    return Core(engine, form, host=host, disk=disk, writes=Stages(form, 4, name="bench"))


def _lookups(found: Index, groups: list[list[bytes]]) -> float:
    times = []
    for digests in groups:
        begun = time.perf_counter()
        entries = found.leading(digests)
        times.append((time.perf_counter() - begun) / len(digests))
        if len(entries) != len(digests) or entries[0].residency is not Residency.RESIDENT:
            raise RuntimeError(f"{len(entries)} of {len(digests)} pages were found")
    return 1e6 * statistics.median(times)


def figures(count: int = 1_000_000) -> dict[str, float]:
    """Everything that is not a pair."""
    return {"hashing (us per page of 16 tokens)": hashing(), **index(count)}


def bytes_by_tier() -> Table:
    """What a 1 MiB page of BF16 takes where, headers and padding included."""
    table = Table(title="bytes of a page of 1,048,576 bytes in BF16")
    for heading in ("placement", "host", "disk", "share of BF16"):
        table.add_column(heading, justify="left" if heading == "placement" else "right")
    wide = LAYOUT.block_layout.nbytes
    for placement in Placement:
        form = Form(LAYOUT, placement)
        share = (form.host_bytes + form.file_bytes) / wide
        table.add_row(
            placement.value, f"{form.host_bytes:,}", f"{form.file_bytes:,}", f"{share:.3f}"
        )
    return table
