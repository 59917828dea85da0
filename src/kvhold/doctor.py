"""`kvhold doctor`: what this machine has, what will be used, and what is off."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from transfer import FileDevice

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Verdict = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        what: what was looked at.
        found: what is there.
        use: what follows from it.
        verdict: ``"ok"``, ``"note"`` (works, with less) or ``"bad"`` (does not work).
    """

    what: str
    found: str
    use: str
    verdict: Verdict = "ok"


def version(distribution: str) -> str | None:
    """The installed version of a distribution, if it is installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def strangers() -> list[Finding]:
    """Unrelated distributions whose import packages collide with ours."""
    return [
        Finding(
            f"distribution {name}",
            f"{found} is installed",
            f"collides with kvhold's import package of that name: pip uninstall {name}",
            "bad",
        )
        for name in ("transfer", "attention", "tiers")
        if (found := version(name)) is not None
    ]


def _software() -> Iterable[Finding]:
    yield Finding("Python", platform.python_version(), "asyncio, and trio where it is installed")
    loop = version("uvloop")
    yield Finding(
        "uvloop",
        loop or "not installed",
        "EngineThread runs on it" if loop else "EngineThread runs on asyncio",
        "ok" if loop else "note",
    )


def _gpu() -> Iterable[Finding]:
    import torch  # noqa: PLC0415 - a second of import for this command only

    yield Finding("torch", str(torch.__version__), "tensors, codec")
    if not torch.cuda.is_available():
        yield Finding(
            "CUDA",
            f"torch sees no device (built for CUDA {torch.version.cuda or 'none'})",
            "host memory and files only; attention runs the reference",
            "note",
        )
    else:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("CUDA", ", ".join(names), "CudaDevice, one for each")
    for name, purpose in (
        ("cuda-bindings", "CudaDevice"),
        ("triton", "page kernels, K16/V8 attention"),
        ("flashinfer-python", "K16/V8 attention on FlashInfer's kernels"),
    ):
        found = version(name)
        yield Finding(
            name, found or "not installed", purpose if found else f"no {purpose}", _or_note(found)
        )


def _or_note(found: object) -> Verdict:
    return "ok" if found else "note"


def _limits() -> Iterable[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY in (soft, hard) or os.geteuid() == 0
    yield Finding(
        "locked-memory limit",
        "unlimited" if unlimited else f"{soft / 2**20:.0f} MiB",
        "page-locked pools of any size" if unlimited else "raise it (ulimit -l) for PinnedPool",
        "ok" if unlimited else "note",
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding("open files", str(files), "FileDevice keeps one per thread", "ok")


def _disk(folder: Path) -> Finding:
    where = str(folder)
    try:
        where = f"{folder}, {shutil.disk_usage(folder).free / 2**30:.0f} GiB free"
        file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115 - closed below
    except OSError as error:
        return Finding("files", where, f"cannot be written there: {error.strerror}", "bad")
    with file:
        try:
            file.write(bytes(4096))
            file.flush()
        except OSError as error:
            return Finding("files", where, f"cannot be written there: {error.strerror}", "bad")
        try:
            _write_direct(file.name)
        except OSError as error:
            return Finding("files", where, f"no O_DIRECT here ({error.strerror}): buffered", "note")
    return Finding("files", where, f"O_DIRECT, {FileDevice().threads} threads")


def _write_direct(path: str) -> None:
    """Write a page past the page cache.

    Raises:
        OSError: not here.
    """
    handle = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 4096) as page:
            os.pwrite(handle, page, 0)
    finally:
        os.close(handle)


def examine(folder: Path) -> list[Finding]:
    """Look at everything.

    Args:
        folder: where files would be kept.
    """
    return [*strangers(), *_software(), *_gpu(), *_limits(), _disk(folder)]


def table_of(findings: Iterable[Finding]) -> Table:
    """The report for people."""
    table = Table(title="kvhold doctor")
    for heading in ("", "what", "found", "use"):
        table.add_column(heading)
    marks = {"ok": "[green]✓", "note": "[yellow]·", "bad": "[red]✗"}
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.what, finding.found, finding.use)
    return table


def plain(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """The report as data."""
    return [asdict(finding) for finding in findings]
