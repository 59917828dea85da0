"""The codec against LMCache 0.5.6's: whole version 1 blobs, each side in a process of its own.

A block's size is the BF16 bytes handed to the call: half keys and half values, or values alone. Both
sides encode into memory that is there already and decode into tensors that are there already, with two
threads, in turn: a call that is not counted, then some 64 MiB of them. Values are Gaussian, shaped
(tokens, 8, 128).

LMCache's codec takes its working memory from the C library's allocator in every call, whose thresholds
follow the largest block freed so far; what a block costs it depends on that, and on chance. So each case
gets processes of its own that have seen no other block size, several of them in turn; some cases are
measured once more in processes that have handled larger blocks before, which suits it better.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, final

import typer
from rich.console import Console

from kvhold._peer import Peer, build
from kvhold.bench.pairs import Pair, compare, plain, table_of
from tiers._layout import KEY, VALUE, PageLayout, PageOrder, ScaleScope
from tiers._team import Team
from tiers.codec import BLOB, K16V8Codec, V1Codec
from tiers.format import V1Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

THREADS: Final = 2
HEADS: Final = 8
DIM: Final = 128
SIZES: Final = {32 << 20: 6.0, 8 << 20: 4.0, 1 << 20: 2.0, 64 << 10: 1.0}
"""Block sizes in BF16 bytes, and how many times as fast as LMCache each is meant to be."""
SCOPES: Final = {"per tensor": V1Scope.TENSOR, "per head": V1Scope.HEAD}
BATCH: Final = 64 << 20
"""BF16 bytes of a timed run of calls, at least."""
LARGEST: Final = max(SIZES)
PROCESSES: Final = 3
"""Processes of the other side for each case, one a round."""


@final
class Case:
    """One block size, scope and form, on our side.

    Args:
        nbytes: BF16 bytes of the block.
        scope: of the scales.
        keys: keys and values, or values alone.
        team: threads.
    """

    def __init__(self, nbytes: int, scope: V1Scope, *, keys: bool, team: Team) -> None:
        import torch  # noqa: PLC0415 - import torch costs a second

        tokens = nbytes // (2 * HEADS * DIM) // (2 if keys else 1)
        self.shape = (tokens, HEADS, DIM)
        self.nbytes = nbytes
        self.scope = scope
        self.keys = keys
        self.repeats = max(1, BATCH // nbytes)
        self.codec = V1Codec(self.shape, scope=scope, keys=keys, team=team)
        torch.manual_seed(0)
        names = list(self.codec.inputs)
        self.source = {name: torch.randn(self.shape).to(torch.bfloat16) for name in names}
        self.into = {name: torch.zeros(self.shape, dtype=torch.bfloat16) for name in names}
        self.room = bytearray(self.codec.outputs[BLOB].capacity)
        self.encode()

    def encode(self) -> None:
        """Whole blob, in place."""
        self.codec.encode(self.source, {BLOB: self.room})

    def decode(self) -> None:
        """Checks, then every destination."""
        self.codec.decode({BLOB: self.room}, self.into)

    def as_json(self) -> dict[str, Any]:
        """For the other side."""
        return {
            "shape": list(self.shape),
            "key": "bfloat16",
            "value": "bfloat16",
            "scope": int(self.scope),
            "keys": self.keys,
            "head_axis": -2,
            "page_axis": None,
        }


def seconds_of(call: Callable[[], None], repeats: int) -> float:
    """Seconds of a number of calls in a row, after one that is not counted."""
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - start


def size_name(nbytes: int) -> str:
    """KiB or MiB."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


