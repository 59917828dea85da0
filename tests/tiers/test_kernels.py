"""The fused cast in Triton's interpreter has the bytes of the CPU's codec; refusals name the reason."""

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.transfer.gpu_kit import FakeDriver, device_pool, pinned_pool

from tiers._layout import PageLayout, PageOrder, ScaleScope
from transfer import Blocks, LayoutMismatch, Pool, WrongPool
from transfer._staging import Pipeline

pytest.importorskip("triton")

INTERPRETED = """
import itertools
import numpy as np, torch
from tests.transfer.gpu_kit import FakeDriver, device_pool, pinned_pool
from tiers._layout import PageLayout, PageOrder, ScaleScope
from tiers.fp8 import quantize
from tiers.kernels import PageCast
from transfer._staging import Uploaded
from transfer.kernels import interpret

SPECIAL = [0.0, -0.0, 2.0**-9, 2.0**-10, 447.0, 448.0, 464.0, 465.0, 480.0, 1e4, 1e-30,
           float("inf"), -float("inf"), float("nan"), -float("nan")]
SHAPE = dict(layers=2, page_size=4, kv_heads=3, head_dim=32)

def run(pipe, *, staging=0):
    tables = pipe.upload(0, pipe.blocks, staged=staging != 0)
    pipe.launch(interpret, Uploaded(tables.ctypes.data, 0, pipe.blocks), staging, 0, pipe.blocks)

def bits(block, name, layer):
    tensor = block.tensor(name, layer).contiguous()
    return tensor.view(torch.uint8).numpy().copy()

def axes(order, scope):
    token = 0 if order is PageOrder.NHD else 1
    return {ScaleScope.TENSOR: (0, 1, 2), ScaleScope.TOKEN_HEAD: (2,)}.get(scope, (token, 2))

def check(dtype, order, scope, staged):
    plan = PageLayout(**SHAPE, order=order, value=dtype)
    encoded = plan.encoded(scope=scope)
    gpu, back = device_pool(plan, 6), device_pool(plan, 6)
    keys = pinned_pool(plan.slot(["key"]), 6, FakeDriver(manual=True))
    values = pinned_pool(encoded.slot(["value", "value_scale"]), 6, FakeDriver(manual=True))
    pages, key, value = (pool.lease(6).handle for pool in (gpu, keys, values))
    restored = back.lease(6).handle
    generator = torch.Generator().manual_seed(5)
    for block in pages:
        for layer in range(2):
            for name in ("key", "value"):
                made = torch.randn(block.tensor(name, layer).shape, generator=generator)
                block.tensor(name, layer, write=True).copy_(made * 10.0 ** (block.id - 4))
    pages[0].tensor("value", 0, write=True)[0, 0, :15] = torch.tensor(SPECIAL).to(
        pages[0].tensor("value", 0).dtype)
    pages[1].tensor("value", 1, write=True).zero_()
    out = PageCast(gpu, keys, values, layout=encoded).pack(pages[:3], key[3:], value[:3]).fn
    into = PageCast(back, keys, values, layout=encoded).unpack(key[3:], value[:3], restored[2:5]).fn
    if staged:
        for pipe, outward in ((out, True), (into, False)):
            raw = np.zeros(pipe.blocks * pipe.step + 64, dtype=np.uint8)
            area = -(-raw.ctypes.data // 64) * 64
            if outward:
                run(pipe, staging=area)
            for dst, src, nbytes in zip(*(c.tolist() for c in pipe.pieces(area, 0, 3))):
                FakeDriver._memmove(dst, src, nbytes)
            if not outward:
                run(pipe, staging=area)
    else:
        run(out)
        run(into)
    for number in range(3):
        for layer in range(2):
            exact = pages[number].tensor("value", layer)
            codes, scales = quantize(exact, shared=axes(order, scope))
            assert (codes.view(torch.uint8).numpy() == bits(value[number], "value", layer)).all()
            found = value[number].tensor("value_scale", layer)
            assert torch.equal(scales.reshape(-1), found.reshape(-1))
            for other in (key[3 + number], restored[2 + number]):
                assert (bits(pages[number], "key", layer) == bits(other, "key", layer)).all()
            want = (codes.float() * scales).to(exact.dtype)
            read = restored[2 + number].tensor("value", layer)
            assert torch.equal(want.isnan(), read.isnan())
            assert torch.equal(want.nan_to_num(0.0), read.nan_to_num(0.0))

for dtype, order, scope in itertools.product(["bfloat16", "float16", "float32"], PageOrder, ScaleScope):
    check(dtype, order, scope, staged=dtype == "float16")
print("equal")
"""


