"""``python -m kvhold.fuzz``: damaged blobs of every version, read in a child with little memory.

For every input: the reader either accepts it or refuses it with a `FormatError`; nothing else may come
out. A refusal leaves the destination as it was. A version 3 or version 2 blob that differs from every
valid one and has not been given new checksums is never accepted. The child's address space is limited
to what it had after warming up plus a few times the largest input, so that memory taken on the word of
a header kills it, whatever allocator it comes from.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from rich.table import Table

from kvhold._mutate import mutate
from kvhold._output import refuse, show
from tiers._errors import FormatError
from tiers._team import Team
from tiers.codec import BLOB
from tiers.format import blob_version, open_v1, parse_v3
from tiers.testing import sample_blob, sample_codecs

if TYPE_CHECKING:
    from types import TracebackType

    from tiers.codec import V1Codec, V3Codec

POISON: Final = 0xEE
LIMIT_FACTOR: Final = 128
"""Address space beyond the warm child's, as a multiple of the largest valid blob."""
_BATCH: Final = 200


@dataclass
class Tally:
    """What became of the inputs.

    Attributes:
        tried: inputs read.
        outcomes: how often each outcome was seen, by blob version and "accepted" or cause.
        damaged: inputs that differ from every valid blob.
        limit: bytes of address space beyond the warm child's.
        largest: bytes of the largest input.
        grown: bytes by which the peak of resident memory grew after warming up.
    """

    tried: int = 0
    damaged: int = 0
    limit: int = 0
    largest: int = 0
    grown: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)

    def as_json(self) -> dict[str, Any]:
        """For the parent, and for `--json`."""
        return {
            "tried": self.tried,
            "damaged": self.damaged,
            "address_space_limit": self.limit,
            "largest_input": self.largest,
            "resident_growth": self.grown,
            "outcomes": dict(sorted(self.outcomes.items())),
        }


class Witness:
    """Keeps the input that is being read, for the report when reading it ends in anything odd."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.number = 0
        self.data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and kind is not KeyboardInterrupt:
            typer.echo(
                f"seed {self.seed}, input {self.number}, {len(self.data)} bytes: {error!r}\n"
                f"bytes.fromhex('{self.data[:600].hex()}')"
                f"{' + ...' if len(self.data) > 600 else ''}",
                err=True,
            )


class Reader:
    """Every codec of the samples with a destination of its own, and every plain reader."""

    def __init__(self) -> None:
        self.team = Team()
        self.codecs: list[V1Codec | V3Codec] = list(sample_codecs().values())
        self.valid = [sample_blob(codec, seed) for codec in self.codecs for seed in (0, 1)]
        self.known = frozenset(self.valid)
        self.into = [
            {name: bytearray([POISON]) * part.nbytes for name, part in codec.inputs.items()}
            for codec in self.codecs
        ]
        self.clean = [{n: bytes(room) for n, room in into.items()} for into in self.into]

    def read(self, data: bytes, choice: int, *, sealed: bool) -> str:
        """Open a blob without expectations, then decode it with one codec; what became of it.

        Args:
            data: the blob.
            choice: the codec.
            sealed: it was given checksums of its own after it was damaged.

        Raises:
            AssertionError: damage was accepted, or a refusal left traces.
        """
        opened, decoded = self.open(data), self._decode(data, choice)
        if opened != "accepted":
            return opened
        guarded = sealed or data in self.known or blob_version(memoryview(data)) == 1
        assert guarded, "damage was accepted"  # noqa: S101
        return f"accepted, decoded: {decoded}"

    def open(self, data: bytes) -> str:
        """Check header and all sections; "accepted" or the cause of the refusal."""
        view = memoryview(data)
        try:
            if blob_version(view) == 3:
                header = parse_v3(view)
                for section in header.plan.sections:
                    header.verify(view, section.part.name, self.team)
            else:
                open_v1(view).verify(self.team)
        except FormatError as error:
            return error.cause
        return "accepted"

    def _decode(self, data: bytes, choice: int) -> str:
        codec, into = self.codecs[choice], self.into[choice]
        outcome = "accepted"
        try:
            codec.decode({BLOB: data}, into)
        except FormatError as error:
            outcome = error.cause
        if outcome == "accepted":
            for room in into.values():
                room[:] = bytes([POISON]) * len(room)
        clean = all(into[name] == room for name, room in self.clean[choice].items())
        assert clean, f"{outcome} left traces"  # noqa: S101
        return outcome


def fuzz(seed: int, *, duration: float, inputs: int | None, tally: Tally) -> None:
    """Read damaged blobs until the time or the number is up."""
    rng = random.Random(seed)
    reader = Reader()
    for index, data in enumerate(reader.valid):
        reader.read(data, index // 2, sealed=False)
    tally.limit = limit_memory(LIMIT_FACTOR * max(map(len, reader.valid)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + duration
    with Witness(seed) as witness:
        while tally.tried != inputs and (tally.tried % _BATCH or time.monotonic() < end):
            witness.number = tally.tried
            data, sealed = mutate(reader.valid, rng)
            witness.data = data
            tally.largest = max(tally.largest, len(data))
            outcome = reader.read(data, rng.randrange(len(reader.codecs)), sealed=sealed)
            tally.tried += 1
            tally.damaged += data not in reader.known
            version = data[8] if len(data) > 8 else 0
            tally.outcomes[f"version {version if version in {1, 2, 3} else '?'}: {outcome}"] += 1
    tally.grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def limit_memory(extra: int) -> int:
    """Limit this process's address space to what it has plus `extra` bytes; gives `extra`.

    Memory that the allocator keeps for later would pass the limit unseen, so it is given back first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, now + extra))
    return extra


