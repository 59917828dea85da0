import random
from collections import Counter

from kvhold._mutate import STEPS, mutate, reseal
from tiers._errors import ChecksumMismatch, FormatError
from tiers._team import Team
from tiers.format import blob_version, open_v1, parse_v3
from tiers.testing import sample_blob, sample_codecs

SEEDS = [sample_blob(codec) for codec in sample_codecs().values()]


def open_all(blob: bytes) -> None:
    view = memoryview(blob)
    if blob_version(view) == 3:
        header = parse_v3(view)
        for section in header.plan.sections:
            header.verify(view, section.part.name, Team())
    else:
        open_v1(view).verify(Team())


def test_the_same_seed_gives_the_same_damage() -> None:
    first = [mutate(SEEDS, random.Random(1)) for _ in range(3)]
    assert first == [mutate(SEEDS, random.Random(1)) for _ in range(3)]
    assert first != [mutate(SEEDS, random.Random(2)) for _ in range(3)]


def test_resealing_leaves_valid_blobs_alone() -> None:
    for seed in SEEDS:
        blob = bytearray(seed)
        reseal(blob)
        assert bytes(blob) == seed


def test_resealed_damage_gets_past_the_checksums() -> None:
    for seed in SEEDS:
        blob = bytearray(seed)
        at = 64 if blob[0] == 0x89 else len(blob) - 5  # the key digest; a code or a scale's byte
        blob[at] ^= 1
        reseal(blob)
        open_all(bytes(blob))


def test_damage_reaches_every_kind_of_refusal_and_acceptance() -> None:
    rng = random.Random(3)
    seen: Counter[str] = Counter()
    for _ in range(20_000):
        blob, _sealed = mutate(SEEDS, rng)
        try:
            open_all(blob)
            seen["accepted"] += 1
        except ChecksumMismatch:
            seen["ChecksumMismatch"] += 1
        except FormatError as error:
            seen[error.cause] += 1
    wanted = {
        "accepted",
        "ChecksumMismatch",
        "LengthError",
        "ReservedError",
        "ScaleError",
        "SchemeMismatch",
        "ShapeError",
        "UnknownId",
        "VersionError",
    }
    assert wanted <= set(seen)
    assert len(STEPS) >= 8


def test_nothing_can_be_damaged_too() -> None:
    rng = random.Random(4)
    for step in STEPS:
        blob = bytearray()
        step(blob, SEEDS, rng)
        reseal(blob)
