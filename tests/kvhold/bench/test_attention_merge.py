"""Ways to join splits: those in use come first, and without FlashInfer Triton's are compared alone."""

from __future__ import annotations

from typing import Any

import pytest

from attention._triton import TritonBackend
from kvhold.bench.attention_merge import CANDIDATES, ways


def test_without_flashinfer_tritons_two_ways_are_left() -> None:
    assert list(ways(None)) == [
        "triton, a merge of its own",
        "triton, merged by the last program",
    ]


def test_what_is_in_use_comes_first_and_every_candidate_differs_from_it() -> None:
    library: Any = object()
    names = list(ways(library))
    assert names[0] == "cores, merge of 128 threads"
    assert names[1:4] == list(CANDIDATES)
    assert all(any(how.values()) for how in CANDIDATES.values())
    assert len({tuple(sorted(how)) for how in CANDIDATES.values()}) == len(CANDIDATES)


def test_tritons_ways_differ_in_how_they_join() -> None:
    pytest.importorskip("triton")
    made = [make() for make in ways(None).values()]
    assert all(isinstance(backend, TritonBackend) for backend in made)
    assert [getattr(backend, "_fused") for backend in made] == [False, True]  # noqa: B009 - private
