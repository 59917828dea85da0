"""`kvhold inspect FILE…`: what a blob holds, whether every check passes, and why not."""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import numpy as np
import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from kvhold._output import refuse, show
from tiers._errors import FormatError
from tiers._layout import VALUE_SCALE, ScaleScope, StaticScales
from tiers._team import Team
from tiers.format import Scheme, blob_version, open_v1, parse_v3

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from tiers.format import V1Blob, V1Header, V3Header

    Step: TypeAlias = Callable[[], "list[tuple[str, Step]]"]

HEADER: Final = "header"
PASSED: Final = "passed"


@dataclass
class Report:
    """What was found in one file.

    Attributes:
        path: the file.
        nbytes: its length.
        version: of the blob, None when it is none.
        header: what the header says, by field.
        components: each section: name, dtype, shape, bytes.
        checks: name and outcome of each check, in the order in which they were made.
        error: class name, field, found and expected of the refusal; None when valid.
    """

    path: str
    nbytes: int = 0
    version: int | None = None
    header: dict[str, Any] = field(default_factory=dict)
    components: list[dict[str, Any]] = field(default_factory=list)
    checks: list[tuple[str, str]] = field(default_factory=list)
    error: dict[str, str] | None = None

    @property
    def valid(self) -> bool:
        """Whether every check passed."""
        return self.error is None

    def as_json(self) -> dict[str, Any]:
        """For `--json`; part of the command's contract."""
        return {
            "file": self.path,
            "valid": self.valid,
            "bytes": self.nbytes,
            "version": self.version,
            "header": self.header,
            "components": self.components,
            "checks": [{"check": name, "outcome": outcome} for name, outcome in self.checks],
            "error": self.error,
        }

    def refuse(self, error: FormatError, check: str) -> None:
        """Note the check that failed; the first one is the reason."""
        self.checks.append((check, error.cause))
        self.error = self.error or {
            "cause": error.cause,
            "field": error.field,
            "message": str(error),
        }


def inspect_file(path: Path) -> Report:
    """Look at one file, through the page cache.

    Raises:
        OSError: it cannot be opened or mapped, or is no file that has an end.
    """
    if path.exists() and not path.is_file():
        what = errno.EISDIR if path.is_dir() else errno.EINVAL
        text = os.strerror(what) if path.is_dir() else "no regular file"
        raise OSError(what, text, str(path))
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return inspect_bytes(memoryview(b""), str(path))
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            return inspect_bytes(data, str(path))


def inspect_bytes(data: memoryview, path: str = "") -> Report:
    """Look at the bytes of one blob; every section is checked, also after one that is refused."""
    report = Report(path, nbytes=len(data))
    steps: deque[tuple[str, Step]] = deque([(HEADER, partial(_read_header, report, data))])
    while steps:
        name, step = steps.popleft()
        try:
            steps.extend(step())
        except FormatError as error:
            report.refuse(error, name)
        else:
            report.checks.append((name, PASSED))
    return report


def _read_header(report: Report, data: memoryview) -> list[tuple[str, Step]]:
    """Fill in what the header says, and give the checks that remain."""
    report.version = blob_version(data)
    if report.version == 3:
        header = parse_v3(data)
        _describe_v3(report, header)
        names = [section.part.name for section in header.plan.sections]
        return [(name, partial(_verify_section, report, header, data, name)) for name in names]
    blob = open_v1(data)
    _describe_v1(report, blob.header)
    return [("payload", partial(_verify_payload, blob))]


def _verify_section(
    report: Report, header: V3Header, data: memoryview, name: str
) -> list[tuple[str, Step]]:
    section = header.verify(data, name, Team())
    if name == VALUE_SCALE:
        _describe_scales(report, header, section)
    return []


def _describe_scales(report: Report, header: V3Header, section: memoryview) -> None:
    """Their range; of a producer's scales for all tokens the digest that a provenance has, too."""
    scales = np.frombuffer(section, dtype="<f4")
    report.header["scales"] = f"{scales.min():g} to {scales.max():g}"
    plan, scope = header.plan, header.plan.layout.scope
    if plan.scheme is Scheme.PRODUCER_SCALED and scope in {ScaleScope.TENSOR, ScaleScope.HEAD}:
        rows = scales.reshape(plan.layout.layers, -1)
        report.header["static_scales"] = StaticScales(scope, rows).digest.hex()


