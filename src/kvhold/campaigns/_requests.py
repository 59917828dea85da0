"""What an owner asks for: work on its own blocks, with the order and the effect that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, cast, final

from kvhold.campaigns._model import Cell, Record, ancestors
from kvhold.campaigns._world import GPU, HALF
from transfer import Blocks, Copy, External, FileRead, FileWrite, Launch, State
from transfer.testing import memory_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvhold.campaigns._model import Effect
    from kvhold.campaigns._world import World
    from transfer import Block
    from transfer._work import Work

Request: TypeAlias = "tuple[Record, Work, tuple[object, ...]]"

_MASK: Final = 0x5A


@final
class Requests:
    """Draws work for one owner.

    Args:
        world: what the owner runs in.
        name: the owner's name.

    Attributes:
        works: every descriptor that was asked for; kept, since the world knows them by identity.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.random = world.random
        self.name = name
        self.works: list[Work] = []
        self._count = 0
        self._files: list[tuple[str, Record]] = []

    def choose(self, cells: list[Cell]) -> Request | None:
        """Draw an operation on `cells`, or None when there is nothing to do."""
        usable = [c for c in cells if all(r.op is not None for r in c.pending())]
        sources = [c for c in usable if c.promising]
        if not sources or len(usable) < 2:
            return None
        src = self.random.choice(sources)
        dst = self.random.choice([c for c in usable if c is not src])
        mark = self.random.random()
        on_host = src.block.pool.kind == dst.block.pool.kind == "host"
        if self.world.schedule.real and mark < 0.3:
            found = self._file(src, dst)
            if found is not None:
                return found
        if mark < 0.15 and on_host:
            return self._launch(src, dst, "host")
        if mark < 0.25 and src.block.pool.kind == dst.block.pool.kind == GPU:
            return self._launch(src, dst, GPU)
        if mark < 0.75:
            found = self._batch(src, dst, usable, sources)
            if found is not None:
                return found
        return self._copy(src, dst)

    # Order

    def _order(self, reads: list[Cell], writes: list[Cell]) -> list[Record]:
        """Everything unsettled that touches the blocks, and sometimes more."""
        found = {r: None for c in reads for r in c.pending() if c in r.writes}
        found |= {r: None for c in writes for r in c.pending()}
        if self.random.random() < 0.2:
            others = [r for c in self.world.cells.values() for r in c.pending() if r.op is not None]
            if others:
                found[self.random.choice(others)] = None
        if self.random.random() < 0.7:
            # Order is transitive: the last of each chain is enough.
            implied = {r for last in found for r in ancestors(last.after)}
            return [r for r in found if r not in implied]
        return list(found)

    def _record(
        self,
        reads: list[Cell],
        writes: list[Cell],
        effect: Effect,
        *,
        device: str,
        path: str = "",
        more: tuple[Record, ...] = (),
    ) -> tuple[Record, tuple[object, ...]]:
        order = [*dict.fromkeys([*self._order(reads, writes), *more])]
        name = self._name()
        record = Record(name, reads, writes, effect, order, device, path=path)
        streams = dict.fromkeys(c.stream for c in (*reads, *writes) if not c.filled)
        return record, (*(r.op for r in order), *streams)

    def _name(self) -> str:
        self._count += 1
        return f"{self.name}{self._count}"

    # Kinds of work

    def _copy(self, src: Cell, dst: Cell) -> Request:
        part = dst.promising and self.random.random() < 0.15
        effect: Effect = _first_half if part else _same
        names = ("a",) if part else None
        record, after = self._record([src], [dst], effect, device=_device(src, dst))
        record.whole = not part
        return record, Copy(src.block, dst.block, names=names), after

    def _batch(
        self, src: Cell, dst: Cell, usable: list[Cell], sources: list[Cell]
    ) -> Request | None:
        """A copy of two blocks in one operation."""
        second = [c for c in sources if c is not src and c.block.pool is src.block.pool]
        also = [
            c for c in usable if c is not dst and c is not src and c.block.pool is dst.block.pool
        ]
        pairs = [(s, d) for s in second for d in also if s is not d and s is not dst]
        if not pairs:
            return None
        pair = self.random.choice(pairs)
        reads, writes = [src, pair[0]], [dst, pair[1]]
        record, after = self._record(reads, writes, _same, device=_device(src, dst))
        blocks = [Blocks.gather([c.block for c in side]) for side in (reads, writes)]
        return record, Copy(*blocks), after

    def _launch(self, src: Cell, dst: Cell, on: str) -> Request:
        record, after = self._record([src], [dst], _masked, device=on)
        steps = _kernel(src.block, dst.block)

        def at_once() -> None:
            self.world.gate.wait()
            for _step in steps():
                pass

        def in_steps(*_stream: object) -> Iterator[None]:
            return steps()

        threads = self.world.schedule.real and on == "host"
        fn = cast("Callable[..., None]", at_once if threads else in_steps)
        return record, Launch(fn, reads=[src.block], writes=[dst.block], on=on), after

    def external(self, cell: Cell) -> tuple[Record, Work, bytes]:
        """A write that the host program does itself, and what it writes."""
        data = self.world.pattern()
        record = Record(self._name(), [], [cell], lambda _reads, _olds: [data], [], GPU)
        return record, External(writes=[cell.block], on=GPU), data

    def _file(self, src: Cell, dst: Cell) -> Request | None:
        files = self.world.model.files
        known = [(p, r) for p, r in self._files if files.get(p) is not None or not r.settled]
        if known and dst.block.pool.kind == "host" and self.random.random() < 0.5:
            path, writer = self.random.choice(known)
            if writer.op is None:
                return None
            return self._read(path, writer, dst)
        return self._write(src) if src.block.pool.kind == "host" else None

    def _write(self, src: Cell) -> Request:
        path = f"{self.name}-{self._count}.file"
        files = self.world.model.files

        def effect(reads: list[bytes], _olds: object) -> list[bytes | None]:
            files[path] = reads[0]
            return []

        record, after = self._record([src], [], effect, device="files", path=path)
        self._files.append((path, record))
        spans = (src.block.span(0, HALF), src.block.span(HALF))
        final = self.world.folder / path
        publish = self.random.random() < 0.5
        first = final.with_suffix(".new") if publish else final
        return record, FileWrite(first, spans, publish=final if publish else None), after

    def _read(self, path: str, writer: Record, dst: Cell) -> Request:
        files = self.world.model.files

        def effect(_reads: object, _olds: object) -> list[bytes | None]:
            return [files[path]]

        more = () if writer.settled else (writer,)
        record, after = self._record([], [dst], effect, device="files", path=path, more=more)
        # Whether a file is there whose write did not complete, nobody can say.
        record.disturbed = writer.settled and writer.state is not State.COMPLETED
        return record, FileRead(self.world.folder / path, dst.block), after

    # Errors of the caller

    def onto(self, block: Block, cells: list[Cell]) -> Work | None:
        """A copy from a block that must not be named, onto one of `cells` or of the spare block."""
        quiet = [c.block for c in cells if not c.pending() and c.filled]
        targets = [b for b in quiet if b.pool is block.pool and b.id != block.id]
        if targets:
            return Copy(block, self.random.choice(targets))
        if cells:
            return None
        return Launch(lambda *_: None, reads=[block], on=block.pool.kind)


def _device(src: Cell, dst: Cell) -> str:
    return GPU if GPU in (src.block.pool.kind, dst.block.pool.kind) else "host"


def _same(reads: list[bytes], _olds: object) -> list[bytes | None]:
    return [*reads]


def _first_half(reads: list[bytes], olds: list[bytes | None]) -> list[bytes | None]:
    (old,) = olds
    return [None if old is None else reads[0][:HALF] + old[HALF:]]


def _masked(reads: list[bytes], _olds: object) -> list[bytes | None]:
    return [bytes(byte ^ _MASK for byte in reads[0])]


def _kernel(src: Block, dst: Block) -> Callable[[], Iterator[None]]:
    """A kernel that reads one block and writes another, byte by byte."""

    def views(block: Block) -> list[tuple[memoryview, int]]:
        pool = block.pool
        planes = [
            memory_at(pool.storage, pool.address(plane, block.id), size)
            for plane, size in enumerate(pool.layout.plane_bytes)
        ]
        return [(view, i) for view in planes for i in range(len(view))]

    def run() -> Iterator[None]:
        for (source, i), (target, j) in zip(views(src), views(dst), strict=True):
            target[j] = source[i] ^ _MASK
            yield

    return run
