"""Triton kernels that move bytes exactly, and how a kernel is compiled and launched on a raw stream.

Kernels take addresses as 64-bit integers, so one launch reads and writes any number of separate
allocations, page-locked host memory among them. A `Program` names a kernel and its constants;
`Programs` compiles it for one GPU from a written signature, without the argument inspection of
Triton's own launcher: a launch costs a few microseconds of the caller's time.

In Triton's interpreter (its environment variable set before this is imported) the same kernels run
on host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transfer._staging import COLUMNS, LARGE, SMALL


@triton.jit  # type: ignore[untyped-decorator]
def move_tiles(  # noqa: PLR0917 - a kernel's arguments are positional
    table: tl.int64,
    tiles: tl.int64,
    blocks: tl.int64,
    src_ids: tl.int64,
    dst_ids: tl.int64,
    src_at: tl.int64,
    dst_at: tl.int64,
    word: tl.constexpr,
    tile: tl.constexpr,
    column: tl.constexpr,
) -> None:
    """Move every tile of every block, byte for byte.

    A program takes every ``num_programs``-th item, so the grid bounds how many multiprocessors are
    used. Item i is tile ``i % tiles`` of block ``i // tiles``. An ids address of 0 stands for ids
    0, 1, 2 …; `src_at` and `dst_at` are added to all addresses.
    """
    longs = tl.pointer_type(tl.int64)
    if word == 8:
        kind = tl.pointer_type(tl.int64)
    elif word == 4:
        kind = tl.pointer_type(tl.int32)
    else:
        kind = tl.pointer_type(tl.int8)
    offsets = tl.arange(0, tile)
    first = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    for item in range(first, blocks * tiles, step):
        block = item // tiles
        row = (table + (item % tiles) * (column * 8)).to(longs)
        src_id = block
        if src_ids != 0:
            src_id = tl.load((src_ids + block * 8).to(longs))
        dst_id = block
        if dst_ids != 0:
            dst_id = tl.load((dst_ids + block * 8).to(longs))
        src = src_at + tl.load(row) + src_id * tl.load(row + 1)
        dst = dst_at + tl.load(row + 2) + dst_id * tl.load(row + 3)
        words = tl.load(row + 4)
        source = src.to(kind) + offsets
        target = dst.to(kind) + offsets
        if word == 8:
            # Elements of 8 bytes are chosen only where everything is a multiple of 16.
            words = tl.multiple_of(words, 2)
            source = tl.multiple_of(source, [16])
            target = tl.multiple_of(target, [16])
        inside = offsets < words
        tl.store(target, tl.load(source, mask=inside), mask=inside)


class Kernel(Protocol):
    """A Triton function as this module needs it."""

    arg_names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Bind a grid."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Program:
    """A kernel with everything that is known before it is launched.

    Attributes:
        name: for messages.
        kernel: the Triton function; every argument that is not a constant is a 64-bit integer.
        constants: compile-time arguments.
        warps: warps of a program.
        share: programs that make up one unit of the device's grid bound.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    share: int = 1

    def compiled(self, arch: int) -> Any:
        """Compile for a compute capability, e.g. 90; needs no GPU."""
        signature = {
            name: "constexpr" if name in self.constants else "i64" for name in self.kernel.arg_names
        }
        source = ASTSource(self.kernel, signature, constexprs=self.constants)
        options = {"num_warps": self.warps}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _mover(word: int, *, large: bool) -> Program:
    tile = LARGE if large else SMALL
    return Program(
        f"move {word}-byte words in tiles of {tile}",
        move_tiles,
        {"word": word, "tile": tile // word, "column": COLUMNS},
        16 if large else 4,
        1 if large else 4,
    )


MOVERS: Final[dict[tuple[int, bool], Program]] = {
    (8, True): _mover(8, large=True),
    (8, False): _mover(8, large=False),
    (4, False): _mover(4, large=False),
    (1, False): _mover(1, large=False),
}
"""Kernels by (bytes of an element, whether tiles are large)."""


@final
class Programs:
    """Kernels loaded on one GPU, to be launched on any of its streams.

    Args:
        arch: compute capability, e.g. 90.
    """

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self._loaded: dict[Program, Any] = {}

    def load(self, program: Program) -> None:
        """Compile and load a kernel; the GPU has to be the current device."""
        if program not in self._loaded:
            compiled = program.compiled(self.arch)
            compiled._init_handles()
            self._loaded[program] = compiled

    def launch(
        self, stream: int, units: int, program: Program, items: int, *arguments: int
    ) -> None:
        """Queue a kernel that was loaded.

        Args:
            stream: the stream's handle.
            units: about how many multiprocessors it may use.
            program: what to run.
            items: how much there is to do; bounds the grid too.
            arguments: as the kernel's, without the constants.

        Raises:
            RuntimeError: the driver refused.
        """
        compiled = self._loaded[program]
        grid = max(1, min(items, units * program.share))
        compiled[(grid, 1, 1)](*arguments, *program.constants.values(), stream=stream)


def interpret(program: Program, items: int, *arguments: int, grid: int = 2) -> None:
    """Run a kernel in Triton's interpreter, on host memory, at once."""
    bound = max(1, min(items, grid))
    program.kernel[(bound,)](*arguments, **program.constants)
