import tracemalloc

import numpy as np
import pytest

from tiers._errors import LengthError, ReservedError, ScaleError
from tiers._format_common import Scheme, Strings, as_bytes, check_scales, check_zero, unpack


def test_each_scheme_is_a_key_space_of_its_own() -> None:
    assert len({scheme.key_space for scheme in Scheme}) == len(Scheme) == 3


def test_strings_come_in_the_order_of_the_wire() -> None:
    assert [name for name, _ in Strings(kv_layout="NHD").items()] == [
        "model_id",
        "model_revision_hash",
        "tokenizer_hash",
        "rope_config_hash",
        "attention_backend",
        "kv_layout",
    ]


def test_reading_past_the_end_says_how_much_is_missing() -> None:
    assert unpack("<H", as_bytes(b"\1\2\3"), 1, "x") == (0x0302,)
    with pytest.raises(LengthError, match="found 3 bytes, expected at least 4"):
        unpack("<H", as_bytes(b"\1\2\3"), 2, "x")


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 65535, 65536, 99999])
def test_a_bad_scale_is_found_wherever_it_is(bad: float, at: int) -> None:
    scales = np.ones(100_000, "<f4")
    check_scales("scale", as_bytes(scales))
    scales[at] = bad
    with pytest.raises(ScaleError, match=f"scale {at}"):
        check_scales("scale", as_bytes(scales))


def test_the_smallest_scale_is_good() -> None:
    check_scales("scale", as_bytes(np.array([2.0**-149], "<f4")))
    check_scales("scale", as_bytes(b""))


def test_a_byte_that_has_to_be_zero_is_found() -> None:
    data = bytearray(10_000)
    check_zero("padding", as_bytes(data))
    data[9000] = 1
    with pytest.raises(ReservedError, match="padding, byte 9000"):
        check_zero("padding", as_bytes(data))


def test_a_buffer_is_viewed_not_copied() -> None:
    array = np.zeros((1000, 1000), np.float32)
    tracemalloc.start()
    view = as_bytes(array)
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()
    array[0, 0] = 1
    assert len(view) == array.nbytes
    assert bytes(view[:4]) == np.float32(1).tobytes()
