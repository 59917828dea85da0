"""Eviction, quota and admission, each against a plain model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import is_not

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers._policy import Admission, Lru, Policy, S3Fifo, Shares


@dataclass(eq=False)
class Page:
    digest: bytes
    depth: int = 0
    used: int = 0
    nbytes: int = 1
    tenant: str = ""


def always(record: object) -> bool:
    return True


def pages(count: int) -> list[Page]:
    return [Page(bytes([i])) for i in range(count)]


Steps = st.lists(st.tuples(st.sampled_from(["add", "use", "evict", "drop"]), st.integers(0, 15)))


@given(Steps)
def test_least_recently_used_goes_first(steps: list[tuple[str, int]]) -> None:
    policy = Lru()
    known: dict[int, Page] = {}
    for clock, (verb, number) in enumerate(steps, 1):
        if verb == "add" and number not in known:
            known[number] = Page(bytes([number]), used=clock)
            policy.add(known[number])
        elif verb == "use" and number in known:
            known[number].used = clock
        elif verb == "drop" and number in known:
            policy.drop(known.pop(number))
        elif verb == "evict" and known:
            victim = next(policy.victims(always))
            assert isinstance(victim, Page)
            assert victim.used == min(page.used for page in known.values())
            policy.drop(victim)
            del known[victim.digest[0]]
        assert len(policy) == len(known)
    order = [page for page in policy.victims(always) if isinstance(page, Page)]
    assert order == sorted(known.values(), key=lambda page: page.used)


def test_of_pages_used_together_the_deepest_goes_first() -> None:
    policy = Lru()
    made = [Page(bytes([i]), depth=i, used=1) for i in range(4)]
    for page in made:
        policy.add(page)
    assert list(policy.victims(always)) == made[::-1]


@pytest.mark.parametrize("make", [Lru, S3Fifo])
@given(Steps)
def test_every_policy_offers_each_record_and_no_other(
    make: Callable[[], Policy], steps: list[tuple[str, int]]
) -> None:
    policy = make()
    known: dict[int, Page] = {}
    for clock, (verb, number) in enumerate(steps, 1):
        if verb == "add" and number not in known:
            known[number] = Page(bytes([number]), used=clock)
            policy.add(known[number])
        elif verb == "use" and number in known:
            known[number].used = clock
        elif verb == "drop" and number in known:
            policy.drop(known.pop(number))
        elif verb == "evict":
            kept = known.get(number)  # a leased record is passed over, and stays known
            victim = next(policy.victims(partial(is_not, kept)), None)
            if victim is not None:
                assert victim is not kept
                policy.drop(victim)
                del known[victim.digest[0]]
            else:
                assert set(known.values()) <= {kept}
    assert len(policy) == len(known)
    offered = list(policy.victims(always))
    assert len(offered) == len(set(offered))
    assert set(offered) == set(known.values())


@pytest.mark.parametrize("make", [Lru, S3Fifo])
def test_what_is_dropped_leaves_nothing_behind(make: Callable[[], Policy]) -> None:
    # case 80 (memory of gone records)
    policy = make()
    kept = Page(b"kept")
    policy.add(kept)
    for number in range(5000):
        page = Page(number.to_bytes(4, "big"))
        policy.add(page)
        policy.drop(page)
    sizes = {name: len(value) for name, value in vars(policy).items() if hasattr(value, "__len__")}
    assert max(sizes.values()) < 300
    assert list(policy.victims(always)) == [kept]


def test_a_scan_leaves_what_is_read_alone() -> None:
    policy = S3Fifo()
    hot = pages(8)
    for page in hot:
        policy.add(page)
        page.used = 1
    for number in range(100):
        policy.add(Page(number.to_bytes(4, "big")))
        victim = next(policy.victims(always))
        assert victim not in hot
        policy.drop(victim)


def test_a_name_that_comes_back_goes_to_the_main_queue() -> None:
    policy = S3Fifo(small=0.5)
    first = Page(b"a")
    policy.add(first)
    policy.drop(first)
    again, other = Page(b"a"), Page(b"b")
    policy.add(again)
    policy.add(other)
    policy.add(Page(b"c"))
    assert next(policy.victims(always)) is other


def test_a_tenant_over_its_quota_gives_way_itself() -> None:
    shares = Shares(Lru, {"a": 3})
    mine = [Page(bytes([i]), used=i + 10, tenant="a") for i in range(3)]
    theirs = [Page(bytes([i]), used=i, tenant="b") for i in range(3)]
    for page in mine + theirs:
        shares.add(page)
        shares.charge(page.tenant, page.nbytes)
    assert shares.over("a", 2) == 2
    assert shares.over("b", 100) == 0
    assert list(shares.victims(always, "a")) == mine
    assert list(shares.victims(always)) == theirs + mine
    assert list(shares.victims(always, "nobody")) == []
    for page in mine:
        shares.drop(page)
        shares.charge("a", -1)
    assert shares.used == {"b": 3}
    assert list(shares.victims(always)) == theirs
    with pytest.raises(ValueError, match="given back"):
        shares.charge("a", -1)


def test_admission_counts_offers() -> None:
    assert Admission().admit(b"x")
    twice = Admission(2, remember=2)
    assert [twice.admit(b"x") for _ in range(3)] == [False, True, False]
    for name in (b"a", b"b", b"c"):  # the oldest offer is forgotten
        assert not twice.admit(name)
    assert not twice.admit(b"x")
    for bad in (0, -1):
        with pytest.raises(ValueError, match="admission"):
            Admission(bad)
