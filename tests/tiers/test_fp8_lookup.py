import numpy as np
import pytest

from tiers._fp8_lookup import INFINITY, decode_lookup, encode_lookup
from tiers._fp8_scratch import LOOKUP, Scratch
from tiers._fp8_tables import FORMATS, decode_table

FORM = FORMATS["float8_e4m3fn"]


def test_long_runs_strides_and_odd_addresses() -> None:
    long = np.full((2, LOOKUP + 6), 0x3F80, np.uint16)  # 1.0
    scale = np.array([0.5], np.float32)
    room = np.full((2, LOOKUP + 9), 0xEE, np.uint8)
    codes = room[:, 1:-2]
    encode_lookup(long, codes, scale, Scratch(), dtype="bfloat16", form=FORM)
    assert (codes == 0x40).all()  # 2
    assert set(room[:, 0]) == set(room[:, -1]) == {0xEE}
    back = np.zeros(long.size + 1, np.uint16)[1:].reshape(long.shape)
    decode_lookup(codes, back, scale, Scratch(), dtype="bfloat16", form=FORM)
    assert (back == 0x3F80).all()


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
