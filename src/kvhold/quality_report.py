"""What `kvhold quality` found: figures with intervals, as data and as tables."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Table

from kvhold.quality import RESTORED
from kvhold.quality_formats import K8V8
from kvhold.quality_measure import Bootstrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from kvhold.model import LanguageModel
    from kvhold.quality import Found, Quality


def report_of(
    quality: Quality, model: LanguageModel, *, seed: int, conditions: Mapping[str, Any]
) -> dict[str, Any]:
    """All figures as data; part of the command's contract.

    Args:
        quality: a measurement that has run.
        model: what was measured.
        seed: of the bootstrap.
        conditions: what the figures were taken on.
    """
    documents = len(quality.reference_nll)
    bootstrap = Bootstrap(documents, seed=seed)
    kl = {name: [d.kl for d in found.distances] for name, found in quality.found.items()}
    return {
        "command": " ".join(["kvhold", *sys.argv[1:]]),
        "conditions": dict(conditions),
        "model": {"name": model.name, "revision": model.revision} | asdict(model.geometry),
        "settings": quality.settings,
        "documents": documents,
        "predictions": documents * int(str(quality.settings["suffix"])),
        "reference_nll": bootstrap.mean(quality.reference_nll)._asdict(),
        "formats": {
            name: _figures(found, bootstrap, quality.batches)
            for name, found in quality.found.items()
        },
        "kl_ratio": bootstrap.ratio(kl[K8V8.name], kl[RESTORED])._asdict(),
        "attention_isolated": quality.isolated,
        "batches": quality.batches,
        "batches_restored_equal": quality.equal,
        "mutations": [asdict(mutation) for mutation in quality.mutations],
        "kl_from_simulation": quality.simulation,
    }


def _figures(found: Found, bootstrap: Bootstrap, batches: int) -> dict[str, Any]:
    distances = found.distances
    continued = found.greedy
    return {
        "kl": bootstrap.mean([d.kl for d in distances])._asdict(),
        "delta_nll": bootstrap.mean([d.change for d in distances])._asdict(),
        "agreement": bootstrap.mean([d.agreement for d in distances])._asdict(),
        "attention": [error / batches for error in found.attention],
        "greedy_agreeing": continued,
    }


def is_sound(report: Mapping[str, Any]) -> bool:
    """Whether the measurement may be believed: the restored cache is what was read, and exactly it.

    Restored logits equal the never-offloaded ones in every bit, the format leaves a trace, every damage
    shows and none shows where none was done.
    """
    seen = [
        mutation["bits_differ"] is not mutation["what"].startswith("none")
        for mutation in report["mutations"]
    ]
    return (
        report["batches_restored_equal"] == report["batches"]
        and report["formats"][RESTORED]["kl"]["mean"] > 0
        and bool(seen)
        and all(seen)
    )


def _interval(figure: Mapping[str, float], digits: str) -> str:
    return f"{figure['mean']:{digits}} [{figure['low']:{digits}}, {figure['high']:{digits}}]"


LEGEND: Final = (
    "means over documents with 95 % bootstrap intervals; attention: relative RMS error of its "
    "output, mean over layers;\ngreedy: leading tokens as with 16 bits, of {greedy}"
)


def render(report: Mapping[str, Any]) -> RenderableType:
    """The report for people."""
    table = Table(
        title=(
            f"{report['model']['name']}: {report['predictions']} predictions in "
            f"{report['documents']} documents, against 16 bits"
        )
    )
    table.add_column("cache", no_wrap=True)
    for heading in ("KL (nats)", "ΔNLL (nats)", "same top token", "attention error", "greedy"):
        table.add_column(heading, justify="right")
    for name, figures in report["formats"].items():
        attention = figures["attention"]
        greedy = figures["greedy_agreeing"]
        table.add_row(
            name,
            _interval(figures["kl"], ".2e"),
            _interval(figures["delta_nll"], "+.1e"),
            _interval(figures["agreement"], ".4f"),
            f"{sum(attention) / len(attention):.4f}",
            f"{sum(greedy) / len(greedy):.1f}" if greedy else "",
        )
    equal, batches = report["batches_restored_equal"], report["batches"]
    lines: list[RenderableType] = [
        table,
        LEGEND.format(greedy=report["settings"]["greedy"]),
        f"KL of K8/V8 over that of K16/V8: {_interval(report['kl_ratio'], '.1f')}",
        f"restored equals never offloaded in every bit: {equal} of {batches} batches",
        f"KL of restored K16/V8 from its dense simulation: {report['kl_from_simulation']:.1e}",
        _damages(report),
    ]
    sound = is_sound(report)
    lines.append(
        "[green]✓ the restored cache is what was read[/]"
        if sound
        else "[red]✗ these figures prove nothing: see above[/]"
    )
    return Group(*lines)


def _damages(report: Mapping[str, Any]) -> RenderableType:
    table = Table(title="damage to restored pages of the first batch")
    for heading in ("what", "output", "KL (nats)"):
        table.add_column(heading)
    for mutation in report["mutations"]:
        changed = "changed" if mutation["bits_differ"] else "the same bits"
        table.add_row(mutation["what"], changed, f"{mutation['kl']:.2e}")
    return table
