"""The command `kvhold quality`: load, measure, show."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvhold import plots
from kvhold.bench.pairs import conditions
from kvhold.model import ModelError, load
from kvhold.model_text import articles, documents
from kvhold.quality import Quality
from kvhold.quality_report import report_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvhold.quality_runs import Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_quality(
    settings: Settings, *, folder: Path, model: Path | None, text: Path | None
) -> dict[str, Any]:
    """Load a model, measure, and leave no file behind.

    Args:
        settings: size of the run.
        folder: where value files go for the time being; made if it is not there.
        model: folder of a model; the packaged one if None.
        text: documents, one a line; the packaged ones if None.

    Raises:
        ModelError: model or text cannot be had, or the sizes do not fit.
        TierError, OSError: the folder cannot be used.
    """
    if settings.dtype not in DTYPES:
        raise ModelError(f"dtype {settings.dtype!r}: expected {' or '.join(DTYPES)}")
    if settings.documents % settings.batch or settings.prefix % settings.page_size:
        raise ModelError(
            f"{settings.documents} documents in batches of {settings.batch}, prefixes of "
            f"{settings.prefix} tokens in pages of {settings.page_size}: expected whole ones"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as show:
        loading = show.add_task("loading the model", total=1)
        language = load(model, dtype=DTYPES[settings.dtype])
        show.advance(loading)
        length = settings.prefix + settings.suffix + 1
        texts = documents(language, articles(text), tokens=length, count=settings.documents)
        measuring = show.add_task("batches of documents", total=None)
        quality = Quality(
            language,
            texts,
            settings=settings,
            progress=lambda done, total: show.update(measuring, completed=done, total=total),
        )
        was_there = folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / "quality"
        try:
            anyio.run(quality.run, place)
        finally:
            shutil.rmtree(place if was_there else folder, ignore_errors=True)
    return report_of(quality, language, seed=settings.seed, conditions=conditions())


def keep(report: dict[str, Any], out: Path | None, picture: Path | None) -> None:
    """Write the figures and their picture where they are wanted.

    Raises:
        ModelError: a picture is wanted, and matplotlib is not installed.
        OSError: a file cannot be written.
    """
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if picture is not None:
        if not plots.available():
            raise ModelError("matplotlib is not installed: pip install 'kvhold[demo]'")
        plots.quality_picture(report, picture)
