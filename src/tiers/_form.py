"""What a store keeps of a page, and where: placements, and the memory that codecs work on."""

from __future__ import annotations

import enum
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, final

from tiers._errors import CapacityExceeded, ProvenanceMismatch
from tiers._layout import FP8, KEY, VALUE, VALUE_SCALE, PageLayout, ScaleScope, StaticScales
from tiers.codec import BLOB, ByteThroughCodec, K16V8Codec, V3Codec
from tiers.format import Identity, parse_v3
from tiers.host import made
from transfer._errors import LayoutMismatch
from transfer._extent import BlockLayout
from transfer._memory import HostPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiers._folder import Kind
    from tiers._index import Entry
    from tiers._key import Provenance
    from tiers._layout import Component
    from tiers.fp8 import NonFinite
    from tiers.host import HostTier, MakePool
    from transfer._handle import Block, Lease
    from transfer._memory import Pool

_ALIGN: Final = 4096


class Placement(enum.Enum):
    """Where the components of a page are kept. A hit needs all of them."""

    SPLIT = "split"
    """Keys in host memory, values and scales in a file: gone when the process ends."""
    WHOLE_HOST = "whole host"
    """Everything in host memory."""
    WHOLE_DISK = "whole disk"
    """Everything in one file, published by one step: still there after a restart."""