@final
class Peers:
    """Processes of the other side, asked in turn.

    Args:
        peers: the processes.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._turns = itertools.cycle(peers)

    def prepare(self, case: Case) -> None:
        """Have every process get its memory ready."""
        for peer in self._peers:
            peer.ask(do="prepare", threads=THREADS, case=case.as_json())

    def warm(self, call: str) -> None:
        """Have every process do a few calls."""
        for peer in self._peers:
            peer.ask(do="time", call=call, repeats=2)

    def seconds(self, call: str, repeats: int) -> float:
        """Seconds of a number of calls in the process whose turn it is."""
        return float(next(self._turns).ask(do="time", call=call, repeats=repeats)["seconds"])


@contextmanager
def peers_of(python: Path) -> Iterator[Peers]:
    """Processes of an interpreter; those that were started end with the block, whatever happens."""
    with ExitStack() as stack:
        yield Peers([stack.enter_context(Peer(python)) for _ in range(PROCESSES)])


def against_lmcache(rounds: int, sizes: Sequence[int] = tuple(SIZES)) -> Iterator[Pair]:
    """Every size, scope, form and direction; ours / theirs beside what it is meant to reach.

    Then keys and values per tensor again, in processes that have handled larger blocks before.
    """
    python = build()
    with Team(THREADS) as team:
        for nbytes in sizes:
            for scope_name, scope in SCOPES.items():
                for keys in (True, False):
                    what = f"{size_name(nbytes)} {'K+V' if keys else 'V'} {scope_name}"
                    case = Case(nbytes, scope, keys=keys, team=team)
                    with peers_of(python) as peers:
                        peers.prepare(case)
                        yield from _both_ways(peers, case, what, rounds, SIZES[nbytes])
        yield from _after_larger(python, team, rounds, [n for n in sizes if n < LARGEST])


def _after_larger(python: Path, team: Team, rounds: int, sizes: Sequence[int]) -> Iterator[Pair]:
    if not sizes:
        return
    with peers_of(python) as peers:
        peers.prepare(Case(LARGEST, V1Scope.TENSOR, keys=True, team=team))
        for name in ("encode", "decode"):
            peers.warm(name)
        for nbytes in sizes:
            case = Case(nbytes, V1Scope.TENSOR, keys=True, team=team)
            peers.prepare(case)
            what = f"{size_name(nbytes)} K+V per tensor, after larger blocks,"
            yield from _both_ways(peers, case, what, rounds, None)


def _both_ways(
    peers: Peers, case: Case, what: str, rounds: int, target: float | None
) -> Iterator[Pair]:
    for name, call in (("encode", case.encode), ("decode", case.decode)):

        def ours(call: Callable[[], None] = call) -> float:
            return seconds_of(call, case.repeats)

        def theirs(name: str = name) -> float:
            return peers.seconds(name, case.repeats)

        yield compare(
            f"{what} {name}",
            ours,
            theirs,
            amount=case.nbytes * case.repeats / 1e9,
            unit="GB/s",
            target=target,
            rounds=rounds,
        )


def cast_alone(rounds: int, nbytes: int = 32 << 20) -> dict[str, float]:
    """GB/s of BF16 values for scales and codes alone, in every scope, median of rounds.

    One block of 32 layers in pages of 16 tokens; keys, blobs and checksums left out.
    """
    import torch  # noqa: PLC0415 - import torch costs a second

    layers, page = 32, 16
    pages = nbytes // (2 * layers * page * HEADS * DIM)
    figures = {}
    with Team(THREADS) as team:
        for scope in ScaleScope:
            layout = PageLayout(
                layers=layers, page_size=page, kv_heads=HEADS, head_dim=DIM, order=PageOrder.NHD
            )
            codec = K16V8Codec(layout, pages=pages, scope=scope, team=team)
            values = torch.randn(codec.inputs[VALUE].shape).to(torch.bfloat16)
            into = torch.zeros_like(values)
            rooms = {
                name: bytearray(output.capacity)
                for name, output in codec.outputs.items()
                if name != KEY
            }
            calls = {
                "encode": lambda c=codec, v=values, r=rooms: c.encode({VALUE: v}, r),
                "decode": lambda c=codec, t=into, r=rooms: c.decode(r, {VALUE: t}),
            }
            for name, call in calls.items():
                times = sorted(seconds_of(call, 1) for _ in range(rounds + 1))
                figures[f"cast alone, per {scope.value}, {name}"] = (
                    values.nbytes / 1e9 / times[len(times) // 2]
                )
    return figures


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds for each pair.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure the codec against LMCache's and print ratios beside their targets."""
    pairs = list(against_lmcache(rounds))
    figures = cast_alone(rounds)
    if as_json:
        import msgspec  # noqa: PLC0415 - only here

        typer.echo(msgspec.json.encode({"pairs": plain(pairs), "figures": figures}).decode())
        return
    console = Console()
    console.print(table_of("codec against lmcache 0.5.6, 2 threads each", pairs))
    for name, figure in figures.items():
        console.print(f"{name}: {figure:.2f} GB/s", highlight=False)


if __name__ == "__main__":
    typer.run(main)
