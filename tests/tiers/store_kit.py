"""A small store with faults at hand, and pages whose right bytes follow from their keys."""

import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from tiers import (
    DiskTier,
    Hit,
    HostTier,
    Keys,
    KVStore,
    PageLayout,
    PageOrder,
    Placement,
    Provenance,
    ScaleScope,
    StaticScales,
)
from tiers._form import Form
from transfer import Blocks, Engine, FileDevice, HostDevice, HostPool, Lease
from transfer.files import SystemCalls

LAYOUT = PageLayout(layers=2, page_size=4, kv_heads=2, head_dim=8, order=PageOrder.NHD)
THROUGH = LAYOUT.encoded(scope=ScaleScope.HEAD)
STATIC = LAYOUT.encoded(scope=None)
SCALES = StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0]])
PROVENANCE = Provenance(model="m", revision="r", layout=LAYOUT)
STATIC_PROVENANCE = Provenance(model="m", revision="r", layout=STATIC, static_scales=SCALES.digest)
POISON = 0xA5


def keys_of(
    pages: int, *, start: int = 0, provenance: Provenance = PROVENANCE, extra: bytes = b""
) -> Keys:
    """Keys of a sequence that begins with token `start`."""
    tokens = [start, *range(1, pages * provenance.layout.page_size)]
    return provenance.keys(tokens, extra=extra)


def _codes() -> "np.ndarray[Any, np.dtype[np.uint16]]":
    """The bfloat16 patterns of every finite e4m3 number, as 448 is the largest of them."""
    import torch

    wide = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    bits: np.ndarray[Any, np.dtype[np.uint16]] = wide.view(torch.int16).numpy().view(np.uint16)
    return bits[[code for code in range(256) if code & 0x7F != 0x7F]]


def page_bytes(digest: bytes, layout: PageLayout = LAYOUT) -> bytes:
    """What the page of a key holds: any keys, values that FP8 with a scale of one has exactly."""
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    out = bytearray(layout.block_layout.nbytes)
    for name in ("key", "value", "value_scale"):
        for extent in layout.block_layout.extents:
            if extent.name != name:
                continue
            count = extent.nbytes // extent.itemsize
            if name == "key":
                data = rng.bytes(extent.nbytes)
            elif name == "value_scale":
                data = rng.uniform(0.5, 2.0, count).astype("<f4").tobytes()
            elif layout.value != "bfloat16":
                data = rng.integers(0, 0x7E, count, dtype=np.uint8).tobytes()
            else:
                values = rng.choice(_codes(), count).reshape(layout.page_size, layout.kv_heads, -1)
                values[0, :, 0] = 0x43E0  # 448 in every head, so that its scale is one
                data = values.tobytes()
            out[extent.offset : extent.offset + extent.nbytes] = data
    return bytes(out)


def fill(pages: Blocks, keys: Keys) -> None:
    """Write what belongs to the keys."""
    for block, digest in zip(pages, keys.digests, strict=False):
        block.view(write=True)[:] = page_bytes(digest, keys.provenance.layout)


def poison(pages: Blocks) -> None:
    """Overwrite pages with what is never right."""
    for block in pages:
        block.view(write=True)[:] = bytes([POISON]) * block.nbytes


def wrong_pages(pages: Blocks, keys: Keys, count: int) -> list[int]:
    """Which of the leading pages do not hold what belongs to their keys."""
    layout = keys.provenance.layout
    return [
        number
        for number, (block, digest) in enumerate(zip(pages, keys.digests, strict=False))
        if number < count and differs(bytes(block.view()), page_bytes(digest, layout), layout)
    ]


def differs(one: bytes, other: bytes, layout: PageLayout = LAYOUT) -> bool:
    """Whether two pages differ in a component; what lies between them does not count."""
    return any(
        one[e.offset : e.offset + e.nbytes] != other[e.offset : e.offset + e.nbytes]
        for e in layout.block_layout.extents
    )


Decide = Callable[[str, str], OSError | None]


