"""Scales of FP8 values: the formula, what is clamped, and what a page's key must say."""

import math

import pytest
import torch

from attention._errors import CacheError
from attention._scales import LIMITS, ScaleOrigin, ValueScales, quantise, scale_of
from tiers._layout import ScaleScope

E4M3 = torch.float8_e4m3fn


def decoded(value: list[float], scale: float = 1.0) -> tuple[list[float], int]:
    codes, lost = quantise(torch.tensor(value), torch.tensor(scale), E4M3)
    return (codes.to(torch.float32) * scale).tolist(), int(lost)


# case 53, overflow clamps by our own hand, before the cast, and is counted
def test_values_beyond_the_format_are_clamped_and_counted() -> None:
    values = [0.0, -0.0, 2.0**-9, 447.0, 448.0, 464.0, 465.0, 480.0, 1e4, math.inf, -math.inf]
    found, lost = decoded(values)
    assert found == [0.0, -0.0, 2.0**-9, 448.0, 448.0, 448.0, 448.0, 448.0, 448.0, 448.0, -448.0]
    assert math.copysign(1, found[1]) == -1
    assert lost == 6  # all above 448
    found, lost = decoded([math.nan, 1.0])
    assert math.isnan(found[0])
    assert found[1] == 1.0
    assert lost == 1


def test_codes_round_to_nearest_even() -> None:
    # Steps of 2 between 16 and 32, of 1/8 between 1 and 2.
    assert decoded([17.0, 19.0, 1.0625, 1.1875])[0] == [16.0, 20.0, 1.0, 1.25]


def test_every_code_of_both_formats_is_its_own_decoding() -> None:
    for dtype in (E4M3, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        real = codes.to(torch.float32)
        again, _ = quantise(real, torch.tensor(1.0), dtype)
        finite = torch.isfinite(real)
        assert torch.equal(again.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])
        assert real[finite].max() == LIMITS[dtype]


# case 54, nothing, next to nothing, and one outlier
@pytest.mark.parametrize("value", [[0.0, 0.0], [1e-30, 0.0], [3e38, 0.0], [math.nan, math.inf]])
def test_scales_are_finite_and_above_zero(value: list[float]) -> None:
    scale = scale_of(torch.tensor(value), (0,), E4M3)
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    codes, _ = quantise(torch.tensor([0.0]), scale, E4M3)
    assert codes.view(torch.uint8).tolist() == [0]


def test_scale_puts_the_largest_value_on_the_largest_code() -> None:
    value = torch.tensor([[[1.0, -7.0], [2.0, 0.5]]])
    assert scale_of(value, (0, 2), E4M3).tolist() == pytest.approx([7 / 448, 2 / 448])
    assert scale_of(value, (0, 1, 2), E4M3).tolist() == pytest.approx([7 / 448])
    codes, lost = quantise(value, scale_of(value, (0, 2), E4M3)[None, :, None], E4M3)
    assert codes.to(torch.float32).abs().amax(2).tolist() == [[448.0, 448.0]]
    assert lost == 0


def test_format_noise_is_that_of_e4m3() -> None:
    torch.manual_seed(0)
    value = torch.randn(100_000)
    codes, _ = quantise(value, torch.tensor(0.01), E4M3)
    error = (codes.to(torch.float32) * 0.01 - value).norm() / value.norm()
    assert 0.025 < error < 0.028


def test_provenance_tells_scales_apart() -> None:
    ones = ValueScales.unit(2)
    same = ValueScales.static([1.0, 1.0])
    other = ValueScales.static([1.0, 1.0000001])
    heads = ValueScales.static([[1.0, 1.0], [1.0, 1.0]])
    measured = ValueScales.calibrated([torch.full((3, 1, 4), 448.0)] * 2, per_head=False)
    assert measured.values is not None
    assert torch.equal(measured.values, torch.ones(2, 1))
    names = [s.provenance for s in (ones, other, heads, measured)]
    names += [ValueScales.per_token().provenance, ValueScales.first_page().provenance]
    assert len(set(names)) == len(names)
    assert same.provenance == ones.provenance
    assert heads.scope is ScaleScope.HEAD


def test_only_first_page_scales_are_private() -> None:
    kinds = [ValueScales.unit(1), ValueScales.per_token(), ValueScales.first_page()]
    assert [kind.shareable for kind in kinds] == [True, True, False]
    assert kinds[2].origin is ScaleOrigin.FIRST_PAGE


def test_calibration_covers_the_samples_with_a_margin() -> None:
    sample = torch.randn(50, 2, 8)
    scales = ValueScales.calibrated([sample, sample * 2], margin=2.0)
    assert scales.values is not None
    peak = sample.abs().amax((0, 2)) / 448
    torch.testing.assert_close(scales.values, torch.stack([peak * 2, peak * 4]))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_bad_scales_are_refused(bad: float) -> None:
    with pytest.raises(CacheError, match="finite numbers above 0"):
        ValueScales.static([1.0, bad])