def test_bytes_equal_those_of_the_cpu() -> None:  # case 53, case 54, case 56
    """Every scale scope, order and dtype, with special values; through staging and without."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "TRITON_INTERPRET": "1"},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"


PLAN = PageLayout(layers=2, page_size=4, kv_heads=3, head_dim=32, order=PageOrder.NHD)


def pools(encoded: PageLayout, *, scaled: bool = True) -> tuple[Pool, Pool, Pool]:
    driver = FakeDriver(manual=True)
    names = ["value", "value_scale"] if scaled else ["value"]
    return (
        device_pool(PLAN, 4),
        pinned_pool(PLAN.slot(["key"]), 4, driver),
        pinned_pool(encoded.slot(names), 4, driver),
    )


def test_blocks_of_other_pools_or_numbers_are_refused() -> None:
    from tiers.kernels import PageCast

    encoded = PLAN.encoded(scope=ScaleScope.PAGE_HEAD)
    gpu, keys, values = pools(encoded)
    cast = PageCast(gpu, keys, values, layout=encoded)
    pages, key, value = (pool.lease(4).handle for pool in (gpu, keys, values))
    work = cast.pack(pages, key, value)
    assert work.reads == (pages,)
    assert work.writes == (key, value)
    moved = 4 * (keys.layout.nbytes + values.layout.nbytes)
    assert 0 < work.nbytes <= moved
    with pytest.raises(LayoutMismatch, match="expected as many of each"):
        cast.pack(pages[:2], key[:3], value[:2])
    with pytest.raises(WrongPool):
        cast.unpack(value, key, pages)


@pytest.mark.parametrize(
    ("scope", "scales"),
    [
        (None, None),
        (None, [1.0]),
        (None, [1.0, float("nan")]),
        (None, [1.0, 0.0]),
        (ScaleScope.TOKEN_HEAD, [1.0, 1.0]),
        (ScaleScope.TENSOR, [[1.0] * 3, [1.0] * 3]),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    scope: ScaleScope | None, scales: list[float] | None
) -> None:
    from tiers.kernels import PageCast

    encoded = PLAN.encoded(scope=scope)
    gpu, keys, values = pools(encoded, scaled=scope is not None)
    given = None if scales is None else np.array(scales, dtype=np.float32)
    with pytest.raises(LayoutMismatch, match="scales"):
        PageCast(gpu, keys, values, layout=encoded, scales=given)


@pytest.mark.parametrize("pitched", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3]])
def test_an_area_has_the_keys_of_all_blocks_and_then_their_values(
    order: list[int], pitched: bool
) -> None:
    """Every byte of every slot is moved once, from areas that do not overlap."""
    from tiers.kernels import PageCast

    encoded = PLAN.encoded(scope=ScaleScope.PAGE_HEAD)
    gpu, keys, values = pools(encoded)
    cast = PageCast(gpu, keys, values, layout=encoded)
    handles = [pool.lease(4).handle for pool in (gpu, keys, values)]
    pages, key, value = (Blocks.gather([handle[number] for number in order]) for handle in handles)
    for work, outward in (
        (cast.pack(pages, key, value), True),
        (cast.unpack(key, value, pages), False),
    ):
        pipe = work.fn
        assert isinstance(pipe, Pipeline)
        base = 1 << 40
        for first, count in ((0, len(order)), (1, 2)):
            seen: dict[int, int] = {}
            moves = pipe.moves(base, first, count, pitched=pitched)
            pieces = [*moves.few]
            for rows in moves.rows:
                for row in range(rows.number):
                    ends = rows.dst + row * rows.dst_step, rows.src + row * rows.src_step
                    pieces.append((*ends, rows.nbytes))
            if moves.many is not None:
                pieces += zip(*(column.tolist() for column in moves.many), strict=True)
            for dst, src, nbytes in pieces:
                slot, area = (dst, src) if outward else (src, dst)
                seen |= {slot + at: area + at for at in range(nbytes)}
            plain = zip(*(c.tolist() for c in pipe.pieces(base, first, count)), strict=True)
            wanted: dict[int, int] = {}
            for dst, src, nbytes in plain:
                slot, area = (dst, src) if outward else (src, dst)
                wanted |= {slot + at: area + at for at in range(nbytes)}
            assert seen == wanted
            assert len(seen) == pipe.nbytes // pipe.blocks * count
            areas = set(seen.values())
            assert len(areas) == len(seen)
            assert base <= min(areas) <= max(areas) < base + count * pipe.step
        if len(order) == 4:
            assert len(pipe.moves(base, 0, 4, pitched=pitched).few) >= 1  # the keys are one piece
