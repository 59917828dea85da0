"""Putting pages: staged at once, written behind, visible when the last component is published."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Literal, final

import numpy as np

from tiers._errors import TierError
from tiers._form import dense, memory
from tiers._residency import Residency
from tiers._store_core import Core, Refusal
from tiers._store_removals import cause_of
from tiers.host import gather, join
from transfer._drain import wait_decided, wait_unstoppable
from transfer._errors import CompletionLost, EngineClosed, LayoutMismatch
from transfer._handle import Block, Blocks
from transfer._state import State
from transfer._wait import wait_woken
from transfer._work import Copy, Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers._form import Form
    from tiers._index import Entry
    from tiers._key import Keys
    from tiers._store_writes import Fill
    from transfer._handle import Handle
    from transfer._operation import Operation

    Backpressure = Literal["wait", "refuse"]

GROUP_BYTES: Final = 1 << 20
"""Bytes of pages that one `Launch` encodes or decodes: enough to hide its cost."""
LARGE_GROUP_BYTES: Final = 4 << 20
"""The same for a call of many pages, of which there are enough to share and to overlap with files."""
SHARES: Final = 8
"""Parts at least that the work of such a call is cut into."""


class PutFailed(TierError):
    """Pages of a put did not become resident.

    Attributes:
        pages: which, by their place in the put, with the reason.
    """

    def __init__(self, pages: dict[int, str]) -> None:
        shown = ", ".join(f"{number} ({reason})" for number, reason in list(pages.items())[:8])
        more = f" and {len(pages) - 8} more" if len(pages) > 8 else ""
        super().__init__(f"{len(pages)} pages are not resident: {shown}{more}")
        self.pages = pages


@final
class Ticket:
    """What became of a put.

    Attributes:
        pages: how many pages were given.
        stored: how many of them this put brings in.
        present: how many were there, or on their way, before it.
        refused: pages that were not taken, by their place in the put, each with a reason.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.stored = 0
        self.present = 0
        self.refused: dict[int, str] = {}
        self._entries: list[tuple[int, Entry]] = []

    def __repr__(self) -> str:
        return (
            f"<put of {self.pages} pages: {self.stored} stored, {self.present} present, "
            f"{len(self.refused)} refused>"
        )

    def follow(self, number: int, entry: Entry, *, is_new: bool) -> None:
        """A page of this put is that entry's."""
        self._entries.append((number, entry))
        self.stored += is_new
        self.present += not is_new

    async def resident(self) -> None:
        """Wait until every page that was taken is readable.

        Raises:
            PutFailed: some are not, or were refused; names them. The first fault is its cause.
            CompletionLost: the end of a page's write cannot be learnt.
        """
        failed: dict[int, str] = dict(self.refused)
        cause: BaseException | None = None
        for number, entry in self._entries:
            await _wait_entry(entry, Residency.FILLING)
            if entry.error is not None:
                failed[number] = str(entry.error)
                cause = cause or entry.error
        if isinstance(cause, CompletionLost):
            raise CompletionLost(f"pages {sorted(failed)[:8]}: {cause}") from cause
        if failed:
            raise PutFailed(dict(sorted(failed.items()))) from cause

    async def gone(self) -> None:
        """Wait until every page of this put was removed or evicted, and its bytes are free."""
        for _, entry in self._entries:
            await _wait_entry(entry, *(r for r in Residency if r is not Residency.ABSENT))


async def _wait_entry(entry: Entry, *through: Residency) -> None:
    while entry.residency in through:
        if entry.watchers is None:
            entry.watchers = []
        await wait_woken(entry.watchers)


