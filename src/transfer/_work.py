"""Frozen descriptors: *what* is to be done. An `Operation` is the life that one of them leads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast

from transfer._errors import BadWork, LayoutMismatch
from transfer._handle import Block, Blocks, Handle, Lease, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transfer._extent import Runs

    Route: TypeAlias = tuple[object, ...]

Sync: TypeAlias = Literal["none", "data", "full"]
"""How far a written file must have come: page cache or device queue, its data, its name too."""

HandleLike: TypeAlias = Handle | Lease[Block] | Lease[Blocks]
SpanLike: TypeAlias = Span | Block | Lease[Block]


class Work(Protocol):
    """What every descriptor tells the engine."""

    @property
    def route(self) -> Route:
        """(type, kinds of memory …): resolves to exactly one device of an engine."""
        ...

    @property
    def reads(self) -> tuple[Handle, ...]:
        """Blocks that are read."""
        ...

    @property
    def writes(self) -> tuple[Handle, ...]:
        """Blocks that are written."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes moved, for admission and statistics."""
        ...


def handle_of(given: HandleLike) -> Handle:
    """The handle that was given, or that a lease is for.

    Raises:
        StaleBlock: the lease was released.
    """
    if isinstance(given, (Block, Blocks)):
        return given
    return given.handle


def _blocks_of(spans: tuple[Span, ...]) -> tuple[Handle, ...]:
    """One handle per pool that covers every span's block once."""
    pools: dict[int, dict[int, Block]] = {}
    for span in spans:
        pools.setdefault(id(span.block.pool), {})[span.block.id] = span.block
    return tuple(
        next(iter(found.values())) if len(found) == 1 else Blocks.gather(list(found.values()))
        for found in pools.values()
    )


