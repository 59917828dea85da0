"""Keys: chained, canonical, the same in every process."""

import json
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers._key import BlockKey, Provenance
from tiers._layout import PageLayout, PageOrder, ScaleScope, StaticScales

LAYOUT = PageLayout(layers=2, page_size=4, kv_heads=2, head_dim=8, order=PageOrder.NHD)
BASE = Provenance(model="m", revision="r", layout=LAYOUT)

SOURCE = Path(__file__).parent.parent.parent / "src"
PROBE = """
import json, sys
from tiers._key import Provenance
from tiers._layout import PageLayout, PageOrder
layout = PageLayout(layers=2, page_size=4, kv_heads=2, head_dim=8, order=PageOrder.NHD)
found = []
for optional in ({}, {"scheme": None, "scope": None}):
    p = Provenance(model="m", revision="r", layout=layout, **optional)
    found.append([p.digest.hex(), *(str(k) for k in p.keys(range(9), extra=b"x"))])
print(json.dumps(found))
"""


def test_keys_are_full_pages_only() -> None:
    # case 51 (zero, one, a page less one, a page, a page and one)
    sizes = {0: 0, 1: 0, 3: 0, 4: 1, 5: 1, 8: 2, 11: 2}
    for tokens, pages in sizes.items():
        keys = BASE.keys(range(tokens), extra=b"")
        assert (len(keys), keys.pending) == (pages, tokens - 4 * pages)
    assert isinstance(BASE.keys(range(4), extra=b"")[0], BlockKey)


def test_extra_has_to_be_given() -> None:
    with pytest.raises(TypeError, match="extra"):
        BASE.keys(range(4))  # type: ignore[call-arg]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.lists(st.integers(0, 7), max_size=8))
def test_pieces_give_the_keys_of_the_whole(tokens: list[int], cuts: list[int]) -> None:
    whole = BASE.keys(tokens, extra=b"e")
    pieces = BASE.keys(extra=b"e")
    rest = tokens
    for cut in cuts:
        pieces.extend(rest[:cut], extra=b"e")
        rest = rest[cut:]
    pieces.extend(np.array(rest, dtype=np.int64), extra=b"e")
    assert pieces.digests == whole.digests
    assert pieces.pending == whole.pending


def test_a_link_depends_on_all_before_it() -> None:
    one = BASE.keys([1, 2, 3, 4, 5, 6, 7, 8], extra=b"")
    other = BASE.keys([9, 2, 3, 4, 5, 6, 7, 8], extra=b"")
    assert not set(one.digests) & set(other.digests)
    assert one[:1].digests == BASE.keys([1, 2, 3, 4], extra=b"").digests
    sliced = one[:1]
    sliced.extend([5, 6, 7, 8], extra=b"")
    assert sliced.digests == one.digests


def test_extra_bytes_tell_apart_equal_tokens() -> None:
    image = [7] * 4  # placeholder tokens of two images
    digests = {BASE.keys(image, extra=extra).digests[0] for extra in (b"", b"a", b"b", b"ab")}
    assert len(digests) == 4
    mixed = [BASE.keys(extra=b"") for _ in range(4)]
    for keys, cut in zip(mixed, (1, 2, 3, 4), strict=True):
        keys.extend(image[:cut], extra=b"a")
        keys.extend(image[cut:], extra=b"b")
    assert len({keys.digests[0] for keys in mixed}) == 4
    same = BASE.keys(image[:2], extra=b"a")
    same.extend(image[2:], extra=b"a")
    assert same.digests == mixed[3].digests


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"]])
def test_a_token_out_of_range_changes_nothing(bad: list[Any]) -> None:
    keys = BASE.keys([1, 2, 3], extra=b"")
    before = list(keys.digests), keys.pending
    with pytest.raises(ValueError, match="tokens"):
        keys.extend([1, 2, *bad], extra=b"")
    assert (keys.digests, keys.pending) == before
    with pytest.raises(ValueError, match="tokens"):
        keys.extend(np.array([-1]), extra=b"")


# case 34 (parts that look alike when joined) and case 35 (anything that the bytes depend on)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"model": "mr", "revision": ""},
    {"model": "", "revision": "mr"},
    {"model": "m/../r"},
    {"model": "m\0r"},
    {"model": "m\\r"},
    {"model": "m" * 300},
    {"model": "M"},
    {"model": unicodedata.normalize("NFC", "é")},
    {"model": unicodedata.normalize("NFD", "é")},
    {"model": "\udc80"},
    {"tokenizer": "t"},
    {"rope": "t"},
    {"tenant": "t"},
    {"salt": b"t"},
    {"static_scales": b"t"},
    {"scheme": "producer_scaled"},
    {"scope": ScaleScope.TENSOR},
    {"first_layer": 2},
    {"world_size": 2},
    {"world_size": 2, "rank": 1},
    {"format_version": 4},
    {"layout": replace(LAYOUT, layers=3)},
    {"layout": replace(LAYOUT, page_size=8)},
    {"layout": replace(LAYOUT, kv_heads=4, head_dim=4)},
    {"layout": replace(LAYOUT, order=PageOrder.HND)},
    {"layout": replace(LAYOUT, key="float16")},
    {"layout": replace(LAYOUT, value="float16")},
    {"layout": replace(LAYOUT, value=None)},
    {"layout": replace(LAYOUT, value="float8_e4m3fn", scope=ScaleScope.HEAD)},
]


def test_whatever_differs_gives_other_keys() -> None:
    made = [replace(BASE, **change) for change in VARIANTS]
    digests = {p.keys(range(8), extra=b"").digests[0] for p in made}
    assert len(digests) == len(VARIANTS)
    assert len({p.canonical for p in made}) == len(VARIANTS)
    assert replace(BASE).digest == BASE.digest


def test_ranks_have_to_make_sense() -> None:
    for bad in ({"rank": 1}, {"rank": -1}, {"first_layer": -1}):
        with pytest.raises(ValueError, match="provenance"):
            replace(BASE, **bad)  # type: ignore[arg-type]


def test_keys_are_the_same_in_every_process() -> None:
    # case 45 (fresh processes with different hash seeds, optional parts set to none or left out)
    outputs = set()
    for hash_seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={"PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    first, second = json.loads(outputs.pop())
    assert first == second == [BASE.digest.hex(), *map(str, BASE.keys(range(9), extra=b"x"))]


def test_values_of_fixed_scales_name_them() -> None:
    page = LAYOUT.encoded(scope=None)
    with pytest.raises(ValueError, match="static_scales"):
        Provenance(model="m", revision="r", layout=page)
    made = [
        Provenance(model="m", revision="r", layout=page, static_scales=scales.digest)
        for scales in (
            StaticScales.unit(2),
            StaticScales(ScaleScope.TENSOR, [1.0, 2.0]),
            StaticScales(ScaleScope.HEAD, [[1.0, 1.0], [1.0, 1.0]]),
        )
    ]
    assert {(p.scheme, p.scope) for p in made} == {("producer_scaled", None)}
    assert len({p.keys(range(8), extra=b"").digests[0] for p in made}) == 3
