"""The cast's kernels compile for a GPU that is not here, with wide loads; no GPU is needed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILED = """
import re
from tests.transfer.gpu_kit import FakeDriver, device_pool, pinned_pool
from tiers._cast_shape import Shape
from tiers._layout import PageLayout, PageOrder, ScaleScope
plan = PageLayout(layers=2, page_size=16, kv_heads=8, head_dim=128, order=PageOrder.NHD)
encoded = plan.encoded(scope=ScaleScope.PAGE_HEAD)
slots = pinned_pool(encoded.slot(["value", "value_scale"]), 2, FakeDriver(manual=True))
shape = Shape.of(encoded, device_pool(plan, 2), slots)
for outward in (True, False):
    ptx = shape.program(outward=outward, scope=1, computed=True).compiled(90).asm["ptx"]
    wide = r"global\\S*\\.(v4\\.b32|v2\\.b64|v2\\.b32|v4\\.u32)"
    assert re.search("ld\\\\." + wide, ptx), (outward, set(re.findall(r"ld\\.\\S+", ptx)))
    assert re.search("st\\\\." + wide, ptx), (outward, set(re.findall(r"st\\.\\S+", ptx)))
print("wide")
"""


def test_both_directions_compile_with_wide_words() -> None:
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "wide"