class Calls(SystemCalls):
    """System calls that fail as told, and stop where told.

    Attributes:
        made: how many calls were made.
        fail: asked at each call with its name and path or descriptor; what it gives is raised.
        gates: calls by name that wait until the event is set.
        arrived: set when a call waits at a gate.
    """

    def __init__(self) -> None:
        self.made = 0
        self.fired = 0
        self.fail: Decide | None = None
        self.gates: dict[str, threading.Event] = {}
        self.arrived = threading.Event()
        self.short = 0
        self._lock = threading.Lock()

    def nth(self, number: int, error: int = errno.EIO, *, only: Sequence[str] = ()) -> None:
        """Let the call with that number from now on fail, counted among `only` if given."""
        left = [number]

        def fail(name: str, what: str) -> OSError | None:
            if only and name not in only:
                return None
            left[0] -= 1
            if left[0] == 0:
                self.fired += 1
                return OSError(error, os.strerror(error))
            return None

        self.fail = fail

    def every(self, error: int, *, only: Sequence[str]) -> None:
        """Let all calls of these names fail."""
        self.fail = lambda name, _: OSError(error, os.strerror(error)) if name in only else None

    def _at(self, name: str, what: object) -> None:
        gate = self.gates.get(name)
        if gate is not None:
            self.arrived.set()
            if not gate.wait(60):
                raise OSError(errno.ETIMEDOUT, f"nobody opened the gate of {name}")
        with self._lock:
            self.made += 1
            error = None if self.fail is None else self.fail(name, str(what))
        if error is not None:
            raise error

    def open(self, path: Path, flags: int, mode: int) -> int:
        self._at("create" if flags & os.O_CREAT else "open", path)
        return super().open(path, flags, mode)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._at("read", fd)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._at("write", fd)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._at("sync", fd)
        super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self._at("sync", fd)
        super().fsync(fd)

    def link(self, path: Path, name: Path) -> None:
        self._at("link", name)
        super().link(path, name)

    def unlink(self, path: Path) -> None:
        self._at("unlink", path)
        super().unlink(path)

    def close(self, fd: int) -> None:
        super().close(fd)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something holds that no event announces."""
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)


class Rig:
    """An engine, a store, a pool of pages and the files of the store."""

    def __init__(
        self, engine: Engine, store: KVStore, pool: HostPool, calls: Calls, root: Path
    ) -> None:
        self.engine = engine
        self.store = store
        self.pool = pool
        self.calls = calls
        self.root = root
        self.provenance = STATIC_PROVENANCE if store.layout == STATIC else PROVENANCE

    def lease(self, pages: int) -> Lease[Blocks]:
        return self.pool.lease(pages)

    async def put(self, keys: Keys, *, wait: bool = True) -> Any:
        """Put the right pages; they are poisoned as soon as the put has returned."""
        with self.lease(len(keys)) as pages:
            fill(pages, keys)
            ticket = await self.store.put(keys, pages)
            poison(pages)
        if wait:
            await ticket.resident()
        return ticket

    async def get(self, keys: Keys, *, hit: Hit | None = None) -> int:
        """Fetch what is there and check every byte; how many pages."""
        with (
            self.store.lookup(keys) if hit is None else hit as found,
            self.lease(max(1, len(found))) as pages,
        ):
            poison(pages)
            count = await self.store.fetch(found, into=pages)
            assert wrong_pages(pages, keys, count) == []
            return count

    def files(self, pattern: str = "data/*/*") -> list[Path]:
        return sorted(self.root.glob(pattern))

    def check(self) -> None:
        """The books agree with each other and with the files, once drained."""
        store = self.store
        statistics = store.statistics()
        for pool in [self.pool, *store.pools()]:
            counts = pool.counts()
            assert sum(counts) == pool.blocks
            assert counts.held == counts.quarantined == 0
        for pool in store.pools():
            assert pool.counts().leased == 0
        entries = list(store.entries())
        assert all(entry.quiet and entry.flight is None for entry in entries)
        stuck = [removal.entry for removal in store._core.removals.stuck]
        assert sum(statistics.tenants.values()) == sum(e.nbytes for e in [*entries, *stuck])
        disk = statistics.tiers.get("disk")
        if disk is not None and not statistics.stuck_removals:
            sizes = {path.name: path.stat().st_blocks * 512 for path in self.files()}
            named = {str(entry.disk.name) for entry in entries if entry.disk is not None}
            assert set(sizes) == named
            assert disk == (0, sum(sizes.values()), 0, 0)
        host = statistics.tiers.get("host")
        if host is not None:
            held = [entry.host.block.id for entry in entries if entry.host is not None]
            assert len(held) == len(set(held))
            assert host.filling == host.freeing == 0


@asynccontextmanager
async def rig(
    root: Path,
    *,
    placement: Placement = Placement.SPLIT,
    layout: PageLayout = LAYOUT,
    pages: int = 16,
    blocks: int = 16,
    quota: int | None = None,
    durability: Any = "none",
    shared: bool = False,
    calls: Calls | None = None,
    host_device: Any = None,
    recover: bool = True,
    static_scales: StaticScales | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Start everything, and at the end drain, check the books and close."""
    calls = calls or Calls()
    pool = HostPool(layout, pages, name="pages")
    if layout == STATIC and static_scales is None:
        static_scales = SCALES
    form = Form(layout, placement, static_scales=static_scales)
    host = HostTier.of(form.stored, form.host_names, blocks=blocks) if form.host_names else None
    disk = (
        DiskTier(root, quota=quota, durability=durability, shared=shared)
        if form.file_bytes
        else None
    )
    async with Engine(host_device or HostDevice(threads=2), FileDevice(calls=calls)) as engine:
        store = KVStore(
            engine,
            layout=layout,
            placement=placement,
            host=host,
            disk=disk,
            static_scales=static_scales,
            **options,
        )
        async with store:
            if recover:
                await store.recovered()
            made = Rig(engine, store, pool, calls, root)
            yield made
            calls.fail = None
            await store.drain()
            made.check()
    for closing in (pool, host):
        if closing is not None:
            closing.close()
