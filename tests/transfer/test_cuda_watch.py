"""Events, fences and threads that see them done."""

import threading

import pytest
from tests.transfer.gpu_kit import FakeDriver, FakeStream

from transfer._cuda_api import CudaError
from transfer._cuda_watch import CudaFence, Mark, Signals, Visits, Watch
from transfer._fence import CompletionQueue


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(manual=True)


def signals_of(driver: FakeDriver, spin: float = float("inf")) -> Signals:
    return Signals(driver, CompletionQueue(), spin=spin)


def fence_on(signals: Signals, stream: FakeStream) -> CudaFence:
    fence = CudaFence()
    fence.event = signals.record(stream)
    signals.open(fence)
    return fence


def test_an_event_is_used_again_only_once_reaped(driver: FakeDriver) -> None:  # case 12
    signals = signals_of(driver)
    fence = fence_on(signals, driver.stream())
    signals.signal(fence)
    assert signals.take_event() is not fence.event  # the loop has not looked yet
    signals.completions.items.clear()
    assert signals.take_event() is fence.event


def test_an_event_of_a_failure_is_never_used_again(driver: FakeDriver) -> None:
    signals = signals_of(driver)
    fence = fence_on(signals, driver.stream())
    signals.signal(fence, ValueError(), keep=False)
    signals.completions.items.clear()
    assert signals.take_event() is not fence.event
    signals.drop_events()
    assert fence.event.dropped


def test_an_event_whose_record_failed_is_destroyed(driver: FakeDriver) -> None:
    signals = signals_of(driver)
    driver.fail("record", 1)
    with pytest.raises(CudaError):
        signals.record(driver.stream())
    assert [event.dropped for event in driver.events] == [True]


def test_a_fence_signals_once(driver: FakeDriver) -> None:
    signals = signals_of(driver)
    fence = fence_on(signals, driver.stream())
    assert signals.knows(fence)
    signals.lose(fence, ValueError("lost"))
    signals.signal(fence)
    signals.signal(fence)
    signals.lose(fence, ValueError("too late"))
    assert [item.lost for item in signals.completions.items] == [True, False]
    assert signals.quiet


def test_a_lost_context_loses_everything_that_is_open(driver: FakeDriver) -> None:  # case 11
    signals = signals_of(driver)
    fences = [fence_on(signals, driver.stream()) for _ in range(3)]
    first, second = CudaError(700, "cuEventQuery"), CudaError(719, "cuEventQuery")
    assert not signals.failed(first)
    assert not signals.failed(second)
    assert signals.poison is first
    items = list(signals.completions.items)
    assert {item.fence for item in items} == set(fences)
    assert all(item.lost and item.poisoned and item.error is first for item in items)
    assert not signals.await_event(fences[0].event)


@pytest.mark.parametrize("spin", [0.0, 1e-3, float("inf")])
def test_a_capture_elsewhere_is_no_loss(driver: FakeDriver, spin: float) -> None:  # case 86
    signals = signals_of(driver, spin)
    fence = fence_on(signals, driver.stream())
    driver.run()
    driver.fail("done", 1, code=900)
    driver.fail("sync", 1, code=906)
    assert signals.await_event(fence.event)
    assert signals.poison is None


def test_a_watch_takes_marks_in_order_and_ends_behind_the_last(driver: FakeDriver) -> None:
    signals = signals_of(driver)
    stream = driver.stream()
    watch = Watch(signals, "watch")
    watch.start()
    reached: list[int] = []
    for number in range(20):
        event = signals.record(stream)
        watch.put(Mark(event, lambda number=number: reached.append(number)))  # type: ignore[misc]
    watch.stop()
    assert not watch.join(0)
    driver.run()
    assert watch.join(10)
    assert reached == list(range(20))


def test_a_watch_that_was_stopped_takes_what_marks_lead_to(driver: FakeDriver) -> None:
    """A long job posts itself on as its marks are reached, behind the word to stop."""
    signals = signals_of(driver)
    stream = driver.stream()
    watch = Watch(signals, "watch")
    reached: list[int] = []

    def follow(number: int) -> None:
        reached.append(number)
        if number < 5:
            watch.put(Mark(signals.record(stream), lambda: follow(number + 1)))
            driver.run()

    watch.put(Mark(signals.record(stream), lambda: follow(0)))
    watch.stop()
    driver.run()
    watch.start()
    assert watch.join(10)
    assert reached == [0, 1, 2, 3, 4, 5]


def test_visits_ask_for_heads_only(driver: FakeDriver) -> None:
    """One stream stands still: the marks behind its head are not asked for, others go on."""
    signals = signals_of(driver)
    still, moving = driver.stream(), driver.stream()
    driver.hold(still)
    visits = Visits(signals, "visits")
    asked: set[int] = set()
    plain = driver.done

    def done(event: object) -> bool:
        asked.add(id(event))
        return plain(event)  # type: ignore[arg-type]

    driver.done = done  # type: ignore[method-assign]
    reached: list[str] = []
    through = threading.Event()
    marks = []
    for number in range(5):
        event = signals.record(still)
        marks.append(event)
        visits.put("still", Mark(event, lambda n=number: reached.append(f"still {n}")))  # type: ignore[misc]
    visits.put("moving", Mark(signals.record(moving), through.set))
    driver.run()
    visits.start()
    assert through.wait(10)
    assert not reached
    assert {id(event) for event in marks} & asked <= {id(marks[0])}
    driver.let_go(still)
    driver.run()
    visits.stop()
    assert visits.join(10)
    assert reached == [f"still {number}" for number in range(5)]


def test_visits_end_with_a_lost_context(driver: FakeDriver) -> None:
    signals = signals_of(driver)
    stream = driver.stream()
    fence = fence_on(signals, stream)
    visits = Visits(signals, "visits")
    visits.put("stream", Mark(fence.event, lambda: signals.signal(fence)))
    visits.stop()
    driver.lose_context()
    visits.start()
    assert visits.join(10)
    assert [item.poisoned for item in signals.completions.items] == [True]
