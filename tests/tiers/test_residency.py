"""The table of residency, held against laws; every changed cell must break one of them."""

from collections.abc import Iterator, Mapping

import pytest

from tiers._residency import CHANGES, Change, Residency, change
from transfer import IllegalTransition

R, C = Residency, Change
Table = Mapping[Residency, Mapping[Change, Residency]]


def reachable(table: Table, start: Residency, *, without: Change | None = None) -> set[Residency]:
    """What can be reached from `start` by one or more events other than `without`."""
    seen: set[Residency] = set()
    todo = [start]
    while todo:
        for event, after in table[todo.pop()].items():
            if event is not without and after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


def broken_laws(table: Table) -> list[str]:
    """The laws that a table breaks."""
    edges = [(a, e, b) for a, row in table.items() for e, b in row.items()]
    laws = {
        "read only what was published": all(
            (b is not R.RESIDENT) or (a, e) == (R.FILLING, C.PUBLISH) for a, e, b in edges
        ),
        "publish completes a fill and nothing else": [(a, b) for a, e, b in edges if e is C.PUBLISH]
        == [(R.FILLING, R.RESIDENT)],
        "reserving is how a put begins": [(a, b) for a, e, b in edges if e is C.RESERVE]
        == [(R.ABSENT, R.FILLING)],
        "nothing else fills": all(e is C.RESERVE for _, e, b in edges if b is R.FILLING),
        "removing is total": all(C.REMOVE in table[r] for r in R),
        "removing is idempotent": all(
            table[b].get(C.REMOVE) is b for _, e, b in edges if e is C.REMOVE
        ),
        "removing frees nothing by itself": all(
            table[r].get(C.REMOVE) in ({R.DOOMED} if r in (R.FILLING, R.RESIDENT) else {r})
            for r in R
        ),
        "only what is resident and unused is evicted": [(a, b) for a, e, b in edges if e is C.EVICT]
        == [(R.RESIDENT, R.EVICTING)],
        "what is doomed waits for quiet": {
            e: b for a, e, b in edges if a is R.DOOMED and a is not b
        }
        == {C.QUIET: R.EVICTING},
        "quiet ends doom and nothing else": [a for a, e, _ in edges if e is C.QUIET] == [R.DOOMED],
        "bytes are freed once, at the end": [(a, b) for a, e, b in edges if e is C.FREED]
        == [(R.EVICTING, R.ABSENT)],
        "a fault dooms": [(a, b) for a, e, b in edges if e is C.FAIL]
        == [(a, R.DOOMED) for a in (R.FILLING, R.RESIDENT, R.DOOMED)],
        "what is on its way out never comes back": not {R.FILLING, R.RESIDENT}
        & (
            reachable(table, R.DOOMED, without=C.RESERVE)
            | reachable(table, R.EVICTING, without=C.RESERVE)
        ),
        "everything can be reached, and can end": all(
            r in reachable(table, R.ABSENT) and R.ABSENT in reachable(table, r) for r in R
        ),
    }
    return [name for name, holds in laws.items() if not holds]


def mutants() -> Iterator[tuple[str, Table]]:
    """Every table that differs from ours in one cell."""
    for residency in R:
        for event in C:
            ours = CHANGES[residency].get(event)
            for other in (None, *R):
                if other is ours:
                    continue
                table = {r: dict(row) for r, row in CHANGES.items()}
                if other is None:
                    del table[residency][event]
                else:
                    table[residency][event] = other
                yield f"{event.name} in {residency.name} gives {other}", table


def test_the_table_keeps_every_law() -> None:
    assert broken_laws(CHANGES) == []


def test_every_mutant_breaks_a_law() -> None:
    found = {name: broken_laws(table) for name, table in mutants()}
    assert len(found) == len(R) * len(C) * len(R)
    assert [name for name, broken in found.items() if not broken] == []


def test_every_state_has_a_row() -> None:
    assert set(CHANGES) == set(R)
    assert [e.name for e in C] == [
        "RESERVE",
        "PUBLISH",
        "FAIL",
        "REMOVE",
        "EVICT",
        "QUIET",
        "FREED",
    ]


@pytest.mark.parametrize("residency", R)
@pytest.mark.parametrize("event", C)
def test_an_absent_cell_is_our_bug(residency: Residency, event: Change) -> None:
    expected = CHANGES[residency].get(event)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} in {residency.name}"):
            change(residency, event)
    else:
        assert change(residency, event) is expected
