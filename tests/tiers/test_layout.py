from typing import Any

import numpy as np
import pytest

from tiers._errors import ScaleError
from tiers._layout import (
    KEY,
    VALUE,
    VALUE_SCALE,
    PageLayout,
    PageOrder,
    ScaleScope,
    StaticScales,
    byte_offsets,
)
from transfer._errors import LayoutMismatch, SpanError


def make(**changes: Any) -> PageLayout:
    sizes = {"layers": 3, "page_size": 4, "kv_heads": 2, "head_dim": 8, "order": PageOrder.NHD}
    return PageLayout(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("order", "scope", "axes", "shape"),
    [
        ("NHD", ScaleScope.TENSOR, "L", (3,)),
        ("NHD", ScaleScope.HEAD, "LH", (3, 2)),
        ("NHD", ScaleScope.PAGE_HEAD, "LPH", (3, 5, 2)),
        ("NHD", ScaleScope.TOKEN_HEAD, "LPTH", (3, 5, 4, 2)),
        ("HND", ScaleScope.TOKEN_HEAD, "LPHT", (3, 5, 2, 4)),
    ],
)
def test_scales_keep_the_axes_of_their_scope(
    order: str, scope: ScaleScope, axes: str, shape: tuple[int, ...]
) -> None:
    layout = make(order=order).encoded(scope=scope)
    part = layout.component(VALUE_SCALE, pages=5)
    assert (part.axes, part.shape, part.dtype) == (axes, shape, "float32")
    assert part.nbytes == 4 * part.elements


# case 16, with as many heads as tokens both orders have one shape; the order has to be said
def test_the_order_is_part_of_the_layout_and_has_no_default() -> None:
    square = {"page_size": 2, "kv_heads": 2}
    assert make(**square, order="NHD").component(KEY).shape == (
        make(**square, order="HND").component(KEY).shape
    )
    assert make(**square, order="NHD") != make(**square, order="HND")
    with pytest.raises(TypeError, match="order"):
        PageLayout(layers=1, page_size=1, kv_heads=1, head_dim=1)  # type: ignore[call-arg]


def test_a_latent_component_has_no_values() -> None:
    layout = make(kv_heads=1, head_dim=576, value=None)
    assert [part.name for part in layout.components()] == [KEY]
    assert layout.value_width == 0


def test_values_can_be_narrower_than_keys() -> None:
    layout = make(value_dim=6)
    assert layout.component(KEY).shape[-1] == 8
    assert layout.component(VALUE).shape[-1] == 6
    assert layout == make(value_dim=6)
    assert make() == make(value_dim=8)


def test_a_slot_lays_each_component_dense_over_its_layers() -> None:
    layout = make().encoded(scope=ScaleScope.HEAD)
    block = layout.block_layout
    assert len(block.plane_bytes) == 1
    for part in layout.components():
        extents = [block.extent(part.name, layer) for layer in range(3)]
        step = part.nbytes // 3
        assert [e.offset - extents[0].offset for e in extents] == [0, step, 2 * step]
        assert all(e.contiguous and e.nbytes == step for e in extents)
        assert extents[0].offset % 64 == 0
    assert block.payload == sum(part.nbytes for part in layout.components())


def test_a_slot_of_some_components_is_aligned_as_asked() -> None:
    layout = make(layers=1, page_size=1, kv_heads=1, head_dim=3)
    slot = layout.slot([VALUE, KEY], align=4096)
    assert slot.plane_bytes == (8192,)
    assert slot.extent(KEY, 0).offset == 4096
    with pytest.raises(LayoutMismatch, match="value_scale"):
        layout.slot([VALUE_SCALE])


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"page_size": 0},
        {"kv_heads": -1},
        {"head_dim": 0},
        {"value_dim": 0},
        {"key": "float8_e4m3fn"},
        {"key": "int16"},
        {"value": "uint8"},
        {"scope": ScaleScope.HEAD},
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LayoutMismatch, match="expected"):
        make(**changes)


