"""PinnedPool: host memory of our own, mapped, then page-locked, and given back in reverse."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from transfer._cuda_api import CudaError
from transfer._cuda_driver import CudaDriver
from transfer._errors import TransferError, WrongPool
from transfer._memory import Pool
from transfer._storage import PAGE, MappedStorage, Plane, _kept, keep_for_ever

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer._cuda_api import Driver
    from transfer._extent import HasBlockLayout

REGISTRATION: Final = 64 << 30
"""Bytes of one registration at most; larger ones fail on some machines."""
STEP: Final = 1 << 30
"""Bytes of one registration when progress is asked for: page-locking takes about 0.5 s for each."""
MAP_HUGETLB: Final = 0x40000
HUGE_PAGE: Final = 2 << 20
_MBIND: Final = 237
_MPOL_BIND: Final = 2

_log = logging.getLogger("kvhold.transfer")


class PinFailed(TransferError):
    """Memory could not be page-locked; nothing is registered or mapped any more."""


class Placement(NamedTuple):
    """What was really done about the pages of a pool.

    Attributes:
        nbytes: bytes mapped.
        registrations: how many pieces were page-locked.
        page_bytes: size of the pages by the kernel's account; 0 when it gives none.
        huge: ``"reserved"``, ``"advised"`` or ``"no"``: which kind of huge page was asked for last.
        nodes: bytes on each NUMA node; empty when the kernel gives no account.
        bound: NUMA node that the memory was bound to, or None.
        notes: what was asked for and could not be had.
    """

    nbytes: int
    registrations: int
    page_bytes: int
    huge: str
    nodes: dict[int, int]
    bound: int | None
    notes: tuple[str, ...]


def gpu_node(bus_id: str) -> int | None:
    """NUMA node of a PCI device, from sysfs; None when it tells none."""
    try:
        text = Path(f"/sys/bus/pci/devices/{bus_id}/numa_node").read_text(encoding="ascii")
    except OSError:
        return None
    return int(text) if int(text) >= 0 else None


def account(address: int) -> tuple[int, dict[int, int]]:
    """Page size and bytes on each node of the mapping at an address, from ``/proc/self/numa_maps``.

    (0, {}) when the kernel gives no account.
    """
    try:
        lines = Path("/proc/self/numa_maps").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, {}
    for line in lines:
        if line.split(" ", 1)[0] == f"{address:x}":
            size = re.search(r"kernelpagesize_kB=(\d+)", line)
            page = int(size[1]) << 10 if size else PAGE
            nodes = {int(n): int(p) * page for n, p in re.findall(r"\bN(\d+)=(\d+)", line)}
            return page, nodes
    return 0, {}


def bind(address: int, nbytes: int, node: int) -> str | None:
    """Ask for pages on one NUMA node; None, or why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(1 << node)
    pointer = ctypes.c_void_p(address)
    length = ctypes.c_ulong(nbytes)
    if libc.syscall(_MBIND, pointer, length, _MPOL_BIND, ctypes.byref(mask), 64, 0):
        return f"node {node}: {os.strerror(ctypes.get_errno())}"
    return None


