"""FaultPlan: a pure function of seed and number, printed as code to paste."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.testing import Fault, FaultPlan


@given(
    seed=st.integers(min_value=0, max_value=2**63),
    rates=st.dictionaries(st.sampled_from(Fault), st.floats(0, 0.05), max_size=8),
    at=st.dictionaries(st.integers(0, 50), st.sampled_from(Fault), max_size=5),
)
def test_the_printed_plan_is_the_plan(
    seed: int, rates: dict[Fault, float], at: dict[int, Fault]
) -> None:
    plan = FaultPlan(seed, rates=rates, at=at)
    again = eval(repr(plan), {"FaultPlan": FaultPlan, "Fault": Fault})  # noqa: S307 - our own repr
    assert again == plan
    assert [again.draw(n) for n in range(60)] == [plan.draw(n) for n in range(60)]
    assert all(plan.draw(n) is fault for n, fault in at.items())


def test_rates_are_met() -> None:
    plan = FaultPlan(3, rates={Fault.REFUSE: 0.25, Fault.TWICE: 0.5})
    drawn = [plan.draw(n) for n in range(4000)]
    assert 0.2 < drawn.count(Fault.REFUSE) / 4000 < 0.3
    assert 0.45 < drawn.count(Fault.TWICE) / 4000 < 0.55
    assert FaultPlan(3).draw(0) is None


@pytest.mark.parametrize("rates", [{Fault.EIO: -0.1}, {Fault.EIO: 0.6, Fault.SHORT: 0.6}])
def test_impossible_rates_are_refused(rates: dict[Fault, float]) -> None:
    with pytest.raises(ValueError, match="rates"):
        FaultPlan(rates=rates)
