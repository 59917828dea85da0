"""The command `kvhold demo`: load, run, show; its exit status says whether every answer is right."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import anyio
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvhold import plots
from kvhold.demo import OWN_FOLDERS, Demo, Settings
from kvhold.demo_report import Report, render
from kvhold.model import load
from kvhold.model_text import articles, documents

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType
    from rich.progress import TaskID


class Rounds:
    """Shows each round as a line with a bar, on standard error."""

    def __init__(self) -> None:
        self._bars: dict[str, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )

    def __call__(self, name: str, done: int, total: int) -> None:
        """A step of a round is done."""
        if name not in self._bars:
            self._bars[name] = self.progress.add_task(name, total=total)
        self.progress.update(self._bars[name], completed=done)


def run_demo(settings: Settings, *, folder: Path, model: Path | None, text: Path | None) -> Report:
    """Load everything, run all rounds, leave nothing behind but what a later run may use.

    Args:
        settings: size and faults.
        folder: where files go; made if it is not there.
        model: folder of a model; the packaged one if None.
        text: documents, one a line; the packaged ones if None.

    Raises:
        ModelError: model or text cannot be had.
        TierBusy: another run has the folder.
        OSError: the folder cannot be used.
    """
    # Faults are the purpose here: the library's warnings about them would only tear the bars.
    logging.getLogger("kvhold").addHandler(logging.NullHandler())
    folder.mkdir(parents=True, exist_ok=True)
    show = Rounds()
    with show.progress:
        show("loading the model", 0, 1)
        language = load(model, dtype=torch.bfloat16)
        show("loading the model", 1, 1)
        texts = documents(
            language, articles(text), tokens=settings.tokens, count=settings.documents
        )
        demo = Demo(language, texts, folder=folder, settings=settings, progress=show)
        try:
            return anyio.run(demo.run)
        finally:
            for name in OWN_FOLDERS & demo.opened:
                shutil.rmtree(folder / name, ignore_errors=True)


def with_picture(report: Report, path: Path) -> RenderableType:
    """Draw the picture; the report for people, which says where it is."""
    if plots.available():
        plots.demo_picture(report.as_json(), path)
        report.notes.append(f"picture: {path}")
    else:
        report.notes.append("no picture: matplotlib is not installed (pip install 'kvhold[demo]')")
    return render(report)