@final
class PinnedStorage(MappedStorage):
    """Shared anonymous memory, page-locked for DMA: one plane of page-aligned blocks.

    Args:
        nbytes: bytes of one block.
        blocks: how many.
        driver: registers it; stays the caller's, opened.
        align: block stride is a multiple of this.
        registration: bytes of one registration at most.
        huge: ask for huge pages.
        node: NUMA node to bind to.
        progress: called with bytes done and bytes in all.

    Attributes:
        registration_bytes: distance of registrations: a DMA may not cross from one into the next.
        placement: what was done.

    Raises:
        PinFailed: says size, limit and the driver's error; what was registered is undone.
    """

    pinned: bool = True

    def __init__(
        self,
        nbytes: int,
        blocks: int,
        driver: Driver,
        *,
        align: int | None = None,
        registration: int = REGISTRATION,
        huge: bool = False,
        node: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        unit = align or (PAGE if nbytes >= PAGE else 64)
        stride = -(-max(nbytes, 1) // unit) * unit
        whole = -(-max(stride * blocks, 1) // PAGE) * PAGE
        # No block straddles two registrations.
        grain = int(np.lcm(stride, PAGE))
        most = min(registration, STEP) if progress is not None else registration
        self.registration_bytes = max(grain, most // grain * grain)
        self._driver = driver
        self._registered: list[int] = []
        self._pid = os.getpid()
        self._notes: list[str] = []
        self._huge = "no"
        self._map = self._make_map(whole, huge=huge)
        self._bytes = memoryview(self._map)
        self._address = int(np.frombuffer(self._bytes, dtype=np.uint8).ctypes.data)
        self.planes = (Plane(self._address, stride, nbytes),)
        if node is not None and (reason := bind(self._address, whole, node)):
            self._notes.append(f"not bound to NUMA {reason}")
            node = None
        # Nobody may unmap it by forgetting the pool: what is page-locked is unlocked before.
        keep_for_ever(self)
        self._register(whole, progress)
        page, nodes = account(self._address)
        self.placement = Placement(
            whole, len(self._registered), page, self._huge, nodes, node, tuple(self._notes)
        )

    def _make_map(self, nbytes: int, *, huge: bool) -> mmap.mmap:
        shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        if huge and nbytes % HUGE_PAGE == 0:
            try:
                mapping = mmap.mmap(-1, nbytes, flags=shared | MAP_HUGETLB)
            except OSError as error:
                self._notes.append(f"no reserved huge pages: {error.strerror}")
            else:
                self._huge = "reserved"
                return mapping
        mapping = mmap.mmap(-1, nbytes, flags=shared)
        if huge:
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                self._notes.append(f"no transparent huge pages: {error.strerror}")
            else:
                self._huge = "advised"
        return mapping

    def _register(self, whole: int, progress: Callable[[int, int], None] | None) -> None:
        for start in range(0, whole, self.registration_bytes):
            size = min(self.registration_bytes, whole - start)
            try:
                self._driver.register(self._address + start, size)
            except CudaError as error:
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                bound = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
                self._give_back()
                raise PinFailed(
                    f"page-locking {size} bytes behind {start} of {whole} failed: {error}; the "
                    f"limit on locked memory (ulimit -l) is {bound}"
                ) from error
            self._registered.append(self._address + start)
            if progress is not None:
                progress(start + size, whole)

    def _give_back(self) -> None:
        """Undo registrations, last first, then unmap; one that stays keeps the mapping."""
        while self._registered:
            try:
                self._driver.unregister(self._registered[-1])
            except CudaError as error:
                _log.warning(
                    "%d bytes at %#x stay mapped: they are page-locked and that could not be "
                    "undone: %s",
                    len(self._bytes),
                    self._address,
                    error,
                )
                return
            self._registered.pop()
        _kept.remove(self)
        super().close()

    def close(self) -> None:
        """Undo the registrations, then unmap; never unmap what is still registered."""
        if self._pid != os.getpid():
            # A forked child shares the mapping; the registrations are its parent's.
            _kept.remove(self)
            super().close()
            return
        with self._driver.scope():
            self._give_back()


@final
class PinnedPool(Pool):
    """Slots in page-locked host memory that GPUs reach by DMA; page-aligned and right across forks.

    Args:
        layout: how the tensors lie inside a slot; one plane.
        blocks: how many.
        device: a GPU whose context registers the memory; every GPU can use it.
        align: block stride in bytes; a page from one page up, so that direct I/O is possible.
        registration: bytes of one registration at most.
        huge_pages: ask for huge pages, reserved ones first; `placement` says what came of it.
        numa_node: bind to this node; ``"gpu"`` for the GPU's own.
        progress: called with bytes done and bytes in all, about every GiB.
        name: for messages.
        driver: for tests: what stands for the driver.

    Raises:
        CudaMissing: no CUDA.
        PinFailed: says size, limit and the driver's error.
        WrongPool: the layout has more than one plane.
    """

    def __init__(
        self,
        layout: HasBlockLayout,
        blocks: int,
        *,
        device: int = 0,
        align: int | None = None,
        registration: int = REGISTRATION,
        huge_pages: bool = False,
        numa_node: int | str | None = None,
        progress: Callable[[int, int], None] | None = None,
        name: str = "pinned pool",
        driver: Driver | None = None,
    ) -> None:
        plan = layout.block_layout
        if len(plan.plane_bytes) != 1:
            raise WrongPool(f"a host slot is one plane, the layout has {len(plan.plane_bytes)}")
        own = driver or CudaDriver(device)
        own.open()
        node = gpu_node(own.bus_id()) if isinstance(numa_node, str) else numa_node
        with own.scope():
            self._storage = PinnedStorage(
                plan.nbytes,
                blocks,
                own,
                align=align,
                registration=registration,
                huge=huge_pages,
                node=node,
                progress=progress,
            )
        super().__init__(plan, blocks, self._storage, name=name)

    @property
    def placement(self) -> Placement:
        """What was really done: pages, huge pages, NUMA nodes, registrations."""
        return self._storage.placement
