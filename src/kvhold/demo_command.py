"""The command `kvhold demo`: load, run, show; its exit status says whether every answer is right."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvhold import plots
from kvhold._errors import UserError
from kvhold._output import check_writable, reason
from kvhold.demo import OWN_FOLDERS, Demo, Settings
from kvhold.folders import check_own, made
from kvhold.interrupts import Stop
from kvhold.model import load
from kvhold.model_text import articles, documents

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import TaskID

    from kvhold.demo_report import Report


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


def run_demo(
    settings: Settings, *, folder: Path, model: Path | None, text: Path | None, picture: Path
) -> Report:
    """Load everything, run all rounds, leave nothing behind but what a later run may use.

    Args:
        settings: size and faults.
        folder: where files go; made if it is not there.
        model: folder of a model; the packaged one if None.
        text: documents, one a line; the packaged ones if None.
        picture: a file that has to be writable afterwards.

    Raises:
        UserError: model or text cannot be had, or do not fit the settings.
        TierBusy: another run has the folder.
        OSError: the folder cannot be used.
    """
    if settings.tokens % settings.chunk:
        raise UserError(f"prefixes of {settings.tokens} tokens: expected multiples of 128")
    texts = articles(text)
    with made(folder):
        check_writable(folder / "demo.png", picture)
        for name in OWN_FOLDERS:
            check_own(folder / name)
    return _run(settings, folder, model, texts)


def _run(settings: Settings, folder: Path, model: Path | None, texts: list[str]) -> Report:
    show = Rounds()
    with show.progress:
        show("loading the model", 0, 1)
        language = load(model, dtype=torch.bfloat16)
        show("loading the model", 1, 1)
        wanted = documents(language, texts, tokens=settings.tokens, count=settings.documents)
        with Stop() as stop, made(folder):
            demo = Demo(language, wanted, folder=folder, settings=settings, progress=show)
            try:
                return stop.run(demo.run)
            finally:
                for name in OWN_FOLDERS & demo.opened:
                    shutil.rmtree(folder / name, ignore_errors=True)


def with_picture(report: Report, path: Path) -> str | None:
    """Draw the picture, and note in the report where it is; why there is none, where one was due."""
    if not plots.available():
        report.notes.append("no picture: matplotlib is not installed (pip install 'kvhold[demo]')")
        return None
    try:
        plots.demo_picture(report.as_json(), path)
    except OSError as error:
        return f"no picture: {reason(error)}"
    report.notes.append(f"picture: {path}")
    return None
