"""``python -m kvhold.crosscheck``: version 1 blobs against those of LMCache 0.5.6, byte for byte.

Every case goes both ways. Both sides encode the same keys and values: the blobs have to be equal. We
read the blob that they wrote, they read the one that we wrote: keys have to be what went in, and values
have to be equal bit for bit on both sides.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.table import Table

from kvhold._output import show
from kvhold._peer import LMCACHE, Peer, build
from tiers.codec import BLOB, V1Codec
from tiers.format import FormatError, Strings, V1Scope

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES: Final = ("bfloat16", "float16", "float32")
SHAPES: Final = ((5,), (7, 3), (3, 2, 4), (16, 8, 64), (2, 9, 4, 32))
MAGNITUDES: Final = {
    "zeros": 0.0,
    "1e-6": 1e-6,
    "1e-2": 1e-2,
    "1": 1.0,
    "300": 300.0,
    "1e4": 1e4,
    "mixed": -1.0,
}
STRINGS: Final = {"model_id": "mödel/1", "tokenizer_hash": "t" * 300, "kv_layout": "NHD"}
NUMBERS: Final = {"layer_id": 3, "chunk_id": 9, "chunk_size": 256, "page_size": 16}


@dataclass(frozen=True)
class Case:
    """One pair of keys and values and how it is to be encoded."""

    shape: tuple[int, ...]
    dtype: str
    magnitude: str
    scope: V1Scope
    keys: bool
    strings: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the other side."""
        return {
            "shape": list(self.shape),
            "key": self.dtype,
            "value": self.dtype,
            "scope": int(self.scope),
            "keys": self.keys,
            "head_axis": -2,
            "page_axis": 0,
            "strings": self.strings,
            "numbers": self.numbers,
        }

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, the same for the same case."""
        generator = torch.Generator().manual_seed(len(self.shape) * 100 + len(self.magnitude))
        key = torch.randn(self.shape, generator=generator).to(getattr(torch, self.dtype))
        value = torch.randn(self.shape, generator=generator)
        if self.magnitude == "mixed":
            value *= 10.0 ** torch.linspace(-6, 4, value.numel()).reshape(self.shape)
        else:
            value *= MAGNITUDES[self.magnitude]
        return key, value.to(getattr(torch, self.dtype))

    def codec(self) -> V1Codec:
        """Our side."""
        return V1Codec(
            self.shape,
            key=self.dtype,
            value=self.dtype,
            keys=self.keys,
            scope=self.scope,
            page_axis=0,
            strings=Strings(**self.strings),
            numbers=self.numbers,
        )


def cases() -> Iterator[Case]:
    """Dtypes by shapes by magnitudes, together and values alone, in every scope they can have."""
    for dtype, shape, magnitude in itertools.product(DTYPES, SHAPES, MAGNITUDES):
        for scope in (V1Scope.TENSOR, V1Scope.HEAD, V1Scope.PAGE_HEAD):
            if len(shape) < int(scope) + 1:
                continue
            yield Case(shape, dtype, magnitude, scope, keys=True)
            if scope != V1Scope.PAGE_HEAD:  # their writer of values alone has no page axis
                yield Case(shape, dtype, magnitude, scope, keys=False)
    extra: dict[str, Any] = {"strings": STRINGS, "numbers": NUMBERS}
    yield Case((3, 2, 4), "bfloat16", "1", V1Scope.HEAD, keys=True, **extra)
    yield Case((3, 2, 4), "float16", "1", V1Scope.PAGE_HEAD, keys=True, **extra)


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write_ours(folder: Path, number: int, case: Case) -> None:
    """Inputs and our blob of one case, for the other side to read."""
    key, value = case.tensors()
    codec = case.codec()
    source = {"key": key, "value": value} if case.keys else {"value": value}
    blob = bytearray(codec.outputs[BLOB].capacity)
    encoded = codec.encode(source, {BLOB: blob})[BLOB]
    (folder / f"{number}.k").write_bytes(raw(key))
    (folder / f"{number}.v").write_bytes(raw(value))
    (folder / f"{number}.ours").write_bytes(encoded.data)


def differences(folder: Path, number: int, case: Case) -> list[str]:
    """What does not agree; empty when everything does."""
    theirs = (folder / f"{number}.theirs").read_bytes()
    key, value = case.tensors()
    into = {"value": torch.zeros_like(value)} | (
        {"key": torch.zeros_like(key)} if case.keys else {}
    )
    try:
        case.codec().decode({BLOB: theirs}, into)
    except FormatError as error:
        return [f"we refuse theirs: {error}"]
    checks = {
        "blobs": theirs == (folder / f"{number}.ours").read_bytes(),
        "values": raw(into["value"]) == (folder / f"{number}.value").read_bytes(),
    }
    if case.keys:
        checks["keys we read"] = raw(into["key"]) == raw(key)
        checks["keys they read"] = (folder / f"{number}.key").read_bytes() == raw(key)
    return [name for name, equal in checks.items() if not equal]


def compare(python: Path) -> dict[str, Any]:
    """Exchange all cases with LMCache under `python`; how many agree, and which do not."""
    chosen = list(cases())
    with tempfile.TemporaryDirectory() as name, Peer(python) as peer:
        folder = Path(name)
        for number, case in enumerate(chosen):
            write_ours(folder, number, case)
        peer.ask(do="exchange", folder=name, cases=[case.as_json() for case in chosen])
        found = {str(c): differences(folder, n, c) for n, c in enumerate(chosen)}
    wrong = {name: what for name, what in found.items() if what}
    return {
        "against": LMCACHE,
        "cases": len(chosen),
        "together": sum(case.keys for case in chosen),
        "values_alone": sum(not case.keys for case in chosen),
        "equal": len(chosen) - len(wrong),
        "different": wrong,
    }


def command(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False
) -> None:
    """Compare version 1 blobs with LMCache's, both directions. Exit 1 if any differs."""
    found = compare(build())
    table = Table("what", "cases", title=f"kvhold and {found['against']}")
    for name in ("cases", "together", "values_alone", "equal"):
        table.add_row(name.replace("_", " "), str(found[name]))
    for name, what in found["different"].items():
        table.add_row(f"[red]{name}[/]", ", ".join(what))
    show(found, table, as_json=as_json)
    if found["different"]:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    app()


if __name__ == "__main__":
    main()
