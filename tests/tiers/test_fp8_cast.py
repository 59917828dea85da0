"""Both ways of casting against arithmetic on exact numbers, over every 16-bit pattern."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tiers import _fp8_cast
from tiers._fp8_cast import Job, decode, encode
from tiers._fp8_lookup import INFINITY
from tiers._fp8_tables import FORMATS, Fp8Format, decode_table
from tiers._team import Team

SCALES = [1.0, 0.25, 3.0 / 448, 1e-30, 2.0**-149, 1.7e35]


def widen(bits: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def nearest(numbers: npt.NDArray[np.float32], form: Fp8Format) -> npt.NDArray[np.uint8]:
    """Nearest code, ties to even, by search in the standard's table; clamped; NaN by definition."""
    table = decode_table(form.name).astype(np.float64)
    positive = [code for code in range(128) if np.isfinite(table[code])]
    values = table[positive]
    size = np.minimum(np.abs(numbers.astype(np.float64)), form.largest)
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = size - values[above - 1], values[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    codes = np.where(up, above, above - 1).astype(np.uint8)
    negative = np.signbit(numbers)
    if form.name == "float8_e4m3fnuz":
        negative &= codes != 0
    return np.where(np.isnan(numbers), form.nan, codes | np.where(negative, 0x80, 0)).astype(
        np.uint8
    )


def job(values: Any, codes: Any, scale: float, dtype: str, form: Fp8Format) -> Job:
    scales = np.array([scale], np.float32)
    kept = [False] * values.ndim
    return Job.of(values, codes, scales, kept, dtype=dtype, form=form, nan=True)


@pytest.fixture(params=["lookup", "wide"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(_fp8_cast, "TABLE", 1 if request.param == "lookup" else 1 << 60)
    return str(request.param)


# case 53, each pattern of both 16-bit types, with zeros, subnormals, the edge, infinities and NaN
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_pattern_is_encoded_to_the_nearest_code(
    way: str, dtype: str, form: Fp8Format, scale: float
) -> None:
    values = np.arange(65536, dtype=np.uint16)
    codes = np.zeros(65536, np.uint8)
    encode(job(values, codes, scale, dtype, form), Team())
    with np.errstate(over="ignore", invalid="ignore"):
        divided = widen(values, dtype) / np.float32(scale)
    assert np.array_equal(codes, nearest(divided, form))


def test_numbers_between_16_bit_patterns_are_rounded_once() -> None:
    form = FORMATS["float8_e4m3fn"]
    edge = np.array([464.0, 465.0, 480.0, 1e4, 447.0, 448.0, 1.0625, 1.06250012, 1e-9], np.float32)
    values = np.concatenate([edge, -edge, np.nextafter(edge, 0).astype(np.float32)])
    codes = np.zeros(values.shape, np.uint8)
    encode(job(values.view(np.uint32), codes, 1.0, "float32", form), Team())
    assert np.array_equal(codes, nearest(values, form))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0, 3.0 / 448])
def test_every_code_is_decoded_with_its_scale(
    way: str, dtype: str, form: Fp8Format, scale: float
) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 3)
    width = np.uint32 if dtype == "float32" else np.uint16
    values = np.zeros(codes.shape, width)
    decode(job(values, codes, scale, dtype, form), Team())
    exact = decode_table(form.name)[codes] * np.float32(scale)
    if dtype == "float32":
        assert np.array_equal(values.view(np.float32), exact, equal_nan=True)
        return
    read = widen(values.astype(np.uint16), dtype)
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = exact.view(np.uint32).astype(np.uint64)
        even = bits + 0x7FFF + (bits >> 16 & 1)
        rounded = (even.astype(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        rounded[np.isnan(exact)] = np.nan
    assert np.array_equal(read, rounded, equal_nan=True)


def test_odd_rows_strides_and_unaligned_memory(way: str) -> None:
    rng = np.random.default_rng(5)
    form = FORMATS["float8_e4m3fn"]
    plain = rng.integers(0, 0x7F00, (6, 5, 7)).astype(np.uint16)
    scales = (np.arange(1, 6) / 64).astype(np.float32)
    dense = np.zeros(plain.shape, np.uint8)
    kept = (False, True, False)
    team = Team()
    encode(Job.of(plain, dense, scales, kept, dtype="bfloat16", form=form), team)
    turned = np.ascontiguousarray(plain.transpose(2, 0, 1)).transpose(1, 2, 0)
    room = np.full(plain.size + 1, 0xEE, np.uint8)
    odd = room[1:].reshape(plain.shape)
    encode(Job.of(turned, odd, scales, kept, dtype="bfloat16", form=form), team)
    assert np.array_equal(odd, dense)
    assert room[0] == 0xEE
    back = np.zeros(plain.shape, np.uint16)
    decode(Job.of(back, dense, scales, kept, dtype="bfloat16", form=form), team)
    spaced = np.full((6, 5, 9), 0xEEEE, np.uint16)
    decode(Job.of(spaced[..., :7], odd, scales, kept, dtype="bfloat16", form=form), team)
    assert np.array_equal(spaced[..., :7], back)
    assert (spaced[..., 7:] == 0xEEEE).all()


@pytest.mark.parametrize("kept", [(True, False, True, False), (True, True, False, False)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_both_ways_agree_on_many_scales(
    kept: tuple[bool, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    form = FORMATS["float8_e4m3fn"]
    shape = (2, 3, 17, 8)
    values = rng.integers(0, 65536, shape).astype(np.uint16)
    count = int(np.prod([n for n, keep in zip(shape, kept, strict=True) if keep]))
    scales = (rng.random(count) + 0.01).astype(np.float32)
    found = []
    for table in (1, 1 << 60):
        monkeypatch.setattr(_fp8_cast, "TABLE", table)
        codes, back = np.zeros(shape, np.uint8), np.zeros(shape, np.uint16)
        encoding = Job.of(values, codes, scales, kept, dtype=dtype, form=form, nan=True)
        assert encoding.tabulated == (table == 1)
        encode(encoding, Team())
        decode(Job.of(back, codes, scales, kept, dtype=dtype, form=form), Team())
        found.append((codes, back))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


def test_threads_give_the_bytes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fp8_cast, "SHARE", 1000)
    rng = np.random.default_rng(6)
    form = FORMATS["float8_e4m3fn"]
    values = rng.integers(0, INFINITY["bfloat16"], (60, 4, 128)).astype(np.uint16)
    scales = (np.arange(1, 61) / 64).astype(np.float32)
    kept = (True, False, False)
    found = []
    for threads in (1, 3):
        codes, back = np.zeros(values.shape, np.uint8), np.zeros(values.shape, np.uint16)
        with Team(threads) as team:
            encode(Job.of(values, codes, scales, kept, dtype="bfloat16", form=form), team)
            decode(Job.of(back, codes, scales, kept, dtype="bfloat16", form=form), team)
        found.append((codes, back))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


def test_memory_that_may_only_be_read_is_encoded_as_any_other(way: str) -> None:
    values = np.arange(0x3F00, 0x4300, dtype=np.uint16).reshape(2, -1)
    frozen = np.frombuffer(values.tobytes(), np.uint16).reshape(values.shape)
    found = []
    for source in (values, frozen):
        codes = np.zeros(values.shape, np.uint8)
        encode(job(source, codes, 0.5, "bfloat16", FORMATS["float8_e4m3fn"]), Team())
        found.append(codes)
    assert np.array_equal(found[0], found[1])


def test_many_pieces_give_the_bytes_of_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    form = FORMATS["float8_e4m3fn"]
    values = rng.integers(0, 0x7F00, (40, 64)).astype(np.uint16)
    found = []
    for limit in (1 << 18, 1024):
        monkeypatch.setattr(_fp8_cast, "WIDE", limit)
        codes, back = np.zeros(values.shape, np.uint8), np.zeros(values.shape, np.uint16)
        scales = np.array([0.5], np.float32)
        kept = (False, False)
        encode(Job.of(values, codes, scales, kept, dtype="bfloat16", form=form), Team())
        decode(Job.of(back, codes, scales, kept, dtype="bfloat16", form=form), Team())
        found.append((codes, back))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


def test_nothing_is_a_job_too() -> None:
    form = FORMATS["float8_e4m3fn"]
    none = np.zeros((0, 4), np.uint16)
    encode(job(none, np.zeros((0, 4), np.uint8), 1.0, "bfloat16", form), Team())
    decode(job(none, np.zeros((0, 4), np.uint8), 1.0, "bfloat16", form), Team())