@final
class Form:
    """How pages of one layout are stored.

    Args:
        layout: the page as the caller has it.
        placement: where components go.
        value: format of the codes, for full-width values.
        scope: how scales are shared, for full-width values.
        nonfinite: what becomes of NaN and infinities among values.
        static_scales: scales of FP8 values that have none of their own.

    Attributes:
        stored: the layout of what is kept: values in FP8, with scales.
        codec: makes one of the other.
        blob: what a file holds; None without files.
        host_names: components that are kept in host memory.
        copied: those of them that are copied as they are.

    Raises:
        LayoutMismatch: a layout without values cannot be split; FP8 values need scales, their own
            or static ones, and not both.
    """

    def __init__(
        self,
        layout: PageLayout,
        placement: Placement,
        *,
        value: str = "float8_e4m3fn",
        scope: ScaleScope = ScaleScope.HEAD,
        nonfinite: NonFinite = "saturate",
        static_scales: StaticScales | None = None,
    ) -> None:
        self.layout = layout
        self.placement = placement
        self.static_scales = static_scales
        self.through = layout.value in FP8
        if static_scales is not None:
            static_scales.stored(layout)
        elif self.through and layout.scope is None:
            raise LayoutMismatch(
                f"values: found {layout.value} without scales of their own, expected static scales"
            )
        self.codec: ByteThroughCodec | K16V8Codec = (
            ByteThroughCodec(layout, static_scales=static_scales)
            if self.through
            else K16V8Codec(layout, value=value, scope=scope, nonfinite=nonfinite)
        )
        self.stored = self.codec.encoded_layout
        names = tuple(self.codec.outputs)
        if placement is Placement.SPLIT and VALUE not in names:
            raise LayoutMismatch("split placement: found a layout without values")
        self.blob = self._blob()
        self.host_names = {
            Placement.SPLIT: (KEY,),
            Placement.WHOLE_HOST: names,
            Placement.WHOLE_DISK: (),
        }[placement]
        self.copied = (KEY,) if placement is Placement.SPLIT else ()
        # What passes through the codec: its inputs, its outputs by place.
        held = VALUE if placement is Placement.SPLIT else None
        self.inputs = tuple(
            name for name in self.codec.inputs if held is None or name in (VALUE, VALUE_SCALE)
        )
        self.host_parts = self._parts(self.host_names)
        self.disk_parts = self._parts(
            tuple(section.part.name for section in self.blob.plan.sections) if self.blob else ()
        )
        self.host_bytes = sum(part.nbytes for part in self.host_parts)

    def _blob(self) -> V3Codec | None:
        if self.placement is Placement.WHOLE_HOST:
            return None
        names = (VALUE, VALUE_SCALE) if self.placement is Placement.SPLIT else None
        return V3Codec(self.codec, names=names)

    def _parts(self, names: tuple[str, ...]) -> tuple[Component, ...]:
        return tuple(self.stored.component(name) for name in names)

    @property
    def kind(self) -> Kind:
        """The kind of its files."""
        return "part" if self.placement is Placement.SPLIT else "whole"

    @property
    def file_bytes(self) -> int:
        """Bytes of a file; 0 without files."""
        return self.blob.nbytes if self.blob else 0

    @property
    def raw_layout(self) -> BlockLayout:
        """A host slot for what the codec takes and gives, dense."""
        return self.layout.slot(self.inputs, align=_ALIGN)

    def check_host(self, tier: HostTier) -> None:
        """Refuse a tier that does not hold the components of this placement as they are needed.

        Raises:
            LayoutMismatch: one is missing or differs, or is not in one piece where the codec
                works on it.
        """
        tier.check_layout(self.stored, self.host_names)
        if self.blob is None and dense(tier.pool.layout, self.stored, self.host_names) is None:
            raise LayoutMismatch(
                f"{tier.name}: found components of {tier.pool!r} layer by layer, expected each "
                "over all layers in one piece"
            )

    def check_keys(self, provenance: Provenance) -> None:
        """Refuse keys of another layout, of another's scales, or of other static ones.

        Raises:
            LayoutMismatch: says what was found.
        """
        asked: tuple[object, ...] = (provenance.layout, provenance.scheme, provenance.scope)
        scheme = "producer_scaled" if self.through else "computed"
        ours: tuple[object, ...] = (self.layout, scheme, self.stored.scope)
        if self.static_scales is not None:
            asked = (*asked, provenance.static_scales.hex())
            ours = (self.layout, scheme, None, self.static_scales.digest.hex())
        if asked != ours:
            raise LayoutMismatch(f"keys: found {asked}, expected {ours}")

    def identity(self, entry: Entry) -> Identity:
        """What a file of a put says about itself."""
        return Identity(key=entry.digest, provenance=entry.provenance, put=entry.put)

    def encode(self, entry: Entry, source: Mapping[str, Any], into: Mapping[str, Any]) -> None:
        """Encode a page; on a worker thread."""
        if self.blob is None:
            self.codec.encode(source, into)
        else:
            self.blob.with_identity(self.identity(entry)).encode(source, into)

    def decode(self, entry: Entry, encoded: Mapping[str, Any], into: Mapping[str, Any]) -> None:
        """Check and decode a page; on a worker thread.

        Raises:
            FormatError: it is not the page that was put.
        """
        if self.blob is None:
            self.codec.decode(encoded, into)
        else:
            self.blob.with_identity(self.identity(entry)).decode(encoded, into)

    def check(self, entry: Entry, encoded: Mapping[str, Any]) -> None:
        """Check every byte of a page without decoding it; on a worker thread.

        Raises:
            FormatError: it is not the page that was put.
        """
        if self.blob is None:
            return
        data, plan = encoded[BLOB], self.blob.plan
        header = parse_v3(data, layout=plan.layout, pages=1, scheme=plan.scheme)
        found = header.identity
        if (found.key, found.put) != (entry.digest, entry.put):
            raise ProvenanceMismatch(
                "key and put", found=found.key + found.put, expected=entry.digest + entry.put
            )
        for section in plan.sections:
            header.verify(data, section.part.name, self.codec.team)

    def outputs(self, block: Block) -> dict[str, memoryview]:
        """Where the codec's outputs lie in a staging block, or in a block of the host tier."""
        pool = block.pool
        if self.blob is not None:
            return {BLOB: pool.storage.view(pool.address(0, block.id), self.file_bytes)}
        found = dense(pool.layout, self.stored, self.host_names)
        return memory(pool, block.id, found or {}, self.stored)


def dense(
    layout: BlockLayout, page: PageLayout, names: Sequence[str]
) -> dict[str, tuple[int, int]] | None:
    """Plane and offset of components that lie in a block row-major over all layers.

    Returns:
        None if one of them does not.

    Raises:
        LayoutMismatch: one is missing, or has another shape or dtype.
    """
    found = {}
    for name in names:
        expected = page.slot((name,)).extents
        extents = [layout.extent(name, layer) for layer in range(page.layers)]
        for extent, wanted in zip(extents, expected, strict=True):
            if (extent.shape, extent.dtype) != (wanted.shape, wanted.dtype):
                raise LayoutMismatch(
                    f"{name} of layer {extent.layer}: found {extent.dtype}{list(extent.shape)}, "
                    f"expected {wanted.dtype}{list(wanted.shape)}"
                )
        first = extents[0]
        step = first.nbytes
        if any(
            not e.contiguous or e.plane != first.plane or e.offset != first.offset + i * step
            for i, e in enumerate(extents)
        ):
            return None
        found[name] = (first.plane, first.offset)
    return found


