import subprocess
import sys
import zlib

from hypothesis import given
from hypothesis import strategies as st

from tiers._crc import PIECE, combine, crc32, plain_crc32
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


@given(st.binary(max_size=9000), st.integers(0, 2**32 - 1))
def test_one_buffers_checksum_is_zlibs(data: bytes, start: int) -> None:
    assert plain_crc32(data, start) == zlib.crc32(data, start)
    assert plain_crc32(memoryview(bytearray(data))[1:]) == zlib.crc32(data[1:])


def test_zlib_computes_it_where_isal_is_not_installed() -> None:
    script = "import sys, zlib; sys.modules['isal'] = None; import tiers._crc as c; "
    check = "sys.exit(c.plain_crc32 is not zlib.crc32)"
    assert subprocess.run([sys.executable, "-c", script + check], check=False).returncode == 0