@final
class Put:
    """One call of `KVStore.put`.

    Args:
        core: the store's state.
        keys: names of the pages.
        pages: the caller's blocks, one for each key or more.
        after: what wrote the pages.
        backpressure: whether to wait for room that comes by itself.

    Raises:
        LayoutMismatch: fewer blocks than keys, or blocks of another layout.
    """

    def __init__(
        self, core: Core, keys: Keys, pages: Handle, *, after: object, backpressure: Backpressure
    ) -> None:
        if len(pages) < len(keys):
            raise LayoutMismatch(f"put: found {len(pages)} blocks, expected {len(keys)}")
        self.ticket = Ticket(len(keys))
        self._core = core
        self._keys = keys
        self._pages = pages
        self._after = after
        self._wait = backpressure == "wait"
        self._ops: list[Operation] = []
        self._stamp = core.index.tick()
        form = core.form
        self._places = (
            dense(pages.pool.layout, form.layout, form.inputs)
            if pages.pool.kind == "host"
            else None
        )
        for name in form.copied:
            dense(pages.pool.layout, form.layout, (name,))
        self.raw = self._places is None

    async def run(self) -> None:
        """Stage every page; the caller's blocks may be reused when this has returned.

        A cancelled call's pages that were staged go on; others leave no trace.
        """
        try:
            todo = self._missing()
            while todo:
                batch, refusal = self._reserve(todo)
                if batch:
                    await self._start(batch)
                    todo = todo[len(batch) :]
                elif refusal is None or not refusal.wait or not self._wait:
                    self._refuse(todo, refusal.reason if refusal else "not admitted")
                    break
                else:
                    self._core.counts["put waits"] += 1
                    await wait_woken(self._core.waiters)
            for op in self._ops:
                await wait_decided(op)
        finally:
            if self._pages.pool.foreign and not self._quiet():
                await self._wait_quiet()
        lost = [op for op in self._ops if not op.settled]
        if lost:
            raise CompletionLost(f"put: the end of {lost[0]!r} cannot be learnt: {lost[0].error}")

    def _quiet(self) -> bool:
        return all(op.decided for op in self._ops)

    async def _wait_quiet(self) -> None:
        """Foreign pages are left alone before a cancellation goes on; no pool keeps them."""
        caught = await wait_unstoppable(self._quiet, self._core.waiters)
        if caught is not None:
            raise caught

    def _missing(self) -> list[int]:
        """Places of pages that have to be brought in; the others are followed."""
        index, todo = self._core.index, []
        for number, digest in enumerate(self._keys.digests):
            entry = index.get(digest)
            if entry is not None:
                entry.used = self._stamp
                self.ticket.follow(number, entry, is_new=False)
            elif self._core.admission.admit(digest):
                todo.append(number)
            else:
                self._refuse([number], "not admitted")
        return todo

    def _refuse(self, numbers: Sequence[int], reason: str) -> None:
        """Not taking a page is not taking those behind it, which would be of no use without it."""
        self._core.refused[reason] += len(numbers)
        for number in numbers:
            self.ticket.refused[number] = reason

    def _reserve(self, todo: list[int]) -> tuple[list[Fill | None], Refusal | None]:
        """As many of the leading pages as there is room for; None for one that came meanwhile."""
        core = self._core
        if core.closing:
            raise EngineClosed("the store is closing: no new pages")
        provenance = self._keys.provenance
        batch: list[Fill | None] = []
        for number in todo:
            digest = self._keys.digests[number]
            known = core.index.get(digest)
            if known is not None:
                self.ticket.follow(number, known, is_new=False)
                batch.append(None)
                continue
            fill = core.reserve(
                digest,
                provenance.digest,
                tenant=provenance.tenant,
                depth=number,
                stamp=self._stamp,
                raw=self.raw,
                own=self.ticket.stored,
                want=len(todo) - len(batch),
            )
            if isinstance(fill, Refusal):
                return batch, fill
            fill.number = number
            self.ticket.follow(number, fill.entry, is_new=True)
            batch.append(fill)
        return batch, None

    # Starting

    async def _start(self, batch: list[Fill | None]) -> None:
        """Submit what reads the pages. What cannot be submitted leaves no entry behind."""
        fills = [fill for fill in batch if fill is not None]
        for fill in fills:
            self._core.begin_part(fill.entry)
        open_fills = list(fills)
        try:
            if self._core.form.copied and fills:
                await self._copy_keys(fills)
            order = self._after if not self._ops else (self._ops[0],)
            size = group_size(self._core.form, len(fills))
            while open_fills:
                group = open_fills[:size]
                await self._encode(group, order)
                del open_fills[: len(group)]
        finally:
            for fill in open_fills:
                self._core.writes.end_fill(fill, TierError("its put did not submit it"))

    def _sub(self, fills: Sequence[Fill]) -> Handle:
        """The caller's blocks of some pages."""
        pages = self._pages
        if isinstance(pages, Block):
            return pages
        numbers = np.array([fill.number for fill in fills], dtype=np.int64)
        return Blocks(pages.pool, pages.ids[numbers], pages.generations[numbers])

    async def _copy_keys(self, fills: list[Fill]) -> None:
        """Copy the exact components of a batch into the host tier, all in one operation."""
        core = self._core
        assert core.host is not None  # noqa: S101 - they are kept in host memory
        slots = [fill.entry.host for fill in fills if fill.entry.host is not None]
        work = core.host.write_all(slots, self._sub(fills))
        order = self._after if not self._ops else (self._ops[0],)
        op = await core.runner.engine.submit(work, after=order, name="put keys")
        self._ops.append(op)
        for fill in fills:
            core.begin_part(fill.entry)
        core.runner.watch(op, partial(self._keys_copied, fills))

    def _keys_copied(self, fills: list[Fill], op: Operation) -> None:
        core = self._core
        error = None if op.state is State.COMPLETED else _error_of(op)
        for fill in fills:
            if error is not None:
                core.fail(fill.entry, error)
            if op.settled:
                core.end_part(fill.entry)

    async def _encode(self, fills: list[Fill], order: object) -> None:
        """Encode some pages in one operation, by way of dense copies where that is needed."""
        core, form = self._core, self._core.form
        engine = core.runner.engine
        pages = self._sub(fills)
        if self.raw:
            raws = join([fill.stage.raw for fill in fills if fill.stage and fill.stage.raw])
            copy = await engine.submit(
                Copy(pages, raws, names=form.inputs), after=order, name="put pages"
            )
            self._ops.append(copy)
            core.runner.watch(copy, _ignore)
            pages, order = raws, (copy,)
        places = self._places
        if places is None:
            places = dense(pages.pool.layout, form.layout, form.inputs) or {}
        targets = self._targets(fills)
        jobs = [
            (fill, memory(pages.pool, block, places, form.layout), form.outputs(target))
            for fill, block, target in zip(fills, map(int, pages.ids), _each(targets), strict=True)
        ]

        def encode() -> None:
            for fill, source, into in jobs:
                try:
                    form.encode(fill.entry, source, into)
                except TierError as error:
                    fill.error = error

        nbytes = sum(len(view) for _, source, _ in jobs for view in source.values())
        work = Launch(encode, reads=[pages], writes=[targets], nbytes=nbytes)
        op = await engine.submit(work, after=order, name="encode")
        self._ops.append(op)
        core.runner.watch(op, partial(self._encoded, fills))

    def _targets(self, fills: Sequence[Fill]) -> Handle:
        """Blocks that the codec writes: staging, or the host tier's own."""
        if self._core.form.blob is not None:
            return join([fill.stage.blob for fill in fills if fill.stage and fill.stage.blob])
        return gather([fill.entry.host for fill in fills if fill.entry.host is not None])

    def _encoded(self, fills: list[Fill], op: Operation) -> None:
        core = self._core
        failed = None if op.state is State.COMPLETED else _error_of(op)
        for fill in fills:
            error = failed or fill.error
            if error is not None and not op.settled:
                core.fail(fill.entry, error)
            elif error is not None or core.form.blob is None:
                core.writes.end_fill(fill, error)
            else:
                core.writes.add(fill)


def group_size(form: Form, pages: int) -> int:
    """Pages that one `Launch` encodes or decodes, of a call with so many of them."""
    page = max(1, sum(form.layout.component(name).nbytes for name in form.inputs))
    return max(1, GROUP_BYTES // page, min(LARGE_GROUP_BYTES // page, pages // SHARES))


def _ignore(op: Operation) -> None:
    """What follows from its end follows from that of the operation behind it."""
    del op


def _error_of(op: Operation) -> BaseException:
    return cause_of(op) if op.settled else CompletionLost(f"the end of {op!r} cannot be learnt")


def _each(handle: Handle) -> list[Block]:
    return [handle] if isinstance(handle, Block) else list(handle)