def _verify_payload(blob: V1Blob) -> list[tuple[str, Step]]:
    blob.verify(Team())
    return []


def _describe_v1(report: Report, header: V1Header) -> None:
    numbers = ("layer_id", "chunk_id", "chunk_size", "page_size", "kv_head_count", "head_dim")
    report.header = {
        "scheme": header.scheme.value,
        "scale_scope": header.scope.name.lower(),
        "key_dtype": header.key or "none",
        **{name: value for name, value in header.strings.items() if value},
        **{name: getattr(header, name) for name in numbers if getattr(header, name) >= 0},
        "header_bytes": header.header_bytes,
    }
    parts = [
        ("key", header.key or "none", header.key_bytes, None),
        ("value", "float8_e4m3fn", header.value_bytes, None),
        ("value_scale", "float32", header.scale_bytes, list(header.scale_shape)),
    ]
    report.components = [
        {"name": name, "dtype": dtype, "shape": shape, "bytes": nbytes}
        for name, dtype, nbytes, shape in parts
        if nbytes
    ]


def _describe_v3(report: Report, header: V3Header) -> None:
    plan, layout = header.plan, header.plan.layout
    report.header = {
        "key_digest": header.identity.key.hex(),
        "provenance": header.identity.provenance.hex(),
        "put_id": header.identity.put.hex(),
        "scheme": plan.scheme.value if plan.scheme else "none",
        "scale_scope": layout.scope.value if layout.scope else "none",
        "page_order": layout.order.value,
        "layers": layout.layers,
        "pages": plan.pages,
        "page_size": layout.page_size,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "value_dim": layout.value_width,
        "key_dtype": layout.key,
        "value_dtype": layout.value or "none",
    }
    report.components = [
        {
            "name": section.part.name,
            "dtype": section.part.dtype,
            "axes": section.part.axes,
            "shape": list(section.part.shape),
            "bytes": section.part.nbytes,
            "offset": section.offset,
            "crc32": f"{header.crcs[section.part.name]:08x}",
        }
        for section in plan.sections
    ]


def render(report: Report) -> Group:
    """A report for people."""
    verdict = "[green]valid[/]" if report.valid else "[red]refused[/]"
    version = f"version {report.version}" if report.version else "no known version"
    lines: list[RenderableType] = [
        f"[bold]{escape(report.path)}[/]: {verdict}, {version}, {report.nbytes} bytes"
    ]
    if report.error:
        lines.append(escape(f"  {report.error['cause']}: {report.error['message']}"))
    lines += [escape(f"  {name}: {value}") for name, value in report.header.items()]
    if report.components:
        names = list(report.components[0])
        table = Table(*names)
        for part in report.components:
            table.add_row(
                *("" if part[name] is None else escape(str(part[name])) for name in names)
            )
        lines.append(table)
    lines += [f"  check {name}: {outcome}" for name, outcome in report.checks]
    return Group(*lines)


def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files to look at: .whole and .part of a folder, or blobs from elsewhere.",
            show_default=False,
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say what files of stored pages (blobs) hold, and whether every check of them passes.

    Exit 0 if all are valid, 1 if one is refused, 2 if one cannot be read.
    """
    reports: list[Report] = []
    unreadable: list[dict[str, str]] = []
    for path in files:
        try:
            reports.append(inspect_file(path))
        except OSError as error:
            unreadable.append({"file": str(path), "error": error.strerror or str(error)})
    shown: list[RenderableType] = [render(report) for report in reports]
    document = {"files": [report.as_json() for report in reports], "unreadable": unreadable}
    show(document, Group(*shown), as_json=as_json)
    if unreadable:
        refuse("; ".join(f"{one['file']}: {one['error']}" for one in unreadable))
    if not all(report.valid for report in reports):
        raise typer.Exit(1)
