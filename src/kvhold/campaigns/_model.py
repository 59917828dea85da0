"""What the bytes of every block must be: a model that knows neither devices nor books.

It learns from the trace hook alone what became of each operation, in the order in which they end,
and computes what the blocks must contain then. Nothing here looks at the engine's own records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from transfer import SETTLED, Block, Lease, State, SubmitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transfer import Operation, Transition
    from transfer.testing import SimFence, SimStream

    Effect = Callable[[list[bytes], list[bytes | None]], list[bytes | None]]


@final
class Version:
    """What a block contains between two writes of it.

    Attributes:
        value: the bytes; None while they are undefined.
        like: the version before, if the write in between never took place.
        writer: the operation that makes it, if one does.
    """

    __slots__ = ("like", "value", "writer")

    def __init__(self, value: bytes | None, writer: Record | None = None) -> None:
        self.value = value
        self.like: Version | None = None
        self.writer = writer

    @property
    def content(self) -> bytes | None:
        """The bytes, or None."""
        return self.value if self.like is None else self.like.content


@final
class Cell:
    """A block as its owner sees it, for one lease.

    Attributes:
        block: the handle.
        lease: the lease; None on memory that a host program owns.
        version: what it must contain once everything that was asked for has ended.
        writers: operations that may still write it.
        fill: the end of the host program's own write, where there was one.
        stream: where that write was queued.
        records: operations that name it.
    """

    __slots__ = ("block", "fill", "lease", "records", "stream", "version", "writers")

    def __init__(self, block: Block, lease: Lease[Block] | None) -> None:
        self.block = block
        self.lease = lease
        self.version = Version(None)
        self.writers = 0
        self.fill: SimFence | None = None
        self.stream: SimStream | None = None
        self.records: list[Record] = []

    @property
    def content(self) -> bytes | None:
        """What it must contain; None while that is undefined."""
        return self.version.content

    @property
    def promising(self) -> bool:
        """Whether its content is defined, or will be if nothing goes wrong."""
        version = self.version
        while version.like is not None:
            version = version.like
        writer = version.writer
        if writer is None or writer.settled:
            return version.value is not None
        return writer.whole

    def pending(self) -> list[Record]:
        """Operations that name it and have not settled."""
        self.records = [r for r in self.records if not r.settled]
        return self.records

    @property
    def filled(self) -> bool:
        """Whether the host program's own write has ended."""
        return self.fill is None or self.fill.signaled

    @property
    def checkable(self) -> bool:
        """Whether its bytes must be what the model says, right now."""
        return self.content is not None and not self.writers and self.filled


