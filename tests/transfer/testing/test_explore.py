"""explore: all small interleavings of up to 3 operations and 8 events."""

import pytest

from transfer.testing import SCENES, SEEDED_BUGS, Act, InvariantBroken, Plan, explore

CORE = frozenset({Act.SUBMIT, Act.CANCEL, Act.SIGNAL, Act.LOSE})
TWO = (Plan((0,), (1,)), Plan((1,), (0,), (0,)))


@pytest.mark.parametrize(
    ("scene", "waits"),
    [(SCENES[0], False)] + [(scene, waits) for scene in SCENES[1:] for waits in (False, True)],
)
def test_eight_events_of_three_operations(scene: tuple[Plan, ...], waits: bool) -> None:
    found = explore(scene, events=8, device_waits=waits, acts=CORE)
    assert found.interleavings > 10_000
    assert found.settled > 20
    assert found.states < found.steps


@pytest.mark.parametrize("waits", [False, True])
def test_everything_that_can_happen_to_two_operations(waits: bool) -> None:
    found = explore(TWO, events=5, device_waits=waits)
    assert found.interleavings > 5_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("scene", SCENES)
def test_everything_that_can_happen_to_three_operations(
    scene: tuple[Plan, ...], waits: bool
) -> None:
    assert explore(scene, events=6, device_waits=waits).interleavings > 100_000


def test_counts_are_right_where_they_can_be_counted_by_hand() -> None:
    one = (Plan((0,), (1,)),)
    found = explore(one, events=1, acts=frozenset({Act.SUBMIT, Act.REFUSE}))
    assert (found.states, found.steps, found.interleavings) == (3, 2, 2)
    found = explore(one, events=3, acts=frozenset({Act.SUBMIT, Act.CANCEL}))
    assert found.interleavings == 1


@pytest.mark.parametrize(
    "bug",
    [
        "release on cancel",
        "release on LOSE",
        "successor posted before its predecessor",
        "quarantined predecessor's successor completes",
    ],
)
def test_a_bug_of_the_ledger_is_found_with_the_path_to_it(bug: str) -> None:
    waits = bug.startswith("quarantined")
    with SEEDED_BUGS[bug](), pytest.raises(InvariantBroken) as caught:
        explore(SCENES[1], events=7, device_waits=waits, acts=CORE)
    assert caught.value.path
    assert caught.value.broken
