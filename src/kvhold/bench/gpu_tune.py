"""What the copy kernels reach by grid, tile and staging, and the table that plans are made by."""

from __future__ import annotations

import functools
from typing import Any

from kvhold.bench.gpu_rig import (
    MIB,
    direct,
    gigabytes,
    page_layout,
    page_pools,
    rounds,
    scattered,
)
from transfer import BlockLayout, Blocks, Copy, Extent
from transfer.cuda import CopyTable, DevicePool, PinnedPool, Way


def measure(short: bool) -> dict[str, Any]:
    """Staged and mapped copies by multiprocessors and by staging area; the kernel alone."""
    layout = page_layout(32)
    gpu, host = page_pools(layout, 256, 128)
    near, far = scattered(gpu, 128), host.lease(128).handle
    count = 5 if short else 11
    rows: list[dict[str, Any]] = []
    for way in (Way.STAGED, Way.MAPPED):
        for units in (4, 8, 16, 24, 32, 64, 128):
            rows += _both_ways(near, far, count, ways=(way,), multiprocessors=units)
    for area in (2, 4, 8, 16, 32):
        rows += _both_ways(near, far, count, ways=(Way.STAGED,), staging=area * MIB)
    for units in (4, 8, 16, 24, 32, 64, 128):
        work = Copy(near[:64], near[64:])
        with direct(multiprocessors=units) as one:
            took = rounds(count, functools.partial(one.seconds, work))[0]
        rows.append({"kernel": units, "GB/s": gigabytes(work.nbytes, took)})
    movers = _movers(near)
    host.close()
    return {"rows": rows, "lines": [str(row) for row in (*rows, *movers)]}


def _both_ways(near: Blocks, far: Blocks, count: int, **options: Any) -> list[dict[str, Any]]:
    found = []
    shown = {name: str(value) for name, value in options.items()}
    with direct(**options) as one:
        for blocks in (6, 48, 128):
            row: dict[str, Any] = {**shown, "MiB": blocks * 2}
            for name, work in (
                ("out", Copy(near[:blocks], far[:blocks])),
                ("in", Copy(far[:blocks], near[:blocks])),
            ):
                took = rounds(count, functools.partial(one.seconds, work))[0]
                row[name] = round(gigabytes(work.nbytes, took), 2)
            found.append(row)
    return found


def _movers(near: Blocks) -> list[dict[str, Any]]:
    """The mover alone by tile and warps, at 16 programs: rate of each program."""
    import torch  # noqa: PLC0415 - only where there is a GPU

    from transfer._staging import COLUMNS, CopyTables  # noqa: PLC0415 - as above
    from transfer.kernels import Program, Programs, move_tiles  # noqa: PLC0415 - needs Triton

    work = Copy(near[:32], near[64:96])
    tables = CopyTables(near.pool, near.pool, work.runs)
    major, minor = torch.cuda.get_device_capability(0)
    programs = Programs(major * 10 + minor)
    ids = [torch.as_tensor(h.ids, device="cuda:0") for h in (work.src, work.dst)]
    stream = torch.cuda.current_stream()
    found = []
    for tile in (8192, 16384, 32768):
        runs = tables.runs
        whole = tables.tiles.rows
        cut = whole.repeat(max(1, 32768 // tile), axis=0)
        steps = [i * tile for _ in range(len(whole)) for i in range(max(1, 32768 // tile))]
        cut[:, 0] += steps
        cut[:, 2] += steps
        cut[:, 4] = tile // 8
        table = torch.as_tensor(cut, device="cuda:0")
        for warps in (4, 8, 16, 32):
            constants = {"word": 8, "tile": tile // 8, "column": COLUMNS}
            program = Program("trial", move_tiles, constants, warps)
            programs.load(program)
            cuda: Any = torch.cuda
            for grid in (8, 16, 32):
                times = []
                for _ in range(6):
                    ends = (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
                    ends[0].record()
                    programs.launch(
                        int(stream.cuda_stream),
                        grid,
                        program,
                        len(cut) * 32,
                        table.data_ptr(),
                        len(cut),
                        32,
                        ids[0].data_ptr(),
                        ids[1].data_ptr(),
                        0,
                        0,
                    )
                    ends[1].record()
                    ends[1].synchronize()
                    times.append(ends[0].elapsed_time(ends[1]) / 1e3)
                rate = gigabytes(runs.total * 32, sorted(times)[2])
                found.append({"tile": tile, "warps": warps, "grid": grid, "GB/s": round(rate, 1)})
    return found


def table(short: bool) -> dict[str, Any]:
    """Rates by way, direction and piece, and what each way costs besides: a `CopyTable`."""
    from transfer._cuda_plan import Rate  # noqa: PLC0415 - a private class of the package below

    lines: list[str] = []
    rates: list[Rate] = []
    count = 5 if short else 9
    total = 64 * MIB
    for kib in (4, 8, 16, 24, 28, 32, 64, 256, 2048, 16384):
        size = kib << 10
        layout = BlockLayout((Extent("bytes", (size,), "uint8"),), (size,))
        blocks = total // size
        gpu, host = DevicePool(layout, 2 * blocks), PinnedPool(layout, 2 * blocks)
        near, every = scattered(gpu, blocks), host.lease(2 * blocks).handle
        far = Blocks(host, every.ids[::2], every.generations[::2])
        for way in (Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED):
            if way is Way.STAGED and kib > 8192:
                continue
            with direct(ways=(way,)) as one:
                for outward in (True, False):
                    work = Copy(near, far) if outward else Copy(far, near)
                    turns = 2 if way is Way.DMA and kib < 64 else count
                    took = rounds(turns, functools.partial(one.seconds, work))[0]
                    rates.append(Rate(way, outward, size, total / took))
                    lines.append(f"{way.name:7} {kib:6} KiB out={outward} {total / took / 1e9:.2f}")
        host.close()
        gpu.close()
    base = tuple((way, _base(way)) for way in (Way.DMA, Way.BATCH, Way.STAGED, Way.MAPPED))
    lines += [f"{way.name} costs {seconds * 1e6:.1f} us" for way, seconds in base]
    made = CopyTable("measured by kvhold.bench.gpu", tuple(rates), base)
    return {"table": made.dump(), "lines": lines}


def _base(way: Way) -> float:
    """Seconds that the smallest copy takes."""
    layout = page_layout(1)
    gpu, host = page_pools(layout, 4, 4)
    work = Copy(gpu.lease().handle, host.lease().handle)
    with direct(ways=(way,)) as one:
        found = rounds(50, functools.partial(one.seconds, work))[0]
    host.close()
    return found