def check_unsealed(seed: int, count: int) -> int:
    """Single-bit damage without new checksums, spread over version 2 and 3 blobs; all refused.

    Returns:
        How many were refused.

    Raises:
        AssertionError: one was accepted.
    """
    rng = random.Random(seed)
    reader = Reader()
    covered = [data for data in reader.valid if blob_version(memoryview(data)) > 1]
    for _ in range(count):
        data = bytearray(rng.choice(covered))
        bit = rng.randrange(8 * len(data))
        data[bit >> 3] ^= 1 << (bit & 7)
        outcome = reader.open(bytes(data))
        assert outcome != "accepted", f"bit {bit} of a version {data[8]} blob"  # noqa: S101
    return count


def run_child(seed: int, *, duration: float, inputs: int | None) -> tuple[int, dict[str, Any]]:
    """Fuzz in a child process; its exit status and what it reported."""
    arguments = ["--child", "--seed", str(seed), "--duration", str(duration)]
    if inputs is not None:
        arguments += ["--inputs", str(inputs)]
    child = subprocess.run(  # noqa: S603 - this interpreter, our own module
        [sys.executable, "-m", "kvhold.fuzz", *arguments],
        stdout=subprocess.PIPE,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    lines = child.stdout.decode().splitlines()
    return child.returncode, json.loads(lines[-1]) if lines else {}


def table_of(found: dict[str, Any]) -> Table:
    """The report for people."""
    table = Table("outcome", "inputs", title=f"{found['tried']:,} inputs, seed {found['seed']}")
    for outcome, count in found["outcomes"].items():
        table.add_row(outcome, f"{count:,}")
    table.caption = (
        f"{found['damaged']:,} damaged; {found['single_bits']:,} single bits, all refused; "
        f"{found['seconds']:.0f} s; largest input {found['largest_input']:,} bytes, address space "
        f"limited to {found['address_space_limit']:,} more than when warm, resident memory grew by "
        f"{found['resident_growth']:,}"
    )
    return table


def command(
    *,
    duration: Annotated[float, typer.Option(help="Seconds.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seeds the damage; same seed, same inputs.")] = 0,
    inputs: Annotated[int | None, typer.Option(help="Stop after so many inputs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Read damaged blobs of every version. Exit 1 when one does anything but pass or be refused."""
    if child:
        tally = Tally()
        fuzz(seed, duration=duration, inputs=inputs, tally=tally)
        typer.echo(json.dumps(tally.as_json()))
        return
    start = time.monotonic()
    code, found = run_child(seed, duration=duration, inputs=inputs)
    if code or not found:
        refuse(f"the reader ended with status {code}; the input is printed above", code=1)
    found["seed"] = seed
    found["single_bits"] = check_unsealed(seed, 2000)
    found["seconds"] = time.monotonic() - start
    show(found, table_of(found), as_json=as_json)


def main() -> None:
    """Run the command line."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    app()


if __name__ == "__main__":
    main()
