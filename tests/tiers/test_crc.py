import zlib

from hypothesis import given
from hypothesis import strategies as st

from tiers._crc import PIECE, combine, crc32
from tiers._team import Team


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_joined_checksums_are_the_checksum_of_the_joined_bytes(first: bytes, second: bytes) -> None:
    whole = zlib.crc32(first + second)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == whole


def test_every_number_of_threads_gives_zlibs_checksum() -> None:
    data = bytes(range(256)) * (3 * PIECE // 256) + b"tail"
    for threads in (1, 2, 3, 5):
        with Team(threads) as team:
            assert crc32(memoryview(data), team) == zlib.crc32(data)
            assert crc32(memoryview(data), team, start=77) == zlib.crc32(data, 77)
            assert crc32(memoryview(b""), team, start=77) == 77
