"""Scales, the policy for values that are not finite, and the error that the format costs."""

import math
import zlib
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tiers import fp8
from tiers._errors import AmplitudeError, NonFiniteValue
from tiers._fp8_lookup import INFINITY
from tiers._team import Team
from tiers.fp8 import FORMATS, Counts

E4M3 = FORMATS["float8_e4m3fn"]
DTYPES = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}
KEPT = {
    "tensor": (False, False, False, False),
    "head": (False, False, True, False),
    "page_head": (True, False, True, False),
    "token_head": (True, True, True, False),
}


def bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    plain: npt.NDArray[Any] = tensor.view(DTYPES[name]).numpy()
    return plain.view(np.uint32 if name == "float32" else np.uint16)


def cast(
    values: torch.Tensor, kept: tuple[bool, ...], form: fp8.Fp8Format = E4M3, **options: Any
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], torch.Tensor, Counts]:
    """Codes, scales, decoded values and counts."""
    dtype = str(values.dtype).removeprefix("torch.")
    scales = np.zeros([n for n, keep in zip(values.shape, kept, strict=True) if keep], np.float32)
    codes = np.zeros(values.shape, np.uint8)
    team = Team()
    common: dict[str, Any] = {"dtype": dtype, "form": form, "team": team}
    counts = fp8.find_scales(bits(values), kept, scales, **common, **options)
    fp8.encode_values(bits(values), scales, kept, codes, **common)
    back = torch.zeros_like(values)
    fp8.decode_values(codes, scales, kept, bits(back), **common)
    return codes, scales, back, counts


@pytest.mark.parametrize("scope", KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_scales_and_codes_are_those_of_plain_torch(
    scope: str, dtype: torch.dtype, form: fp8.Fp8Format
) -> None:
    torch.manual_seed(1)
    values = (torch.randn(3, 16, 4, 32) * torch.tensor([1e-3, 1.0, 30.0, 900.0])[:, None]).to(dtype)
    kept = KEPT[scope]
    codes, scales, back, counts = cast(values, kept, form)
    shared = [axis for axis, keep in enumerate(kept) if not keep]
    expected, expected_scales = fp8.quantize(values, shared=shared, form=form)
    assert np.array_equal(scales, expected_scales.numpy().reshape(scales.shape))
    assert np.array_equal(codes, expected.view(torch.uint8).numpy())
    decoded = (torch.from_numpy(fp8.decode_table(form.name)[codes]) * expected_scales).to(dtype)
    assert torch.equal(back, decoded)
    assert counts == (0, 0)


# The bytes below were computed with torch 2.13 on a CPU; any version and device has to give them.
def test_bytes_do_not_depend_on_the_version_of_torch() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    finite = torch.from_numpy(patterns[(patterns & 0x7F80) < 0x7E00].view(np.int16))
    values = finite.view(torch.bfloat16).reshape(-1, 4, 32)
    digests = {}
    for name, kept in {"tensor": (False,) * 3, "token_head": (True, True, False)}.items():
        codes, scales, _, _ = cast(values, kept)
        digests[name] = f"{zlib.crc32(codes.tobytes()):08x} {zlib.crc32(scales.tobytes()):08x}"
    assert digests == {
        "tensor": "8f0776e0 504111e5",
        "token_head": "762eb745 1b3c4d4c",
    }


# case 53, the values named there, in every dtype that can hold them
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_edge_of_the_range_is_clamped_by_ourselves(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 2.0**-9, 447, 448, 464, 465, 480, 1e4, -1e4]).to(dtype)
    codes = np.zeros(10, np.uint8)
    name = str(dtype).removeprefix("torch.")
    one = np.ones(1, np.float32)
    fp8.encode_values(bits(values), one, (False,), codes, dtype=name, form=E4M3, team=Team())
    expected = [0x00, 0x80, 0x01, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    assert codes.tolist() == expected


# case 53, infinities saturate, NaN stays NaN in that element alone, both are counted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scope", KEPT)
def test_values_that_are_not_finite_harm_their_own_group_at_most(
    dtype: torch.dtype, scope: str
) -> None:
    torch.manual_seed(2)
    clean = torch.randn(2, 4, 2, 8).to(dtype)
    values = clean.clone()
    values[0, 1, 1, 2] = math.nan
    values[0, 1, 1, 3] = math.inf
    values[1, 0, 0, 0] = -math.inf
    values[1, 0, 0, 1] = -math.nan
    kept = KEPT[scope]
    codes, scales, back, counts = cast(values, kept)
    assert counts == Counts(nan=2, infinite=2)
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    assert codes[0, 1, 1, 2] == codes[1, 0, 0, 1] == 0x7F
    assert codes[0, 1, 1, 3] == 0x7E
    assert codes[1, 0, 0, 0] == 0xFE
    assert int(back.isnan().sum()) == 2
    assert bool(back.isfinite()[0, 1, 1, 3])
    good = values.isfinite()
    masked = torch.where(good, values, torch.zeros_like(values))
    expected, _, _, _ = cast(masked, kept)
    assert np.array_equal(codes[good.numpy()], expected[good.numpy()])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_they_are_refused_when_the_caller_asks_for_that(bad: float) -> None:
    values = torch.ones(2, 3, dtype=torch.bfloat16)
    values[1, 1] = bad
    scales = np.full(1, 7.0, np.float32)
    with pytest.raises(NonFiniteValue) as caught:
        fp8.find_scales(
            bits(values),
            (False, False),
            scales,
            dtype="bfloat16",
            form=E4M3,
            team=Team(),
            nonfinite="refuse",
        )
    assert (caught.value.nan, caught.value.infinite) == ((1, 0) if math.isnan(bad) else (0, 1))
    assert scales[0] == 7.0


# case 54, zeros, one zero head, one zero channel, one tiny value, one huge value among zeros
@pytest.mark.parametrize("scope", KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["zero", "zero head", "zero channel", "tiny", "huge", "least"])
def test_groups_of_zeros_decode_to_zeros_with_a_finite_scale(
    kind: str, dtype: torch.dtype, scope: str
) -> None:
    torch.manual_seed(3)
    values = torch.zeros(2, 4, 2, 8)
    if kind == "zero head":
        values = torch.randn(2, 4, 2, 8)
        values[:, :, 1] = 0
    elif kind == "zero channel":
        values = torch.randn(2, 4, 2, 8)
        values[..., 3] = 0
    elif kind == "tiny":
        values[1, 2, 1, 3] = 1e-30
    elif kind == "huge":
        values[1, 2, 1, 3] = 60000
    values = values.to(dtype)
    if kind == "least":
        bits(values)[1, 2, 1, 3] = 1
    codes, scales, back, counts = cast(values, KEPT[scope])
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    assert not ((codes & 0x7F) == 0x7F).any()
    assert bool((back[values == 0] == 0).all())
    assert bool(back.isfinite().all())
    assert counts == (0, 0)
    alone = values[1, 2, 1, 3]
    if kind in {"tiny", "huge", "least"} and alone:
        assert float(back[1, 2, 1, 3]) == pytest.approx(float(alone), rel=0.01)


# case 59, twice the scale is twice the value, on every kind of destination
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kept", [(False, False, False), (False, True, False)])
@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_every_value_is_multiplied_by_its_scale(
    dtype: torch.dtype, kept: tuple[bool, ...], scale: float
) -> None:
    codes = np.tile(np.arange(0x78, dtype=np.uint8), 4).reshape(6, 4, 20)
    scales = np.full(4 if kept[1] else 1, scale, np.float32)
    once, twice = torch.zeros(6, 4, 20, dtype=dtype), torch.zeros(6, 4, 20, dtype=dtype)
    common: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "form": E4M3,
        "team": Team(),
    }
    fp8.decode_values(codes, scales, kept, bits(once), **common)
    fp8.decode_values(codes, scales * np.float32(2), kept, bits(twice), **common)
    expected = torch.from_numpy(fp8.decode_table(E4M3.name)[codes]) * scale
    assert torch.equal(once.float(), expected)
    assert torch.equal(twice.float(), expected * 2)


