"""What the kernels of the cast are told of the memory on both sides, and what they refuse."""

import pytest
from tests.transfer.gpu_kit import FakeDriver, device_pool, pinned_pool

from tiers._layout import PageLayout, PageOrder, ScaleScope
from transfer import LayoutMismatch, Pool

pytest.importorskip("triton")


def page(**changes: object) -> PageLayout:
    given = {"layers": 2, "page_size": 16, "kv_heads": 8, "head_dim": 128, **changes}
    return PageLayout(**given)  # type: ignore[arg-type]


def sides(plan: PageLayout, encoded: PageLayout) -> tuple[Pool, Pool]:
    slot = encoded.slot(["value", "value_scale"])
    return device_pool(plan, 2), pinned_pool(slot, 2, FakeDriver(manual=True))


@pytest.mark.parametrize("order", list(PageOrder))
def test_strides_go_by_token_and_head_whatever_the_order(order: PageOrder) -> None:
    from tiers._cast_shape import Shape

    plan = page(order=order)
    encoded = plan.encoded(scope=ScaleScope.TOKEN_HEAD)
    shape = Shape.of(encoded, *sides(plan, encoded))
    assert (shape.tokens, shape.heads, shape.width) == (16, 8, 128)
    by_token = (8 * 128, 128) if order is PageOrder.NHD else (128, 16 * 128)
    assert shape.page == shape.slot == by_token
    assert shape.scale == ((8, 1) if order is PageOrder.NHD else (1, 16))
    assert shape.stored


def test_a_program_is_made_once_for_a_shape() -> None:
    from tiers._cast_shape import TILE, Shape

    plan = page(order=PageOrder.NHD)
    encoded = plan.encoded(scope=ScaleScope.PAGE_HEAD)
    shape = Shape.of(encoded, *sides(plan, encoded))
    program = shape.program(outward=True, scope=1, computed=True)
    assert shape.program(outward=True, scope=1, computed=True) is program
    assert shape.program(outward=False, scope=1, computed=True) is not program
    constants = program.constants
    assert constants["token_tile"] * constants["width_tile"] * constants["head_tile"] <= TILE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"page_size": 256}, "at most 16384"),
        ({"head_dim": 12}, "multiples of 16 bytes"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(changes: dict[str, int], why: str) -> None:
    from tiers._cast_shape import Shape

    plan = page(order=PageOrder.NHD, **changes)
    encoded = plan.encoded(scope=ScaleScope.PAGE_HEAD)
    with pytest.raises(LayoutMismatch, match=why):
        Shape.of(encoded, *sides(plan, encoded))


def test_values_that_are_no_codes_are_refused() -> None:
    from tiers._cast_shape import Shape

    plan = page(order=PageOrder.NHD)
    encoded = plan.encoded(scope=ScaleScope.PAGE_HEAD)
    with pytest.raises(LayoutMismatch, match="expected float8_e4m3fn"):
        Shape.of(plan, *sides(plan, encoded))
