"""``python -m kvhold.bench``: this machine, part by part, each against its limit in the same run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvhold import _peer
from kvhold.bench import codec, cuda_host, engine, lives, store, store_lmcache
from kvhold.bench.pairs import conditions, plain, table_of

if TYPE_CHECKING:
    from kvhold.bench.pairs import Pair


def _figures(title: str, figures: dict[str, float]) -> Table:
    table = Table(title=title)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    return table


def measure_engine(console: Console, rounds: int, folder: Path) -> dict[str, Any]:
    """The engine: copies, files, lives, gaps, idle."""
    pairs: list[Pair] = [*engine.large(rounds), *engine.small(rounds)]
    pairs += engine.files(rounds, folder)
    console.print(table_of("engine", pairs))
    figures = {
        "4 KiB blocks in batches of 64 (blocks/s)": engine.batch_rate(),
        **{f"ledger life, {name}": value for name, value in lives.table().items()},
        **{f"loop gaps, {name}": value for name, value in engine.loop_gaps().items()},
        "wake-ups of an idle engine in 10 s": float(engine.idle_wakeups()),
    }
    console.print(_figures("engine alone", figures))
    return {"pairs": plain(pairs), "figures": figures}


def measure_codec(console: Console, rounds: int, folder: Path) -> dict[str, Any]:
    """The codec: beside LMCache's, each in its own process, and the cast alone."""
    del folder
    pairs = list(codec.against_lmcache(rounds))
    console.print(table_of("codec against lmcache 0.5.6, 2 threads each", pairs))
    figures = codec.cast_alone(rounds)
    console.print(_figures("codec alone (GB/s of BF16)", figures))
    return {"pairs": plain(pairs), "figures": figures}


def measure_store(console: Console, rounds: int, folder: Path) -> dict[str, Any]:
    """The store: beside bare threads and LMCache's file adapter, and its index."""
    pairs = store.files(rounds, folder)
    pairs += store_lmcache.lmcache(rounds, folder, _peer.build())
    console.print(table_of("store", pairs))
    figures = store.figures()
    console.print(_figures("store alone", figures))
    console.print(store.bytes_by_tier())
    return {"pairs": plain(pairs), "figures": figures}


def measure_cuda_host(console: Console, rounds: int, folder: Path) -> dict[str, Any]:
    """What a CUDA device costs the host, on a driver whose calls cost nothing."""
    del folder
    figures = cuda_host.figures(max(10, rounds * 400))
    console.print(_figures("host side of a CUDA device, no GPU", figures))
    return {"figures": figures}


def main(
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    only: Annotated[
        str, typer.Option(help="Parts to run, separated by commas.")
    ] = "engine,codec,store",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds for each pair.")] = 15,
    folder: Annotated[Path, typer.Option(help="Where files are written.")] = Path(),
) -> None:
    """Measure, show, and keep the figures with the conditions they were taken under."""
    parts = {
        "engine": measure_engine,
        "codec": measure_codec,
        "store": measure_store,
        "cuda-host": measure_cuda_host,
    }
    console = Console()
    report: dict[str, Any] = {"conditions": conditions(), "rounds": rounds}
    for name in only.split(","):
        if name not in parts:
            raise typer.BadParameter(f"{name!r}, expected some of {', '.join(parts)}")
        report[name] = parts[name](console, rounds, folder)
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        console.print(f"written to {out}")


def entry() -> None:
    """Run as ``python -m kvhold.bench``; with ``gpu`` first, as ``python -m kvhold.bench.gpu``."""
    if sys.argv[1:2] == ["gpu"]:
        from kvhold.bench.gpu import command  # noqa: PLC0415 - only where there is a GPU

        del sys.argv[1]
        typer.run(command)
    else:
        typer.run(main)


if __name__ == "__main__":
    entry()
