"""The sweep's cells: all of them, each pair once, and verdicts that can be wrong."""

import itertools
from dataclasses import replace
from typing import Any

import torch

from attention import Backends
from kvhold.bench.attention_cases import Case, build
from kvhold.bench.attention_check import (
    BACKENDS,
    DTYPES,
    GROUPS,
    PAGES,
    Cell,
    _rotated,
    cells,
    expected,
    judge,
    pairwise,
)
from tiers._layout import PageOrder


def test_the_product_at_head_dim_128_is_whole() -> None:
    found = {
        (c.backend, c.case.key, c.case.order, c.case.page_size, c.case.group, c.case.fresh, c.graph)
        for c in cells()
        if c.case.head_dim == 128
    }
    wanted = itertools.product(BACKENDS, DTYPES, PageOrder, PAGES, GROUPS, range(2), range(2))
    assert len(found) == len(list(wanted))


def test_every_pair_of_dimensions_is_there() -> None:
    dimensions: list[tuple[Any, ...]] = [(0, 1), (0, 1, 2), tuple(range(5)), ("a", "b")]
    rows = list(pairwise(dimensions))
    for a, b in itertools.combinations(range(4), 2):
        pairs = {(row[a], row[b]) for row in rows}
        assert pairs == set(itertools.product(dimensions[a], dimensions[b]))
    assert len(rows) < 2 * 3 * 5 * 2 / 2


def test_verdicts() -> None:
    case = Case(head_dim=16, page_size=4, lengths=(0, 5, 9), group=2)
    backends = Backends()
    inputs = build(case)
    oracle = expected(inputs, causal=False)
    right = judge(backends, Cell("reference", case, graph=False), inputs, oracle)
    assert right["verdict"] == "right"
    refused = judge(backends, Cell("reference", case, graph=True), inputs, oracle)
    assert refused["verdict"] == "refused"
    assert "graph" in refused["why"]
    inputs.view.value.view(torch.uint8)[int(inputs.table.pages_of(2)[0])] ^= 0x80
    wrong = judge(backends, Cell("reference", case, graph=False), inputs, oracle)
    assert wrong["verdict"] == "wrong"


def test_the_first_batch_of_a_graph_is_another_one_of_the_same_size() -> None:
    inputs = build(Case(head_dim=16, page_size=4, lengths=(0, 5, 9), fresh=(0, 1, 3)))
    other = _rotated(inputs)
    assert other.table.lengths.tolist() == [9, 5, 0]
    assert other.rows == (0, 3, 4, 4)
    assert other.table.indices.tolist() != inputs.table.indices.tolist()


def test_names_tell_cells_apart() -> None:
    case = Case()
    names = {
        Cell("triton", case, graph=False).name,
        Cell("triton", case, graph=True).name,
        Cell("flashinfer", case, graph=False).name,
        Cell("triton", replace(case, fresh=(1,)), graph=False).name,
        Cell("triton", replace(case, key=torch.float16), graph=False).name,
        Cell("triton", replace(case, page_size=1), graph=False).name,
    }
    assert len(names) == 6
