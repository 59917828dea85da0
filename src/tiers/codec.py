"""Codecs: a block's components to typed outputs and back, each output to a place of its own.

Outputs are written into buffers that the caller gives, at their actual length, and inputs are decoded
into memory that the caller gives. `encode_job` and `decode_job` make a `Launch` of a call, so that a
device runs it and the blocks are held until it has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from tiers._codec_blob import BLOB, V1Codec, V3Codec
from tiers._codec_parts import Codec, Encoded, Memory, Output, bits_of, check_names, room
from tiers._codec_split import ByteThroughCodec, K16V8Codec
from tiers._team import Team
from tiers.fp8 import Counts, NonFinite
from transfer._errors import LayoutMismatch
from transfer._work import HandleLike, Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

__all__ = [
    "BLOB",
    "ByteThroughCodec",
    "Codec",
    "Counts",
    "Encoded",
    "Job",
    "K16V8Codec",
    "Memory",
    "NonFinite",
    "Output",
    "Team",
    "V1Codec",
    "V3Codec",
    "decode_job",
    "encode_job",
    "group",
]

T = TypeVar("T")
G = TypeVar("G", bound="Hashable")


@final
class Job(Generic[T]):
    """Codec calls that a device runs.

    Attributes:
        launch: what to submit to the engine.
    """

    def __init__(
        self,
        call: Callable[[], T],
        *,
        reads: Iterable[HandleLike],
        writes: Iterable[HandleLike],
        nbytes: int,
    ) -> None:
        self._call = call
        self._results: list[T] = []
        self.launch = Launch(self._run, reads=reads, writes=writes, nbytes=nbytes)

    def _run(self) -> None:
        self._results.append(self._call())

    def result(self) -> T:
        """What the calls gave, once the operation has completed.

        Raises:
            RuntimeError: it has not run, or it failed.
        """
        if not self._results:
            raise RuntimeError("the job has no result: its operation has not completed")
        return self._results[-1]


def encode_job(
    codec: Codec,
    sources: Sequence[Mapping[str, Memory]],
    intos: Sequence[Mapping[str, Any]],
    *,
    reads: Iterable[HandleLike] = (),
    writes: Iterable[HandleLike] = (),
) -> Job[list[dict[str, Encoded]]]:
    """Encode blocks of one layout as one `Launch`.

    Memory is checked here, for all blocks, before there is anything to submit: a batch that mixes
    layouts is never a job. Take views of pool blocks before the job is submitted; while it runs, the
    blocks are held and cannot be looked at.

    Args:
        codec: what to encode with.
        sources: inputs of each block.
        intos: buffers for the outputs of each block.
        reads: pool blocks that the sources lie in.
        writes: pool blocks that the buffers lie in.

    Raises:
        LayoutMismatch: as many buffers as sources are expected; or a block of another layout.
        CapacityExceeded: a buffer is too small.
    """
    _check_counts(sources, intos)
    for source, into in zip(sources, intos, strict=True):
        check_names(into, codec.outputs, "outputs")
        _check_memory(codec, source)
        for name, given in into.items():
            room(given, codec.outputs[name])
    nbytes = sum(codec.inputs[name].nbytes for source in sources for name in source)
    return Job(
        lambda: [codec.encode(source, into) for source, into in zip(sources, intos, strict=True)],
        reads=reads,
        writes=writes,
        nbytes=nbytes,
    )


def decode_job(
    codec: Codec,
    encoded: Sequence[Mapping[str, Any]],
    intos: Sequence[Mapping[str, Memory]],
    *,
    reads: Iterable[HandleLike] = (),
    writes: Iterable[HandleLike] = (),
) -> Job[None]:
    """Decode blocks of one layout as one `Launch`; see `encode_job`.

    Raises:
        LayoutMismatch: as many destinations as blocks are expected; or one of another layout.
    """
    _check_counts(encoded, intos)
    for into in intos:
        _check_memory(codec, into, write=True)
    nbytes = sum(codec.inputs[name].nbytes for into in intos for name in into)

    def call() -> None:
        for given, into in zip(encoded, intos, strict=True):
            codec.decode(given, into)

    return Job(call, reads=reads, writes=writes, nbytes=nbytes)


def group(layouts: Iterable[G]) -> dict[G, list[int]]:
    """Positions of the blocks of a batch by exact layout, in order of first appearance."""
    found: dict[G, list[int]] = {}
    for position, layout in enumerate(layouts):
        found.setdefault(layout, []).append(position)
    return found


def _check_counts(first: Sequence[object], second: Sequence[object]) -> None:
    if len(first) != len(second):
        raise LayoutMismatch(f"batch: found {len(second)} destinations, expected {len(first)}")


def _check_memory(codec: Codec, given: Mapping[str, Memory], *, write: bool = False) -> None:
    check_names(given, codec.inputs, "blocks")
    for name, memory in given.items():
        bits_of(memory, codec.inputs[name], write=write)
