"""The command `kvhold quality`: load, measure, show."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvhold import plots
from kvhold._errors import UserError
from kvhold._output import as_json_text, check_writable, write
from kvhold.bench.pairs import conditions
from kvhold.folders import scratch
from kvhold.interrupts import Stop
from kvhold.model import load
from kvhold.model_text import articles, documents
from kvhold.quality import Quality
from kvhold.quality_report import report_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvhold.quality_runs import Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_quality(
    settings: Settings,
    *,
    folder: Path,
    model: Path | None,
    text: Path | None,
    outputs: tuple[Path | None, ...] = (),
) -> dict[str, Any]:
    """Load a model, measure, and leave no file behind.

    Args:
        settings: size of the run.
        folder: where value files go for the time being; made if it is not there.
        model: folder of a model; the packaged one if None.
        text: documents, one a line; the packaged ones if None.
        outputs: files that have to be writable afterwards.

    Raises:
        UserError: model or text cannot be had, or the sizes do not fit.
        TierError, OSError: the folder cannot be used, or an output not written.
    """
    check(settings)
    check_writable(*outputs)
    texts = articles(text)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as show:
        loading = show.add_task("loading the model", total=1)
        language = load(model, dtype=DTYPES[settings.dtype])
        show.advance(loading)
        length = settings.prefix + settings.suffix + 1
        if length > language.geometry.max_tokens:
            raise UserError(
                f"documents of {length} tokens: {language.name} takes {language.geometry.max_tokens}"
            )
        wanted = documents(language, texts, tokens=length, count=settings.documents)
        measuring = show.add_task("batches of documents", total=None)
        quality = Quality(
            language,
            wanted,
            settings=settings,
            progress=lambda done, total: show.update(measuring, completed=done, total=total),
        )
        with Stop() as stop, scratch(folder, "quality") as place:
            stop.run(partial(quality.run, place))
    return report_of(quality, language, seed=settings.seed, conditions=conditions())


def check(settings: Settings) -> None:
    """See to it that the sizes fit each other.

    Raises:
        UserError: says which do not.
    """
    if settings.dtype not in DTYPES:
        raise UserError(f"dtype {settings.dtype!r}: expected {' or '.join(DTYPES)}")
    if settings.documents % settings.batch or settings.prefix % settings.page_size:
        raise UserError(
            f"{settings.documents} documents in batches of {settings.batch}, prefixes of "
            f"{settings.prefix} tokens in pages of {settings.page_size}: expected whole ones"
        )


def keep(report: dict[str, Any], out: Path | None, picture: Path | None) -> None:
    """Write the figures and their picture where they are wanted.

    Raises:
        UserError: a picture is wanted, and matplotlib is not installed.
        OSError: a file cannot be written.
    """
    if out is not None:
        write(out, as_json_text(report))
    if picture is not None:
        if not plots.available():
            raise UserError("matplotlib is not installed: pip install 'kvhold[demo]'")
        plots.quality_picture(report, picture)
