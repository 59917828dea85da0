"""Statements about page tensors are held against what they are."""

import pytest
import torch

from attention._errors import CacheError
from attention._view import LayerView
from tiers._layout import PageOrder, ScaleScope

KEY = torch.bfloat16
VALUE = torch.float8_e4m3fn


def view(
    key: torch.Tensor,
    value: torch.Tensor,
    order: PageOrder = PageOrder.NHD,
    scale: torch.Tensor | None = None,
    scope: ScaleScope = ScaleScope.TENSOR,
) -> LayerView:
    return LayerView(key, value, order, torch.ones(1) if scale is None else scale, scope)


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(shape, dtype=KEY), torch.zeros(shape, dtype=torch.uint8).view(VALUE)


# case 16, two heads and two slots have one shape and two meanings, told apart by what is stated
def test_the_order_is_stated() -> None:
    key, value = pair(3, 2, 2, 16)
    key[0, 1, 0] = 1.0
    by_token = view(key, value)
    by_head = view(key, value, PageOrder.HND)
    assert by_token.by_token(key)[0, 1, 0, 0] == 1
    assert by_head.by_token(key)[0, 0, 1, 0] == 1
    key, value = pair(3, 4, 2, 16)
    found = view(key, value, PageOrder.HND)
    assert (found.pages, found.kv_heads, found.page_size, found.head_dim) == (3, 4, 2, 16)


# case 57 and case 56, a key or value of another type is refused, never read as ours
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
def test_other_key_types_are_refused(dtype: torch.dtype) -> None:
    _, value = pair(2, 4, 1, 16)
    with pytest.raises(CacheError, match="key pages are"):
        view(torch.zeros(2, 4, 1, 16, dtype=dtype), value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.uint8, torch.bfloat16])
def test_other_value_types_are_refused(dtype: torch.dtype) -> None:
    key, _ = pair(2, 4, 1, 16)
    value = torch.zeros(2, 4, 1, 16, dtype=dtype)
    with pytest.raises(CacheError, match="value pages are"):
        view(key, value)


# case 17, halves of one tensor and permuted views are fine with their strides, overlap is not
def test_strided_views_are_taken_as_they_are() -> None:
    both = torch.zeros(3, 2, 4, 2, 16, dtype=KEY)
    _, value = pair(3, 4, 2, 16)
    assert view(both[:, 0], value).pages == 3
    permuted = torch.zeros(3, 2, 4, 16, dtype=KEY).transpose(1, 2)
    assert view(permuted, value).page_size == 4
    single, codes = pair(3, 4, 1, 16)
    odd = single.as_strided((3, 4, 1, 16), (64, 16, 7, 1))
    assert view(odd, codes).kv_heads == 1  # the stride of a size-1 axis means nothing


def test_views_that_no_kernel_can_load_are_refused() -> None:
    key, value = pair(3, 4, 2, 16)
    flat = torch.zeros(4096, dtype=KEY)
    with pytest.raises(CacheError, match="overlap"):
        view(flat.as_strided((3, 4, 2, 16), (128, 24, 16, 1)), value)
    with pytest.raises(CacheError, match="stride 2 inside a head"):
        view(flat.as_strided((3, 4, 2, 16), (256, 64, 32, 2)), value)
    with pytest.raises(CacheError, match="multiples of 16"):
        view(flat.as_strided((3, 4, 2, 16), (136, 34, 17, 1)), value)
    with pytest.raises(CacheError, match="multiples of 16"):
        view(flat[1:].as_strided((3, 4, 2, 16), (128, 32, 16, 1)), value)
    with pytest.raises(CacheError, match="3 axes"):
        view(key[0], value[0])
    with pytest.raises(CacheError, match=r"key pages are .* value pages"):
        view(key, pair(3, 2, 2, 16)[1])


def test_scales_have_the_stated_scope() -> None:
    key, value = pair(3, 2, 2, 16)
    good = {
        ScaleScope.TENSOR: (1,),
        ScaleScope.HEAD: (2,),
        ScaleScope.TOKEN_HEAD: (3, 2, 2),
    }
    for scope, shape in good.items():
        assert view(key, value, scale=torch.ones(shape), scope=scope).scope is scope
        for other in good.values():
            if other != shape:
                with pytest.raises(CacheError, match="scales are"):
                    view(key, value, scale=torch.ones(other), scope=scope)
        with pytest.raises(CacheError, match="float64"):
            view(key, value, scale=torch.ones(shape, dtype=torch.float64), scope=scope)
    with pytest.raises(CacheError, match="per page and head"):
        view(key, value, scale=torch.ones(3, 2), scope=ScaleScope.PAGE_HEAD)
