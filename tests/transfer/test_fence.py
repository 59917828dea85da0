"""Completions on their way to the loop: kept always, one wake-up for many, none lost."""

import threading

from transfer._fence import Completion, CompletionQueue, Fence


def test_a_fence_is_matched_by_identity() -> None:
    assert Fence() != Fence()
    fence = Fence()
    assert Completion(fence) == Completion(fence, None, lost=False, poisoned=False)


def test_completions_are_only_kept_while_nobody_can_be_woken() -> None:
    queue = CompletionQueue()
    fence, error = Fence(), OSError("device")
    queue.post(fence)
    queue.post(fence, error, lost=True, poisoned=True)
    assert list(queue.items) == [Completion(fence), Completion(fence, error, True, True)]
    rung: list[None] = []
    queue.wake = lambda: rung.append(None)
    queue.ring()
    assert len(rung) == 1


def test_many_completions_wake_once_until_somebody_looks() -> None:
    queue = CompletionQueue()
    rung: list[int] = []
    queue.wake = lambda: rung.append(len(queue.items))
    queue.post(Fence(), wake=False)
    assert rung == []
    for _ in range(3):
        queue.post(Fence())
    assert rung == [2]
    queue.open()
    queue.post(Fence())
    assert rung == [2, 5]


def test_what_arrives_during_a_look_wakes_again() -> None:
    # The looker opens first and looks then: what it does not see has rung after the opening.
    queue = CompletionQueue()
    rung: list[None] = []
    queue.wake = lambda: rung.append(None)
    queue.post(Fence())
    queue.open()
    queue.items.popleft()
    queue.post(Fence())
    assert len(rung) == 2


def test_no_completion_of_any_thread_is_lost() -> None:
    queue = CompletionQueue()
    rung = threading.Semaphore(0)
    queue.wake = rung.release
    workers, each = 4, 500

    def work() -> None:
        for _ in range(each):
            queue.post(Fence())

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    seen = 0
    while seen < workers * each:
        assert rung.acquire(timeout=60)
        queue.open()
        while queue.items:
            queue.items.popleft()
            seen += 1
    for thread in threads:
        thread.join()
    assert not queue.items
