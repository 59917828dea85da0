"""The kernels in Triton's interpreter, and as compiled code for one GPU; neither needs a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

INTERPRETED = """
import numpy as np
from transfer._staging import COLUMNS, LARGE, SMALL, Tiles
from transfer.kernels import MOVERS, interpret

chance = np.random.default_rng(3)
cases = [(16, 128), (16, 4096 + 16), (16, LARGE + 64), (4, 20), (4, SMALL + 4), (1, 3), (1, 5001)]
for align, nbytes in cases:
    step, blocks = -(-nbytes // align) * align + 16 * align, 6
    raw = [np.zeros(blocks * step + 64, dtype=np.uint8) for _ in range(2)]
    at = [-(-r.ctypes.data // 16) * 16 - r.ctypes.data for r in raw]
    source, target = (r[a : a + blocks * step].reshape(blocks, step) for r, a in zip(raw, at))
    source[:] = chance.integers(0, 256, source.shape)
    target[:] = 7
    ends = [(np.array([x.ctypes.data]), np.array([step])) for x in (source, target)]
    tiles = Tiles.of(*ends, np.array([nbytes]))
    assert tiles.word == {16: 8, 4: 4, 1: 1}[align], (align, nbytes, tiles.word)
    ids = np.array([[4, 0, 5], [2, 3, 1]], dtype=np.int64)
    table = np.ascontiguousarray(tiles.rows)
    program = MOVERS[tiles.word, tiles.large]
    rows = len(table)
    interpret(program, rows * 3, table.ctypes.data, rows, 3, ids[0].ctypes.data,
              ids[1].ctypes.data, 0, 0)
    want = np.full_like(target, 7)
    want[ids[1], :nbytes] = source[ids[0], :nbytes]
    assert (target == want).all(), (align, nbytes)
    # Without ids and with an address to add, as staging areas are used.
    target[:] = 7
    table[:, 2] -= target.ctypes.data
    interpret(program, rows * 2, table.ctypes.data, rows, 2, ids[0].ctypes.data, 0, 0,
              target.ctypes.data)
    want = np.full_like(target, 7)
    want[:2, :nbytes] = source[ids[0][:2], :nbytes]
    assert (target == want).all(), (align, nbytes)
print("equal")
"""

COMPILED = """
import re
from transfer.kernels import MOVERS
wide = MOVERS[8, True].compiled(90).asm["ptx"]
assert re.search(r"ld\\.global\\S*\\.v2\\.b64|ld\\.global\\S*\\.v4\\.b32", wide), wide[-3000:]
assert re.search(r"st\\.global\\S*\\.v2\\.b64|st\\.global\\S*\\.v4\\.b32", wide)
assert "mul.lo.s64" in wide or "mad.lo.s64" in wide  # ids times strides do not wrap at 4 GiB
print("wide")
"""


def child(code: str, *, interpret: bool) -> str:
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_every_byte_in_the_interpreter() -> None:
    assert child(INTERPRETED, interpret=True) == "equal"


def test_words_of_sixteen_bytes_and_long_offsets() -> None:  # case 18
    assert child(COMPILED, interpret=False) == "wide"