# case 18, 32-bit ids around 2**31 and 2**32 bytes and elements
@pytest.mark.parametrize("edge", [2**31, 2**32])
@pytest.mark.parametrize("stride", [1, 2, 32768])
def test_offsets_are_64_bit_whatever_the_ids_are(edge: int, stride: int) -> None:
    ids = np.array([edge // stride - 1, edge // stride, edge // stride + 1], dtype=np.int64)
    found = byte_offsets(ids, stride, limit=2**40)
    assert found.dtype == np.int64
    assert found.tolist() == [int(i) * stride for i in ids]
    narrow = np.array([edge // 32768 - 1, edge // 32768 + 1], dtype=np.int32)
    expected = [int(i) * 32768 for i in narrow]
    assert byte_offsets(narrow, 32768, limit=2**40).tolist() == expected


def test_offsets_outside_the_region_are_refused() -> None:
    assert byte_offsets([], 8, limit=0).tolist() == []
    assert byte_offsets([0, 9], 8, limit=80).tolist() == [0, 72]
    for ids in ([10], [-1]):
        with pytest.raises(SpanError, match="expected 0 to 9"):
            byte_offsets(ids, 8, limit=80)


def test_static_scales_are_their_bytes() -> None:
    one = StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0]])
    assert one.data == np.array([0.5, 2.0, 0.25, 3.0], "<f4").tobytes()
    assert one == StaticScales(ScaleScope.HEAD, np.array([[0.5, 2.0], [0.25, 3.0]], np.float32))
    assert hash(one) == hash(StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0]]))
    assert len(one.digest) == 32
    others = [
        StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0000002]]),
        StaticScales(ScaleScope.HEAD, [[2.0, 0.5], [0.25, 3.0]]),
        StaticScales(ScaleScope.HEAD, [[0.5], [2.0], [0.25], [3.0]]),
        StaticScales(ScaleScope.TENSOR, [0.5, 2.0, 0.25, 3.0]),
        StaticScales(ScaleScope.TENSOR, [[0.5], [2.0], [0.25]]),
    ]
    assert len({scales.digest for scales in [one, *others]}) == len(others) + 1
    assert StaticScales.unit(3) == StaticScales(ScaleScope.TENSOR, [1.0, 1.0, 1.0])


def test_static_scales_belong_to_a_layout() -> None:
    page = make(layers=2, kv_heads=2).encoded(scope=None)
    by_head = StaticScales(ScaleScope.HEAD, [[0.5, 2.0], [0.25, 3.0]])
    assert by_head.stored(page) == page.encoded(scope=ScaleScope.HEAD)
    e5m2 = make(layers=2, kv_heads=2).encoded(value="float8_e5m2", scope=None)
    assert StaticScales.unit(2).stored(e5m2).value == "float8_e5m2"
    for wrong in ({"layers": 3}, {"kv_heads": 4}, {"layers": 4, "kv_heads": 1}):
        with pytest.raises(LayoutMismatch, match="static scales"):
            by_head.stored(make(**{"layers": 2, **wrong}).encoded(scope=None))
    for layout in (make(layers=2, kv_heads=2), page.encoded(scope=ScaleScope.HEAD)):
        with pytest.raises(LayoutMismatch, match="without scales of their own"):
            by_head.stored(layout)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_static_scale_is_finite_and_positive(bad: float) -> None:
    with pytest.raises(ScaleError, match="finite and above 0"):
        StaticScales(ScaleScope.TENSOR, [1.0, bad])


def test_static_scales_do_not_depend_on_the_page() -> None:
    for scope in (ScaleScope.PAGE_HEAD, ScaleScope.TOKEN_HEAD):
        with pytest.raises(LayoutMismatch, match="per tensor or per head"):
            StaticScales(scope, [[1.0]])
    for shape in ((), (2, 2), (0,), (2, 1, 1)):
        with pytest.raises(LayoutMismatch, match="static scales"):
            StaticScales(ScaleScope.TENSOR, np.ones(shape))
    with pytest.raises(LayoutMismatch, match="static scales"):
        StaticScales(ScaleScope.HEAD, np.ones(2))
