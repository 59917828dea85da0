import numpy as np
import pytest

from tiers._fp8_lookup import INFINITY, decode_lookup, encode_lookup
from tiers._fp8_scratch import LOOKUP, Scratch
from tiers._fp8_tables import FORMATS, decode_table

FORM = FORMATS["float8_e4m3fn"]


def encode(values: np.ndarray, scales: list[float]) -> np.ndarray:
    codes = np.zeros(values.shape, np.uint8)
    own = np.array(scales, np.float32)
    encode_lookup(values, codes, own, Scratch(), dtype="bfloat16", form=FORM)
    return codes


def test_each_row_has_a_table_of_its_own() -> None:
    one = np.full((5, 3, 4), 0x3F80, np.uint16)  # 1.0
    codes = encode(one, [1.0, 0.5, 0.25])
    assert codes.reshape(5, 3, 4)[0, :, 0].tolist() == [0x38, 0x40, 0x48]  # 1, 2, 4
    assert (codes == codes[:1, :, :1]).all()
    back = np.zeros(one.shape, np.uint16)
    scales = np.array([1.0, 0.5, 0.25], np.float32)
    decode_lookup(codes, back, scales, Scratch(), dtype="bfloat16", form=FORM)
    assert (back == 0x3F80).all()


def test_rows_longer_than_a_piece_keep_their_own_scale() -> None:
    long = np.full((2, LOOKUP + 6), 0x3F80, np.uint16)
    codes = encode(long, [1.0, 0.5])
    assert set(codes[0]) == {0x38}
    assert set(codes[1]) == {0x40}


@pytest.mark.parametrize("scale", [2.0**-149, 1e-40, 1e-38, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tables_are_whole_at_the_ends_of_the_range(scale: float, dtype: str) -> None:
    values = np.arange(65536, dtype=np.uint16)
    codes = np.full(65536, 0xEE, np.uint8)
    own = np.array([scale], np.float32)
    encode_lookup(values, codes, own, Scratch(), dtype=dtype, form=FORM)
    infinity = INFINITY[dtype]
    positive, negative = codes[: infinity + 1], codes[0x8000 : 0x8000 + infinity + 1]
    numbers = decode_table(FORM.name)[positive]
    assert (np.diff(numbers) >= 0).all()
    assert positive[0] == 0
    assert positive[infinity] == FORM.top
    assert np.array_equal(negative, positive | 0x80)
    assert set(codes[infinity + 1 : 0x8000]) == {FORM.nan}
    assert set(codes[0x8000 + infinity + 1 :]) == {FORM.nan}
