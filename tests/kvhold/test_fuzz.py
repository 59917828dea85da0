import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold import fuzz as fuzzing
from kvhold._mutate import HURTFUL, reseal
from kvhold.fuzz import Reader, Tally, Witness, check_unsealed, run_child
from tiers.format import FormatError

SOURCE = Path(__file__).parents[2] / "src"
READER = Reader()


@given(st.binary(max_size=600))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert READER.read(data, 0, sealed=False) in {"LengthError", "VersionError"}


@given(st.data())
def test_any_number_anywhere_in_a_header_is_accepted_or_refused(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(READER.valid) - 1))
    blob = bytearray(READER.valid[index])
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from((1, 2, 4, 8)))
        at = data.draw(st.integers(0, 392))
        number = data.draw(st.sampled_from(HURTFUL) | st.integers(0, 2**64 - 1))
        if at + width <= len(blob):
            blob[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    sealed = data.draw(st.booleans())
    if sealed:
        reseal(blob)
    READER.read(bytes(blob), index // 2, sealed=sealed)


def test_valid_blobs_are_accepted() -> None:
    for index, blob in enumerate(READER.valid):
        assert READER.read(blob, index // 2, sealed=False) == "accepted, decoded: accepted"


def test_a_child_reads_damaged_blobs_within_its_memory() -> None:
    code, found = run_child(5, duration=60, inputs=1500)
    assert code == 0
    assert found["tried"] == 1500
    assert sum(found["outcomes"].values()) == 1500
    assert 0 < found["damaged"] <= 1500
    largest = max(map(len, READER.valid))
    assert found["address_space_limit"] == fuzzing.LIMIT_FACTOR * largest
    assert largest <= found["largest_input"] < 4 * largest
    again = run_child(5, duration=60, inputs=1500)[1]
    assert again["outcomes"] == found["outcomes"]


# The control of the memory limit: what a header claims, taken by any allocator, is noticed.
@pytest.mark.parametrize(
    "grab",
    [
        "torch.empty(1 << 24, dtype=torch.uint8)",
        "bytearray(1 << 24)",
        "mmap.mmap(-1, 1 << 24)",
        "numpy.zeros(1 << 24, 'u1')",
    ],
)
def test_memory_beyond_the_limit_cannot_be_had(grab: str) -> None:
    code = (
        "import mmap, numpy, torch\n"
        "from kvhold.fuzz import Reader, limit_memory\n"
        "reader = Reader(); limit_memory(1 << 21)\n"
        f"try:\n    {grab}\nexcept (MemoryError, RuntimeError, OSError):\n    raise SystemExit(3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 3
    )


def test_every_single_bit_is_refused() -> None:
    assert check_unsealed(6, 300) == 300


def test_accepted_damage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = bytearray(next(b for b in READER.valid if b[0] == 0x89))
    blob[4096] ^= 1
    assert READER.read(bytes(blob), 0, sealed=False) == "ChecksumMismatch"
    monkeypatch.setattr(READER, "open", lambda _data: "accepted")
    with pytest.raises(AssertionError, match="damage was accepted"):
        READER.read(bytes(blob), 0, sealed=False)


def test_traces_of_a_refusal_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()

    def scribble(_encoded: object, into: dict[str, bytearray]) -> None:
        into["key"][0] = 0
        raise FormatError("x", found=1, expected=2)

    monkeypatch.setattr(reader.codecs[0], "decode", scribble)
    with pytest.raises(AssertionError, match="left traces"):
        reader.read(b"", 0, sealed=False)


def test_an_odd_end_prints_the_input(capsys: pytest.CaptureFixture[str]) -> None:
    witness = Witness(7)
    witness.number, witness.data = 3, b"\1\2"
    witness.__exit__(struct.error, struct.error(), None)
    assert "seed 7, input 3, 2 bytes" in capsys.readouterr().err


def test_the_command_prints_what_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    fuzzing.command(duration=60, seed=8, inputs=400, as_json=True, child=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["tried"], found["seed"], found["single_bits"]) == (400, 8, 2000)
    tally = Tally()
    assert tally.as_json()["tried"] == 0
