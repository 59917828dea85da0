"""The kernels' own file: compiled for an H200 without one, so that a GPU run fails for no typo."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SOURCE = Path(__file__).parent.parent.parent / "src"

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention import _jit

POINTERS = dict(query="*bf16", key="*bf16", value="*fp8e4nv", scale="*fp32", indptr="*i32",
                indices="*i32", last="*i32", starts="*i32", out="*bf16", lse="*fp32",
                part="*fp32", sums="*fp32", slots="*i64", key_pages="*i16",
                value_pages="*fp8e4nv", lost="*i64", factor="fp32", done="*i32", joined="*bf16",
                joined_lse="*fp32")
SHAPE = dict(dim=128, width=128)
APART, FUSED = dict(many=0, few=1), dict(many=64, few=32)
CASES = [
    (_jit.decode, dict(SHAPE, rows=16, blocks=1, page=16, tokens=128, by_token=False, stages=3, **APART)),
    (_jit.decode, dict(SHAPE, rows=16, blocks=1, page=1, tokens=64, by_token=True, stages=3, **APART)),
    (_jit.decode, dict(SHAPE, rows=16, blocks=1, page=16, tokens=64, by_token=False, stages=5, **FUSED)),
    (_jit.prefill, dict(SHAPE, rows=64, page=16, tokens=64, by_token=True, causal=True, stages=3)),
    (_jit.merge, dict(SHAPE, many=8)),
    (_jit.append, dict(SHAPE, limit=448.0, page=16, by_token=True, dynamic=True)),
]
for kernel, constants in CASES:
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32")
                 for name in kernel.arg_names}
    if constants.get("many") == 64:
        signature["out"] = "*fp32"
    if kernel is _jit.append:
        signature["key"] = "*i16"
    wide = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name[:2] in ("q_", "k_", "v_", "i_", "j_")}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=wide)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    text = made.asm["ptx"]
    print(kernel.__name__, text.count("mma"), text.count("cp.async.cg"), text.count("e4m3x2"),
          text.count("atom.global.gpu.acq_rel"))
"""


def test_kernels_compile_for_the_device_they_are_meant_for() -> None:
    """In a process of its own, since the interpreter may stand in for the compiler here."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(SOURCE), "HOME": str(Path.home()), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines: dict[str, list[list[int]]] = {}
    for line in done.stdout.splitlines():
        name, *counts = line.split()
        lines.setdefault(name, []).append([int(count) for count in counts])
    for products, copies, conversions, _ in (*lines["decode"], *lines["prefill"]):
        assert products > 0  # tensor cores
        assert copies > 0  # loads that run ahead
        assert conversions > 0  # FP8 widened by the hardware
    assert lines["append"][0][2] > 0
    # Only the decode that joins its own splits counts them, after everything that it stored.
    assert [counts[3] for counts in lines["decode"]] == [0, 0, 1]
