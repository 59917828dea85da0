"""The index: prefixes of resident pages, in order, and nothing that is not complete."""

import pytest

from tiers._index import Entry, Index
from tiers._residency import Change, Residency
from transfer import IllegalTransition


def entry(name: bytes, *events: Change) -> Entry:
    made = Entry(name, b"", name, tenant="", depth=0, used=0)
    for event in events:
        made.apply(event)
    return made


RESIDENT = (Change.RESERVE, Change.PUBLISH)


def test_a_prefix_ends_at_the_first_page_that_is_not_resident() -> None:
    index = Index()
    for name in (b"a", b"b", b"d"):
        index.add(entry(name, *RESIDENT))
    index.add(entry(b"c", Change.RESERVE))
    assert [e.digest for e in index.leading([b"a", b"b", b"c", b"d"])] == [b"a", b"b"]
    assert index.count([b"a", b"b", b"c", b"d"]) == 2
    assert index.count([b"x", b"a"]) == 0
    assert index.leading([]) == []
    assert len(index) == 4


def test_a_lookup_marks_pages_as_used_and_a_count_does_not() -> None:
    index = Index()
    one, two = entry(b"a", *RESIDENT), entry(b"b", *RESIDENT)
    index.add(one)
    index.add(two)
    index.count([b"a", b"b"])
    assert one.used == two.used == 0
    index.leading([b"a"])
    assert 0 < one.used < index.tick()
    assert two.used == 0


def test_an_old_put_cannot_drop_a_newer_one() -> None:
    index = Index()
    old, new = entry(b"a", *RESIDENT), entry(b"a", *RESIDENT)
    index.add(old)
    index.drop(old)
    index.add(new)
    index.drop(old)
    assert index.get(b"a") is new


def test_an_entry_is_quiet_when_nothing_uses_it() -> None:
    made = entry(b"a", *RESIDENT)
    for use in ("pending", "reads", "leases"):
        seen = [made.quiet]
        setattr(made, use, 1)
        seen.append(made.quiet)
        setattr(made, use, 0)
        assert seen == [True, False]
    told: list[Residency] = []
    made.watchers = [lambda: told.append(made.residency)]
    made.apply(Change.EVICT)
    with pytest.raises(IllegalTransition):
        made.apply(Change.PUBLISH)
    made.apply(Change.FREED)
    assert told == [Residency.EVICTING, Residency.ABSENT]
