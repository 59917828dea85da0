import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers.blobs import codecs, encode

from tiers import format as formats
from tiers._errors import FormatError, LengthError, VersionError
from tiers._format_common import Scheme, as_bytes
from tiers._team import Team
from tiers.format import blob_version, key_in_space, open_v1, parse_v3


@pytest.mark.parametrize("name", codecs())
def test_the_version_is_told_from_the_first_ten_bytes(name: str) -> None:
    assert blob_version(as_bytes(encode(codecs()[name])[:10])) == int(name[1])


@pytest.mark.parametrize(
    "data", [b"", bytes(9), bytes(10), b"LMCKV\1\0\1\3\0", b"\x89KVHOLD\n\1\0"]
)
def test_other_bytes_have_no_version(data: bytes) -> None:
    with pytest.raises((LengthError, VersionError)):
        blob_version(as_bytes(data))


class Trap:
    """Unpickling one creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.path,))


# case 32, a pickle planted as a blob, whole and behind a valid magic
@pytest.mark.parametrize("front", [b"", b"LMCKV\1\0\1\1\0", b"\x89KVHOLD\n\3\0"])
def test_a_pickle_is_refused_without_being_run(tmp_path: Path, front: bytes) -> None:
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Trap(mark)))  # noqa: S301 - the control: this one does run
    assert mark.exists()
    mark.unlink()
    data = as_bytes((front + pickle.dumps(Trap(mark))).ljust(8192, b"\0"))
    for read in (open_v1, parse_v3):
        with pytest.raises(FormatError):
            read(data)
    assert not mark.exists()


def test_a_key_moves_to_another_digest_in_every_space() -> None:
    digest = bytes(range(32))
    moved = {key_in_space(digest, scheme) for scheme in Scheme}
    assert len(moved) == 3
    assert all(len(found) == 32 for found in moved)
    assert digest not in moved


# case 35, the format version and scheme as part of what is found
def test_a_reader_of_one_version_refuses_the_others() -> None:
    blobs = {name: as_bytes(encode(codec)) for name, codec in codecs().items()}
    for name, blob in blobs.items():
        if name.startswith("v3"):
            parse_v3(blob)
            with pytest.raises(FormatError):
                open_v1(blob)
        else:
            open_v1(blob).verify(Team())
            with pytest.raises(FormatError):
                parse_v3(blob)


def test_every_public_name_is_there() -> None:
    assert all(hasattr(formats, name) for name in formats.__all__)


def test_formats_are_read_without_torch() -> None:
    code = "import sys, tiers.format, tiers.codec, tiers.fp8; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