def test_scales_may_be_read_only_and_unaligned() -> None:
    memory = b"\0" + np.float32(2.0).tobytes()
    scales = np.frombuffer(memory, np.float32, 1, 1)
    out = torch.zeros(4, dtype=torch.bfloat16)
    codes = np.full(4, 0x38, np.uint8)
    fp8.decode_values(codes, scales, (False,), bits(out), dtype="bfloat16", form=E4M3, team=Team())
    assert out.tolist() == [2.0] * 4


@pytest.mark.parametrize("scope", ["tensor", "head", "page_head", "token_head"])
def test_the_error_on_gaussian_values_is_that_of_the_format(scope: str) -> None:
    torch.manual_seed(4)
    values = torch.randn(16, 16, 8, 128).to(torch.bfloat16)
    _, _, back, _ = cast(values, KEPT[scope])
    exact = values.double()
    error = float(((back.double() - exact).square().sum() / exact.square().sum()).sqrt())
    low, high = (0.0245, 0.0262) if scope == "token_head" else (0.0264, 0.0267)
    assert low <= error <= high


@pytest.mark.parametrize(
    ("sigma", "error"), [(0.1, 0.0265), (0.03, 0.029), (0.01, 0.057), (0.003, 0.19)]
)
def test_unit_scale_underflows_for_small_values(sigma: float, error: float) -> None:
    torch.manual_seed(5)
    values = torch.randn(1 << 18) * sigma
    found = fp8.unit_scale_error(values)
    assert found == pytest.approx(error, rel=0.02)
    if sigma < 0.02:
        with pytest.raises(AmplitudeError, match="computed scales"):
            fp8.check_amplitude(values)
    else:
        assert fp8.check_amplitude(values) == found


def test_amplitude_of_zeros_and_of_no_numbers() -> None:
    assert fp8.check_amplitude(torch.zeros(4)) == 0.0
    with pytest.raises(AmplitudeError):
        fp8.check_amplitude(torch.tensor([math.nan]))
    with pytest.raises(AmplitudeError):
        fp8.check_amplitude(torch.tensor([1e4]))


# case 51, nothing at all
def test_no_values_have_scales_of_one() -> None:
    codes, scales, back, counts = cast(
        torch.zeros(0, 2, 8, dtype=torch.bfloat16), (False, True, False)
    )
    assert (codes.size, back.numel(), counts) == (0, 0, (0, 0))
    assert scales.tolist() == [1.0, 1.0]


# Quotients are clamped where scales are rounded roughly, and need no clamp elsewhere.
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casting_in_one_go_gives_the_codes_of_clamped_quotients(
    form: fp8.Fp8Format, dtype: str
) -> None:
    peaks = np.arange(1, INFINITY[dtype], dtype=np.uint16)
    values = np.stack([peaks, peaks | 0x8000, peaks - 1, peaks // 2], axis=1)
    for part in np.array_split(values, 64):
        kept, team = (True, False), Team()
        codes, expected = np.zeros(part.shape, np.uint8), np.zeros(part.shape, np.uint8)
        kinds: dict[str, Any] = {"dtype": dtype, "form": form, "team": team}
        scales = np.zeros(len(part), np.float32)
        fp8.cast_values(part, kept, codes, partial(np.copyto, scales), **kinds)
        fp8.encode_values(part, scales, kept, expected, **kinds)
        assert np.array_equal(codes, expected)
