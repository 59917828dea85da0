"""What copies reach by multiprocessors and staging, and the table that plans are made by."""

from __future__ import annotations

import functools
from collections import defaultdict
from contextlib import ExitStack
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
    samples,
    scattered,
)
from kvhold.bench.pairs import percentile
from transfer import BlockLayout, Blocks, Copy, Extent
from transfer._cuda_plan import Besides, Rate
from transfer.cuda import CopyTable, DevicePool, PinnedPool, Way

if TYPE_CHECKING:
    from kvhold.bench.gpu_rig import Direct, Settings

UNITS = (8, 16, 32)
AREAS = (8, 16, 32)
"""Multiprocessors, and MiB of a staging area, that are tried."""
SMALL, LARGE = 16 * MIB, 128 * MIB
"""Two sizes whose difference gives a rate."""
SIZES = tuple(size * MIB for size in (2, 6, 12, 32, 64, 128))
WHOLE_KIB = 2048
"""Sizes, in pieces of so many KiB, at which it is measured what a way costs besides its rate."""


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
    """Rates by way, direction and piece, and what each way costs besides: a `CopyTable`.

    All ways of one size of piece take turns, so that a bad second is every way's.
    """
    lines: list[str] = []
    rates: list[Rate] = []
    besides: list[Besides] = []
    spreads: list[float] = []
    count = 5 if short else 9
    for kib in (4, 8, 16, 24, 28, 32, 64, 256, 2048, 8192):
        size = kib << 10
        layout = BlockLayout((Extent("bytes", (size,), "uint8"),), (size,))
        many = LARGE // size
        gpu, host = DevicePool(layout, 2 * many), PinnedPool(layout, 2 * many)
        near, every = scattered(gpu, many), host.lease(2 * many).handle
        far = Blocks(host, every.ids[::2], every.generations[::2])
        with ExitStack() as stack:
            devices = {
                way: stack.enter_context(direct(settings, ways=(way,)))
                for way in (Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED)
            }
            for outward in (True, False):
                ends = (near, far) if outward else (far, near)
                found = _rates(devices, ends, size, outward=outward, count=count)
                rates += found
                lines += [_rate_line(rate) for rate in found]
                if kib == WHOLE_KIB:
                    rest, spread = _besides(devices, ends, found, count=count + 2)
                    besides += rest
                    spreads += spread
        host.close()
        gpu.close()
    lines += [
        f"{r.way.name:7} {r.nbytes // MIB:4} MiB {'out' if r.outward else 'in':3} costs "
        f"{r.seconds * 1e6:6.1f} us besides"
        for r in besides
    ]
    rests = defaultdict(list)
    for rest_of in besides:
        rests[rest_of.way].append(rest_of.seconds)
    base = tuple((way, max(median(found), 1e-6)) for way, found in rests.items())
    noise = median(spreads)
    lines.append(f"the middle half of equal measurements lies within {100 * noise:.1f} %")
    origin = "measured by kvhold.bench.gpu"
    made = CopyTable(origin, tuple(rates), base, tuple(besides), noise)
    return {"table": made.dump(), "noise": noise, "lines": lines}


def _rate_line(rate: Rate) -> str:
    direction = "out" if rate.outward else "in"
    return (
        f"{rate.way.name:7} {rate.fragment >> 10:6} KiB {direction:3} {rate.rate / 1e9:5.1f} GB/s"
    )


def _rates(
    devices: dict[Way, Direct], ends: tuple[Blocks, Blocks], size: int, *, outward: bool, count: int
) -> list[Rate]:
    """One line for each way; the driver's copies of small pieces, which take long, by themselves."""
    few = max(1, SMALL // size)
    part, whole = Copy(ends[0][:few], ends[1][:few]), Copy(*ends)
    slow = [Way.DMA] if size < 64 << 10 else []
    found = []
    for ways, turns in ((slow, 2), ([way for way in devices if way not in slow], count)):
        calls = [
            functools.partial(devices[way].seconds, work) for way in ways for work in (part, whole)
        ]
        times = rounds(turns, *calls)
        for way, short, long in zip(ways, times[::2], times[1::2], strict=True):
            rate = (whole.nbytes - part.nbytes) / max(long - short, 1e-9)
            found.append(Rate(way, outward, size, rate))
    return found


def _besides(
    devices: dict[Way, Direct], ends: tuple[Blocks, Blocks], rates: list[Rate], *, count: int
) -> tuple[list[Besides], list[float]]:
    """What copies of several sizes take longer than their rate; how far equal ones are apart."""
    per_block = ends[0].pool.layout.nbytes
    found, spreads = [], []
    speeds = {rate.way: rate for rate in rates}
    for size in SIZES:
        blocks = max(1, min(size // per_block, len(ends[0])))
        work = Copy(ends[0][:blocks], ends[1][:blocks])
        calls = [functools.partial(one.seconds, work) for one in devices.values()]
        for way, times in zip(devices, samples(count, *calls), strict=True):
            took, rate = median(times), speeds[way]
            rest = max(took - work.nbytes / rate.rate, 1e-6)
            found.append(Besides(way, rate.outward, work.nbytes, rest))
            spreads.append((percentile(times, 75) - percentile(times, 25)) / took)
    return found, spreads