def memory(
    pool: Pool, block_id: int, places: Mapping[str, tuple[int, int]], page: PageLayout
) -> dict[str, memoryview]:
    """The bytes of dense components of a block.

    Taken from the storage: the operation that will use them is ordered and holds the block, while
    `Block.view` would refuse a block that an earlier operation still writes.
    """
    return {
        name: pool.storage.view(pool.address(plane, block_id) + offset, page.component(name).nbytes)
        for name, (plane, offset) in places.items()
    }


@final
class Stage:
    """Memory in which one page's bytes pass between pages and files.

    Attributes:
        blob: a block for a file's bytes, None without files.
        raw: a block for what the codec takes or gives, None where it works on the pages themselves.
    """

    __slots__ = ("_leases", "blob", "raw")

    def __init__(self, blob: Lease[Block] | None, raw: Lease[Block] | None) -> None:
        self._leases = [lease for lease in (blob, raw) if lease is not None]
        self.blob = None if blob is None else blob.handle
        self.raw = None if raw is None else raw.handle

    def release(self) -> None:
        """Give it back; may be repeated. What an operation holds is reused when that has ended."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()


@final
class Stages:
    """A bounded number of stages.

    Args:
        form: what passes through.
        count: how many pages at once.
        name: of the pools, for messages.
        make_pool: makes the pools, which are closed with the stages.

    Raises:
        LayoutMismatch: a pool is not what was asked for; it stays the caller's.
    """

    def __init__(
        self, form: Form, count: int, *, name: str, make_pool: MakePool = HostPool
    ) -> None:
        self._form = form
        self.count = count
        self._blobs: Pool | None = None
        with ExitStack() as undo:
            if form.file_bytes:
                layout = BlockLayout.raw(form.file_bytes)
                self._blobs = made(make_pool, layout, count, name=f"{name} files")
                undo.callback(self._blobs.close)
            self._raw = made(make_pool, form.raw_layout, count, name=f"{name} pages")
            undo.pop_all()

    @property
    def pools(self) -> list[Pool]:
        """The pools behind it."""
        return [pool for pool in (self._blobs, self._raw) if pool is not None]

    def free(self, *, raw: bool) -> int:
        """How many could be leased now."""
        counts = [len(self._blobs.book.free)] if self._blobs is not None else [self.count]
        if raw:
            counts.append(len(self._raw.book.free))
        return min(counts)

    def lease(self, *, raw: bool) -> Stage:
        """Take one.

        Args:
            raw: also with memory for what the codec takes or gives.

        Raises:
            CapacityExceeded: there is none.
        """
        if not self.free(raw=raw):
            raise CapacityExceeded(
                f"{self._form.placement.value}: all {self.count} stages are taken"
            )
        blob = None if self._blobs is None else self._blobs.lease()
        return Stage(blob, self._raw.lease() if raw else None)

    def close(self) -> None:
        """Give the memory back.

        Raises:
            PoolBusy: operations hold blocks; their memory stays mapped.
        """
        busy = deque(self.pools)
        try:
            while busy:
                busy.popleft().close()
        finally:
            for pool in busy:
                pool.close()


def stages_of(
    form: Form, *, write_bytes: int, read_bytes: int, make_pool: MakePool
) -> tuple[Stages, Stages]:
    """Stages for pages on their way to files, and a share of memory for those on their way back.

    Args:
        form: what passes through.
        write_bytes: bytes of pages on their way to files; at least one page.
        read_bytes: bytes of pages on their way back; at least two pages.
        make_pool: makes the pools.

    Raises:
        LayoutMismatch: a pool is not what was asked for, or was given before.
    """
    page = form.file_bytes or form.raw_layout.nbytes
    with ExitStack() as undo:
        count = max(1, write_bytes // page)
        writes = Stages(form, count, name="write staging", make_pool=make_pool)
        undo.callback(writes.close)
        count = max(2, read_bytes // page)
        reads = Stages(form, count, name="read staging", make_pool=make_pool)
        undo.callback(reads.close)
        pools = [*writes.pools, *reads.pools]
        if len(set(map(id, pools))) != len(pools):
            raise LayoutMismatch("staging: found one pool twice, expected a pool for each request")
        undo.pop_all()
    return writes, reads
