"""Pages to slots and back at the speed of the link, beside the ways that others take."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from kvhold.bench.gpu_rig import (
    MIB,
    Bare,
    Direct,
    Settings,
    direct,
    gigabytes,
    median,
    page_layout,
    page_pools,
    rounds,
    scattered,
)
from transfer import BlockLayout, Blocks, Copy, Engine, Extent
from transfer.cuda import DevicePool, PinnedPool, Way

if TYPE_CHECKING:
    from transfer import Pool

TURNS = 4
"""Operations of each direction when both go at once."""
AHEAD = 64 * MIB
"""Bytes that a direction queues before the other one gets its turn, in the second column."""
WAYS = (Way.STAGED, Way.MAPPED, Way.BATCH, Way.DMA)


def pages(short: bool, settings: Settings) -> dict[str, Any]:
    """Every size and both directions, by the way that is chosen and by each way alone."""
    rows: list[dict[str, Any]] = []
    count = 15 if short else 21
    for layers in (32,) if short else (32, 64):
        layout = page_layout(layers)
        each = layout.nbytes
        totals = [
            t for t in ((12, 96, 256) if short else (12, 96, 256, 1024)) if t * MIB // each >= 3
        ]
        most = max(totals) * MIB // each
        gpu, host = page_pools(layout, 2 * most, most)
        bare = Bare(most * each)
        source, target = scattered(gpu, most), host.lease(most).handle
        for total in totals:
            blocks = total * MIB // each
            some = (source[:blocks], target[:blocks])
            rows += [
                _row(settings, bare, layers, *some, outward=out, count=count)
                for out in (True, False)
            ]
        if not short:
            rows += _scattered_slots(settings, bare, layers, (source, target), count=count)
        bare.close()
        host.close()
        gpu.close()
    return {"rows": rows, "lines": [_line(row) for row in rows]}


def _row(
    settings: Settings,
    bare: Bare,
    layers: int,
    source: Blocks,
    target: Blocks,
    *,
    outward: bool,
    count: int,
) -> dict[str, Any]:
    work = Copy(source, target) if outward else Copy(target, source)
    nbytes = work.nbytes
    limit = functools.partial(bare.seconds, nbytes, outward=outward)
    found: dict[str, float] = {}
    with direct(settings) as chosen:
        plan = chosen.device.plan(work)
        contiguous, ours = rounds(count, limit, lambda: chosen.seconds(work))
        posting = median(chosen.posting)
    for way in WAYS:
        if way is Way.DMA and nbytes > 256 * MIB:
            continue
        with direct(settings, ways=(way,)) as one:
            turns = 3 if way is Way.DMA else count
            found[way.name] = gigabytes(
                nbytes, rounds(turns, functools.partial(one.seconds, work))[0]
            )
    if nbytes <= 256 * MIB and outward:
        found["tensor.copy_"] = gigabytes(nbytes, _by_tensors(source, target))
    engine = anyio.run(_by_engine, settings, work, count, backend_options={"use_uvloop": True})
    return {
        "layers": layers,
        "MiB": nbytes // MIB,
        "pages": len(source),
        "direction": "out" if outward else "in",
        "way": plan.way.name,
        "link": gigabytes(nbytes, contiguous),
        "ours": gigabytes(nbytes, ours),
        "fraction": contiguous / ours,
        "posting_us": posting * 1e6,
        "engine": gigabytes(nbytes, engine),
        "engine_fraction": contiguous / engine,
        "ways": found,
    }


def _line(row: dict[str, Any]) -> str:
    ways = " ".join(f"{name}={rate:.1f}" for name, rate in row["ways"].items())
    return (
        f"{row['layers']:3} layers {row['MiB']:5} MiB {row['pages']:4} pages {row['direction']:3} "
        f"link {row['link']:5.1f} ours {row['ours']:5.1f} ({row['way']}) = {row['fraction']:.3f}, "
        f"posted in {row['posting_us']:.0f} us; "
        f"engine {row['engine_fraction']:.3f}; {ways}"
    )


def _scattered_slots(
    settings: Settings,
    bare: Bare,
    layers: int,
    ends: tuple[Blocks, Blocks],
    *,
    count: int,
) -> list[dict[str, Any]]:
    """Slots that do not follow one another, at 256 MiB."""
    source, target = ends
    blocks = 256 * MIB // source.pool.layout.nbytes
    apart = Blocks(target.pool, target.ids[::2][:blocks], target.generations[::2][:blocks])
    found = []
    for outward in (True, False):
        some = (source[:blocks], apart)
        row = _row(settings, bare, layers, *some, outward=outward, count=count)
        found.append({**row, "direction": "out*" if outward else "in*"})
    return found


def _by_tensors(source: Blocks, target: Blocks) -> float:
    """One ``tensor.copy_`` for each tensor of each page, as engines without kernels do."""
    import torch  # noqa: PLC0415 - only where there is a GPU

    pairs = [
        (to.tensor(extent.name, extent.layer, write=True), of.tensor(extent.name, extent.layer))
        for of, to in zip(source, target, strict=True)
        for extent in source.pool.layout.extents
    ]

    def once() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for to, of in pairs:
            to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return median([once() for _ in range(3)])


async def _by_engine(settings: Settings, work: Copy, count: int) -> float:
    times = []
    async with Engine(settings.device(spin=float("inf"))) as engine:
        for _ in range(count + 2):
            began = time.perf_counter()
            await engine.run(work, after=())
            times.append(time.perf_counter() - began)
    return median(times[2:])


def two_way(short: bool, settings: Settings) -> dict[str, Any]:
    """Both directions at once against the same of contiguous copies.

    Each direction goes in `TURNS` operations, posted by turns: one thread posts both, and the second
    direction would stand still while it posts all of the first.
    """
    layout = page_layout(32)
    ahead = replace(settings.pace, ahead=AHEAD)
    rows: list[dict[str, Any]] = []
    for total in (96, 256, 1024):
        blocks = total * MIB // layout.nbytes
        gpu, host = page_pools(layout, 2 * blocks, 2 * blocks)
        near, far = scattered(gpu, 2 * blocks), host.lease(2 * blocks).handle
        part = blocks // TURNS
        work = [
            copy
            for at in range(0, blocks, part)
            for copy in (
                Copy(near[at : at + part], far[at : at + part]),
                Copy(far[blocks + at : blocks + at + part], near[blocks + at : blocks + at + part]),
            )
        ]
        bare = Bare(total * MIB)
        with direct(settings) as one, direct(settings, pace=ahead) as other:
            ways = " and ".join(one.device.plan(half).way.name for half in work[:2])
            limit, ours, soon = rounds(
                7 if short else 15,
                functools.partial(bare.both, total * MIB),
                functools.partial(one.seconds, *work),
                functools.partial(other.seconds, *work),
            )
        both = 2 * total * MIB
        rows.append(
            {
                "MiB": total,
                "limit": gigabytes(both, limit),
                "ours": gigabytes(both, ours),
                "fraction": limit / ours,
                "fraction_ahead": limit / soon,
                "operations": len(work),
                "ways": ways,
            }
        )
        bare.close()
        host.close()
        gpu.close()
    lines = [
        f"{r['MiB']:5} MiB each way: {r['ours']:.1f} of {r['limit']:.1f} GB/s = {r['fraction']:.3f} "
        f"({r['ways']}, {r['operations']} operations), {r['fraction_ahead']:.3f} with "
        f"{AHEAD // MIB} MiB queued ahead"
        for r in rows
    ]
    return {"rows": rows, "lines": lines}


def fragments(short: bool, settings: Settings) -> dict[str, Any]:
    """Small pages: rate by size and count at equal totals; slots in a row, and apart."""
    rows = []
    for total in (64,) if short else (64, 256):
        for kib in (4, 8, 16, 24, 28, 32, 48, 64):
            layout = BlockLayout((Extent("bytes", (kib << 10,), "uint8"),), (kib << 10,))
            blocks = total * MIB // (kib << 10)
            gpu, host = DevicePool(layout, 2 * blocks), PinnedPool(layout, 2 * blocks)
            near = scattered(gpu, blocks)
            rows += _fragment_rows(settings, near, host, count=5 if short else 11)
            host.close()
            gpu.close()
    best = {(r["MiB"], r["slots"], r["direction"]): r["chosen"] for r in rows if r["KiB"] == 64}
    for row in rows:
        row["of_64"] = row["chosen"] / best[row["MiB"], row["slots"], row["direction"]]
    lines = [
        f"{r['KiB']:3} KiB x {r['count']:6} {r['slots']:5} {r['direction']:3} chosen "
        f"{r['chosen']:5.1f} ({r['way']}) = {r['of_64']:.2f} of 64 KiB; "
        + " ".join(f"{name}={rate:.1f}" for name, rate in r["ways"].items())
        for r in rows
    ]
    return {"rows": rows, "lines": lines}


def _fragment_rows(
    settings: Settings, near: Blocks, host: Pool, *, count: int
) -> list[dict[str, Any]]:
    blocks = len(near)
    every = host.lease(2 * blocks).handle
    row = Blocks(host, every.ids[:blocks], every.generations[:blocks])
    apart = Blocks(host, every.ids[::2], every.generations[::2])
    found = []
    for slots, far in (("row", row), ("apart", apart)):
        for outward in (True, False):
            work = Copy(near, far) if outward else Copy(far, near)
            with direct(settings) as one:
                way = one.device.plan(work).way.name
                chosen = _rate(one, work, count)
            ways = {}
            for single in (Way.STAGED, Way.MAPPED, Way.BATCH):
                with direct(settings, ways=(single,)) as one:
                    ways[single.name] = _rate(one, work, count)
            found.append(
                {
                    "KiB": host.layout.nbytes >> 10,
                    "MiB": round(work.nbytes / MIB),
                    "count": blocks,
                    "slots": slots,
                    "direction": "out" if outward else "in",
                    "way": way,
                    "chosen": chosen,
                    "ways": ways,
                }
            )
    return found


def _rate(one: Direct, work: Copy, count: int) -> float:
    return gigabytes(work.nbytes, rounds(count, functools.partial(one.seconds, work))[0])