def _spans(given: SpanLike | Iterable[SpanLike]) -> tuple[Span, ...]:
    parts = (given,) if isinstance(given, (Span, Block, Lease)) else tuple(given)
    return tuple(p if isinstance(p, Span) else cast("Block", handle_of(p)).span() for p in parts)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy blocks into as many other blocks, tensor by tensor.

    Attributes:
        src: blocks to read.
        dst: blocks to write, one for each of `src`, in order.
        names: copy these tensors only.

    Raises:
        LayoutMismatch: different numbers of blocks, or layouts that do not match.
        BadWork: a block is copied onto itself.
    """

    src: Handle
    dst: Handle
    names: tuple[str, ...] | None = None
    runs: Runs = field(init=False, repr=False, compare=False)

    def __init__(
        self, src: HandleLike, dst: HandleLike, *, names: Iterable[str] | None = None
    ) -> None:
        put = object.__setattr__
        source, target = handle_of(src), handle_of(dst)
        only = None if names is None else tuple(names)
        put(self, "src", source)
        put(self, "dst", target)
        put(self, "names", only)
        if len(source) != len(target):
            raise LayoutMismatch(f"{len(source)} blocks cannot fill {len(target)}")
        if source.pool is target.pool and not set(source.ids).isdisjoint(target.ids):
            raise BadWork(f"{source!r} is copied onto itself")
        put(self, "runs", source.pool.runs_to(target.pool, only))

    @property
    def route(self) -> Route:
        """By the kinds of memory on both sides."""
        return (Copy, self.src.pool.kind, self.dst.pool.kind)

    @property
    def reads(self) -> tuple[Handle, ...]:
        """The sources."""
        return (self.src,)

    @property
    def writes(self) -> tuple[Handle, ...]:
        """The destinations."""
        return (self.dst,)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all blocks."""
        return self.runs.total * len(self.src)


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a callable where the device runs work: a worker thread, or a stream.

    Attributes:
        fn: called with no argument on a host worker thread, or with the stream on a GPU. When it
            raises, the operation fails once what it had posted is quiet.
        reads: blocks it reads.
        writes: blocks it writes.
        on: the device's kind of memory, ``"host"`` or e.g. ``"cuda:0"``.
        nbytes: bytes it moves, for admission and statistics.
        stream: run in this stream of the device instead of one of the device's own.
    """

    fn: Callable[..., object]
    reads: tuple[Handle, ...]
    writes: tuple[Handle, ...]
    on: str
    nbytes: int
    stream: object | None

    def __init__(
        self,
        fn: Callable[..., object],
        *,
        reads: Iterable[HandleLike] = (),
        writes: Iterable[HandleLike] = (),
        on: str = "host",
        nbytes: int = 0,
        stream: object | None = None,
    ) -> None:
        put = object.__setattr__
        put(self, "fn", fn)
        put(self, "reads", tuple(map(handle_of, reads)))
        put(self, "writes", tuple(map(handle_of, writes)))
        put(self, "on", on)
        put(self, "nbytes", nbytes)
        put(self, "stream", stream)

    @property
    def route(self) -> Route:
        """By the device it runs on."""
        return (Launch, self.on)


@dataclass(frozen=True, slots=True)
class External:
    """Work that the host program does itself, in its own stream, on blocks it wants kept.

    Posted at once; it ends when the device is told where the program's work ends
    (`Operation.finish`) and that place is reached.

    Attributes:
        reads: blocks it reads.
        writes: blocks it writes.
        on: the device's kind of memory.
    """

    reads: tuple[Handle, ...]
    writes: tuple[Handle, ...]
    on: str

    def __init__(
        self,
        *,
        reads: Iterable[HandleLike] = (),
        writes: Iterable[HandleLike] = (),
        on: str = "host",
    ) -> None:
        put = object.__setattr__
        put(self, "reads", tuple(map(handle_of, reads)))
        put(self, "writes", tuple(map(handle_of, writes)))
        put(self, "on", on)

    @property
    def route(self) -> Route:
        """By the device it runs on."""
        return (External, self.on)

    @property
    def nbytes(self) -> int:
        """Nothing that kvhold moves."""
        return 0


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Write block bytes to a new file, then publish it under its final name in one step.

    Attributes:
        path: the file that is created; it must not exist.
        spans: what is written, one after the other.
        publish: the final name; it must not exist either. None leaves the file at `path`.
        offset: where in the file the first byte goes.
        sync: ``"none"``, ``"data"`` (fdatasync before publishing) or ``"full"`` (fsync of the
            file, and of the folder after publishing).
    """

    path: Path
    spans: tuple[Span, ...]
    publish: Path | None
    offset: int
    sync: Sync
    reads: tuple[Handle, ...] = field(repr=False)

    def __init__(
        self,
        path: str | Path,
        spans: SpanLike | Iterable[SpanLike],
        *,
        publish: str | Path | None = None,
        offset: int = 0,
        sync: Sync = "none",
    ) -> None:
        if sync not in ("none", "data", "full") or offset < 0:
            raise BadWork(f"sync {sync!r}, expected none, data or full; offset {offset}, not < 0")
        put = object.__setattr__
        put(self, "path", Path(path))
        put(self, "spans", _spans(spans))
        put(self, "publish", None if publish is None else Path(publish))
        put(self, "offset", offset)
        put(self, "sync", sync)
        put(self, "reads", _blocks_of(self.spans))

    @property
    def route(self) -> Route:
        """Files are one device's."""
        return (FileWrite,)

    @property
    def writes(self) -> tuple[Handle, ...]:
        """No block."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(span.nbytes for span in self.spans)


@dataclass(frozen=True, slots=True)
class FileRead:
    """Read a part of a file into blocks; a file that ends early is a failure.

    Attributes:
        path: the file.
        spans: what is filled, one after the other.
        offset: where in the file the first byte is.
    """

    path: Path
    spans: tuple[Span, ...]
    offset: int
    writes: tuple[Handle, ...] = field(repr=False)

    def __init__(
        self, path: str | Path, spans: SpanLike | Iterable[SpanLike], *, offset: int = 0
    ) -> None:
        if offset < 0:
            raise BadWork(f"offset {offset}, expected not < 0")
        put = object.__setattr__
        put(self, "path", Path(path))
        put(self, "spans", _spans(spans))
        put(self, "offset", offset)
        put(self, "writes", _blocks_of(self.spans))

    @property
    def route(self) -> Route:
        """Files are one device's."""
        return (FileRead,)

    @property
    def reads(self) -> tuple[Handle, ...]:
        """No block."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return sum(span.nbytes for span in self.spans)


@dataclass(frozen=True, slots=True)
class FileRemove:
    """Remove a file by a name that is never used twice, so a late removal can hit nothing else.

    Attributes:
        path: the file.
        missing_ok: whether a file that is not there is fine.
    """

    path: Path
    missing_ok: bool

    def __init__(self, path: str | Path, *, missing_ok: bool = False) -> None:
        object.__setattr__(self, "path", Path(path))
        object.__setattr__(self, "missing_ok", missing_ok)

    @property
    def route(self) -> Route:
        """Files are one device's."""
        return (FileRemove,)

    @property
    def reads(self) -> tuple[Handle, ...]:
        """No block."""
        return ()

    @property
    def writes(self) -> tuple[Handle, ...]:
        """No block."""
        return ()

    @property
    def nbytes(self) -> int:
        """None."""
        return 0
