"""Ways of posting side by side in one run: what each setting of `Pace` gains, beside the default.

Every trial first carries bytes out and back and compares them; then sizes take turns with their limit,
trial after trial, several times over, so that a machine that drifts spoils none of them. The best, if
it is surely better than the default, is what the parts that follow use.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from kvhold.bench.gpu_rig import (
    MIB,
    Bare,
    direct,
    median,
    page_layout,
    page_pools,
    rounds,
    scattered,
)
from transfer import Copy
from transfer.cuda import Pace, Way

if TYPE_CHECKING:
    from kvhold.bench.gpu_rig import Direct, Settings
    from transfer import Blocks

DEFAULT: Final = "default"
TRIALS: Final = {
    DEFAULT: Pace(),
    "two movers": Pace(movers=2),
    "64 MiB ahead": Pace(ahead=64 * MIB),
    "urgent": Pace(urgent=True),
    "ramp of 4 MiB": Pace(ramp=4 * MIB),
    "two movers, urgent": Pace(movers=2, urgent=True),
    "two movers, 64 MiB ahead": Pace(movers=2, ahead=64 * MIB),
}
BLOCKS: Final = (6, 48, 128)
"""12, 96 and 256 MiB."""
TWO_WAY: Final = 48
TURNS: Final = 4
SURELY: Final = 1.01
"""The default stays unless the mean is so much better."""


def measure(short: bool, settings: Settings) -> dict[str, Any]:
    """Fractions of a contiguous copy, and of both directions at once, by setting."""
    return _measure(short, settings, TRIALS)


def bare(short: bool, settings: Settings) -> dict[str, Any]:
    """The setting at hand by batches, and the same with the driver's own entry point.

    A part of its own: a call with wrong arguments would take the process with it.
    """
    calls = {DEFAULT: settings.pace, "bare": replace(settings.pace, bare=True)}
    return _measure(short, settings, calls, Way.BATCH)


def _measure(
    short: bool, settings: Settings, trials: dict[str, Pace], way: Way = Way.STAGED
) -> dict[str, Any]:
    gpu, host = page_pools(page_layout(32), 256, 128)
    near, far = scattered(gpu, 256), host.lease(128).handle
    alone = Bare(256 * MIB)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    problems: dict[str, str] = {}
    for _ in range(2 if short else 3):
        for name, pace in trials.items():
            if name in problems:
                continue
            with direct(settings, ways=(way,), pace=pace) as one:
                if not carries(one, near, far):
                    problems[name] = "the bytes that came back are not those that went"
                    continue
                for what, figure in _trial(one, alone, near, far):
                    found[name][what].append(figure)
    alone.close()
    host.close()
    gpu.close()
    rows = [
        {
            "pace": name,
            **asdict(pace),
            "fractions": {what: median(figures) for what, figures in found[name].items()},
            "problem": problems.get(name, ""),
        }
        for name, pace in trials.items()
    ]
    best = choose(rows)
    lines = [*map(_line, rows), f"taken from here on: {best['pace']}"]
    return {"rows": rows, "best": _options(best), "taken": best["pace"], "lines": lines}


def choose(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The setting with the best mean, or the default if that is about as good."""
    sound = [row for row in rows if not row["problem"]]
    plain = next((row for row in sound if row["pace"] == DEFAULT), None)
    best = max(sound, key=_mean, default=None)
    if best is None or (plain is not None and _mean(best) < SURELY * _mean(plain)):
        best = plain
    if best is None:
        raise RuntimeError("no setting carries bytes, not even the default one")
    return best


def _mean(row: dict[str, Any]) -> float:
    fractions = row["fractions"].values()
    return float(sum(fractions)) / max(1, len(fractions))


def _options(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in asdict(Pace())}


def _line(row: dict[str, Any]) -> str:
    fractions = ", ".join(f"{name} {value:.3f}" for name, value in row["fractions"].items())
    return f"{row['pace']:30}: {row['problem'] or fractions}"


def carries(one: Direct, near: Blocks, far: Blocks) -> bool:
    """Whether bytes that go out and come back to other pages are the same."""
    count = min(len(near) // 2, len(far))
    back = near[count : 2 * count]
    one.seconds(Copy(near[:count], far[:count]))
    one.seconds(Copy(far[:count], back))
    return all(
        bool((_bits(old, extent) == _bits(new, extent)).all())
        for extent in near.pool.layout.extents
        for old, new in list(zip(near[:count], back, strict=True))[:: max(1, count // 8)]
    )


def _bits(block: Any, extent: Any) -> Any:
    import torch  # noqa: PLC0415 - only where there is a GPU

    return block.tensor(extent.name, extent.layer).view(torch.int16)


def _trial(one: Direct, alone: Bare, near: Blocks, far: Blocks) -> list[tuple[str, float]]:
    figures = []
    for blocks in BLOCKS:
        for outward in (True, False):
            ends = (near[:blocks], far[:blocks])
            work = Copy(*(ends if outward else ends[::-1]))
            limit = functools.partial(alone.seconds, work.nbytes, outward=outward)
            most, ours = rounds(5, limit, functools.partial(one.seconds, work))
            figures.append((f"{2 * blocks} MiB {'out' if outward else 'in'}", most / ours))
    half, part = TWO_WAY, TWO_WAY // TURNS
    works = [
        copy
        for at in range(0, half, part)
        for copy in (
            Copy(near[at : at + part], far[at : at + part]),
            Copy(far[half + at : half + at + part], near[half + at : half + at + part]),
        )
    ]
    nbytes = sum(work.nbytes for work in works) // 2
    most, ours = rounds(5, functools.partial(alone.both, nbytes), lambda: one.seconds(*works))
    figures.append((f"{2 * half} MiB both", most / ours))
    return figures