@dataclass(eq=False, slots=True)
class Record:
    """An operation as whoever submits it sees it.

    Attributes:
        name: unique in its schedule.
        reads: blocks that are read.
        writes: blocks that are written, or none.
        effect: what the written blocks contain afterwards, from what was read and was there.
        after: what it was ordered behind.
        device: which device gets it.
        whole: whether it defines its blocks wholly.
        path: the file that it writes, reads or removes.
        op: the operation, once the engine has given one.
        state: as the trace says.
        submitted: whether a device was called with it.
        refused: whether the call raised, with nothing posted.
        lost: whether it was ever quarantined.
        cancelled: whether somebody cancelled it.
        faulted: whether a fault made it fail on its device.
        disturbed: whether any fault struck it.
        inputs: versions of what it reads.
        olds: versions of what it writes, before it.
        news: the same, after it.
    """

    name: str
    reads: list[Cell]
    writes: list[Cell]
    effect: Effect
    after: list[Record]
    device: str
    whole: bool = True
    path: str = ""
    op: Operation | None = None
    state: State = State.PREPARED
    submitted: bool = False
    refused: bool = False
    lost: bool = False
    cancelled: bool = False
    faulted: bool = False
    disturbed: bool = False
    inputs: list[Version] = field(default_factory=list)
    olds: list[Version] = field(default_factory=list)
    news: list[Version] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Whether it has ended, or was refused at the call."""
        return self.refused or self.state in SETTLED

    @property
    def ran(self) -> bool:
        """Whether a device ever had it."""
        return self.submitted and not self.refused

    def earlier(self) -> Iterator[Record]:
        """What it really waits for: what never ran leaves its own predecessors in its place."""
        seen: set[Record] = set()
        stack = list(self.after)
        while stack:
            record = stack.pop()
            if record not in seen:
                seen.add(record)
                if record.ran or not record.settled:
                    yield record
                else:
                    stack.extend(record.after)


@final
class Model:
    """All records of a schedule, kept by the trace.

    Args:
        report: called with what is wrong.
        can_wait: whether a device can put its work behind work of another that it has posted.

    Attributes:
        records: by name.
        steps: (serial, name, event) of every transition.
        files: what each file must contain.
        failures: records that failed, in order.
    """

    def __init__(
        self, report: Callable[[str, str], None], can_wait: Callable[[str, str], bool]
    ) -> None:
        self.records: dict[str, Record] = {}
        self.steps: list[tuple[int, str, str]] = []
        self.files: dict[str, bytes | None] = {}
        self.failures: list[Record] = []
        self._report = report
        self._can_wait = can_wait

    def add(self, record: Record) -> Record:
        """Say what is about to be submitted."""
        self.records[record.name] = record
        for cell in {id(c): c for c in (*record.reads, *record.writes)}.values():
            cell.records.append(record)
        record.inputs = [cell.version for cell in record.reads]
        record.olds = [cell.version for cell in record.writes]
        record.news = [Version(None, record) for _ in record.writes]
        for cell, version in zip(record.writes, record.news, strict=True):
            cell.writers += 1
            cell.version = version
        return record

    def refuse(self, record: Record) -> None:
        """The call raised, and nothing was posted: everything is as it was."""
        if record.state not in SETTLED:
            for cell in record.writes:
                cell.writers -= 1
        self._untouched(record)
        record.refused = True

    @staticmethod
    def _untouched(record: Record) -> None:
        for new, old in zip(record.news, record.olds, strict=True):
            new.like = old

    def __call__(self, step: Transition) -> None:
        """The trace hook."""
        self.steps.append((step.serial, step.name, step.event.name))
        record = self.records.get(step.name)
        if record is None:
            return
        record.state = step.after
        if step.after is State.IN_FLIGHT:
            self._submitted(record)
        elif step.after is State.QUARANTINED:
            record.lost = True
        elif step.after in SETTLED and step.before not in SETTLED:
            self._ended(record, step)

    def _submitted(self, record: Record) -> None:
        record.submitted = True
        for earlier in record.earlier():
            posted = earlier.submitted and self._can_wait(record.device, earlier.device)
            if not (earlier.settled or posted):
                self._report("order", f"{record.name} was posted before {earlier.name}")

    def _ended(self, record: Record, step: Transition) -> None:
        for cell in record.writes:
            cell.writers -= 1
        if step.after is State.COMPLETED:
            self._completed(record)
        else:
            ran = record.submitted and not self._was_refused(record)
            if not ran:
                self._untouched(record)
            if record.path and not record.writes:
                self._unwanted_file(record, ran=ran)
            if step.after is State.FAILED:
                self.failures.append(record)

    def _unwanted_file(self, record: Record, *, ran: bool) -> None:
        """A file is whole or absent, whatever became of its writer: who can read it, finds it all.

        It may be there although the write failed: a fault can strike the removal of its name, too.
        """
        (content,) = [version.content for version in record.inputs]
        self.files[record.path] = content if ran else None

    @staticmethod
    def _was_refused(record: Record) -> bool:
        return record.op is not None and isinstance(record.op.error, SubmitError)

    def justified(self, record: Record) -> bool:
        """Whether an operation may have failed: a fault, or something before it went wrong."""
        if record.disturbed or record.lost or record.cancelled:
            return True
        return any(not r.settled or r.state is not State.COMPLETED for r in ancestors(record.after))

    def _completed(self, record: Record) -> None:
        for earlier in record.earlier():
            if not earlier.settled:
                self._report("order", f"{record.name} completed before {earlier.name}")
            if earlier.lost and earlier.state is State.QUARANTINED:
                self._report("order", f"{record.name} completed behind lost {earlier.name}")
        if record.lost:
            self._report("outcome", f"{record.name} was lost and completed")
        if record.faulted:
            self._report("outcome", f"{record.name} failed on its device and completed")
        reads = [version.content for version in record.inputs]
        if None in reads:
            self._report("outcome", f"{record.name} completed from undefined bytes")
        known = [b"" if content is None else content for content in reads]
        contents = record.effect(known, [version.content for version in record.olds])
        for version, content in zip(record.news, contents, strict=False):
            version.value = content


def ancestors(records: list[Record]) -> Iterator[Record]:
    """Records and everything that they were ordered behind."""
    seen: set[Record] = set()
    stack = list(records)
    while stack:
        record = stack.pop()
        if record not in seen:
            seen.add(record)
            yield record
            stack.extend(record.after)
