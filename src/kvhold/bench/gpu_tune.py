"""What copies reach by multiprocessors and staging, and the table that plans are made by."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kvhold.bench.gpu_rig import (
    MIB,
    Bare,
    direct,
    gigabytes,
    median,
    page_layout,
    page_pools,
    rounds,
    scattered,
)
from transfer import BlockLayout, Blocks, Copy, Extent
from transfer._cuda_plan import Rate
from transfer.cuda import CopyTable, DevicePool, PinnedPool, Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvhold.bench.gpu_rig import Settings

UNITS = (8, 16, 32)
AREAS = (8, 16, 32)
"""Multiprocessors, and MiB of a staging area, that are tried."""
SMALL, LARGE = 16 * MIB, 128 * MIB
"""Two sizes whose difference gives a rate, and whose rest is what a way costs besides."""


def measure(short: bool, settings: Settings) -> dict[str, Any]:
    """Fraction of a contiguous copy by multiprocessors and staging; every trial beside its limit.

    The trials are gone through several times, so that a machine that drifts spoils none of them.
    """
    layout = page_layout(32)
    gpu, host = page_pools(layout, 256, 128)
    near, far = scattered(gpu, 128), host.lease(128).handle
    bare = Bare(256 * MIB)
    trials: list[dict[str, Any]] = [
        {"ways": (Way.STAGED,), "multiprocessors": units, "staging": area * MIB}
        for units in UNITS
        for area in AREAS
    ]
    trials += [{"ways": (Way.MAPPED,), "multiprocessors": units} for units in UNITS]
    found: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for _ in range(2 if short else 4):
        for number, options in enumerate(trials):
            with direct(settings, **options) as one:
                for blocks in (6, 48, 128):
                    for outward in (True, False):
                        ends = (near[:blocks], far[:blocks])
                        work = Copy(*(ends if outward else ends[::-1]))
                        limit = functools.partial(bare.seconds, work.nbytes, outward=outward)
                        most, ours = rounds(5, limit, functools.partial(one.seconds, work))
                        found[number, blocks, outward].append(most / ours)
    rows = [_trial(options, number, found) for number, options in enumerate(trials)]
    staged = [row for row in rows if row["way"] == "STAGED"]
    best = max(staged, key=lambda row: row["mean of the large ones"])
    bare.close()
    host.close()
    gpu.close()
    kernels = _kernel_alone(settings)
    return {
        "rows": rows,
        "kernels": kernels,
        "best": {name: best[name] for name in ("multiprocessors", "staging")},
        "lines": [*map(_line, rows), *(f"kernel alone: {row}" for row in kernels)],
    }


def _trial(
    options: dict[str, Any], number: int, found: dict[tuple[int, int, bool], list[float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {**options, "way": options["ways"][0].name}
    del row["ways"]
    fractions = {
        f"{2 * blocks} MiB {'out' if outward else 'in'}": median(found[number, blocks, outward])
        for blocks in (6, 48, 128)
        for outward in (True, False)
    }
    large = [value for name, value in fractions.items() if not name.startswith("12 ")]
    return row | {"fractions": fractions, "mean of the large ones": sum(large) / len(large)}


def _line(row: dict[str, Any]) -> str:
    fractions = ", ".join(f"{name} {value:.3f}" for name, value in row["fractions"].items())
    staging = row.get("staging", 0) // MIB
    return f"{row['way']:6} {row['multiprocessors']:3} SMs, {staging:2} MiB staging: {fractions}"


def _kernel_alone(settings: Settings) -> list[dict[str, Any]]:
    """Pages to pages inside the GPU."""
    gpu = DevicePool(page_layout(32), 256)
    near = scattered(gpu, 128)
    work = Copy(near[:64], near[64:])
    rows = []
    for units in (*UNITS, 64, 128):
        with direct(settings, multiprocessors=units) as one:
            took = rounds(5, functools.partial(one.seconds, work))[0]
        rate = round(gigabytes(work.nbytes, took), 1)
        rows.append({"multiprocessors": units, "GB/s": rate})
    gpu.close()
    return rows


def table(short: bool, settings: Settings) -> dict[str, Any]:
    """Rates by way, direction and piece, and what each way costs besides: a `CopyTable`."""
    lines: list[str] = []
    rates: list[Rate] = []
    rest: dict[Way, list[float]] = defaultdict(list)
    count = 5 if short else 9
    for kib in (4, 8, 16, 24, 28, 32, 64, 256, 2048, 8192):
        size = kib << 10
        layout = BlockLayout((Extent("bytes", (size,), "uint8"),), (size,))
        few, many = SMALL // size, LARGE // size
        gpu, host = DevicePool(layout, 2 * many), PinnedPool(layout, 2 * many)
        near, every = scattered(gpu, many), host.lease(2 * many).handle
        far = Blocks(host, every.ids[::2], every.generations[::2])
        for way in (Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED):
            turns = 2 if way is Way.DMA and kib < 64 else count
            with direct(settings, ways=(way,)) as one:
                for outward in (True, False):
                    ends = (near, far) if outward else (far, near)
                    whole = Copy(*ends)
                    part = Copy(ends[0][:few], ends[1][:few])
                    rate, besides = _fit(part, whole, one.seconds, turns)
                    rates.append(Rate(way, outward, size, rate))
                    rest[way].append(besides)
                    lines.append(
                        f"{way.name:7} {kib:6} KiB {'out' if outward else 'in':3} "
                        f"{rate / 1e9:5.1f} GB/s and {besides * 1e6:5.1f} us"
                    )
        host.close()
        gpu.close()
    base = tuple((way, max(median(found), 1e-6)) for way, found in rest.items())
    lines += [f"{way.name} costs {seconds * 1e6:.1f} us besides" for way, seconds in base]
    made = CopyTable("measured by kvhold.bench.gpu", tuple(rates), base)
    return {"table": made.dump(), "lines": lines}


def _fit(
    part: Copy, whole: Copy, seconds: Callable[[Copy], float], turns: int
) -> tuple[float, float]:
    """Bytes per second from one size to the next, and seconds that are left over."""
    short, long = rounds(turns, functools.partial(seconds, part), functools.partial(seconds, whole))
    rate = (whole.nbytes - part.nbytes) / max(long - short, 1e-9)
    return rate, short - part.nbytes / rate
