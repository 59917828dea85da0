import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait

import pytest

from tiers import _team
from tiers._team import Team, Workspace


def test_results_come_in_order_and_the_caller_works_too() -> None:
    with Team(3) as team:
        assert team.run([lambda i=i: i * i for i in range(7)]) == [i * i for i in range(7)]  # type: ignore[misc]
        assert threading.get_ident() in team.run([threading.get_ident] * 4)
        assert team.run([]) == []


def test_run_returns_only_when_every_thread_has() -> None:
    gate, ended = threading.Event(), []

    def late() -> None:
        gate.wait()
        ended.append(1)

    def fails() -> None:
        threading.Timer(0.05, gate.set).start()
        raise ValueError("the caller's task")

    with Team(2) as team:
        with pytest.raises(ValueError, match="the caller's"):
            team.run([fails, late])
        assert ended == [1]


def test_a_helpers_error_reaches_the_caller() -> None:
    def fails() -> None:
        raise ValueError("a helper's task")

    with Team(2) as team, pytest.raises(ValueError, match="a helper's"):
        team.run([lambda: None, fails])


def test_a_team_of_one_starts_no_thread() -> None:
    before = threading.active_count()
    assert Team().run([threading.get_ident] * 3) == [threading.get_ident()] * 3
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="at least 1"):
        Team(0)


def test_workspaces_are_kept_and_never_shared() -> None:
    class Room:
        pass

    team = Team()
    with team.workspace() as first:
        room = first.of(Room)
        assert first.of(Room) is room
        with team.workspace() as second:
            assert second is not first
            assert second.of(Room) is not room
    with team.workspace() as again:
        assert isinstance(again, Workspace)
        assert again.of(Room) in {room, second.of(Room)}


def test_an_interrupt_while_waiting_does_not_leave_work_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, ended = threading.Event(), []

    def late() -> None:
        gate.wait()
        ended.append(1)

    def interrupted(futures: Sequence[Future[None]]) -> object:
        if not gate.is_set():
            gate.set()
            raise KeyboardInterrupt
        return wait(futures)

    monkeypatch.setattr(_team, "wait", interrupted)
    with Team(2) as team:
        with pytest.raises(KeyboardInterrupt):
            team.run([lambda: None, late])
        assert ended == [1]


def test_workspaces_are_taken_by_many_threads_at_once() -> None:
    team = Team()
    taken: set[int] = set()
    doubles: list[int] = []

    def work() -> None:
        for _ in range(300):
            with team.workspace() as space:
                if id(space) in taken:
                    doubles.append(1)
                taken.add(id(space))
                taken.remove(id(space))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert doubles == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_helpers_of_its_own() -> None:
    with Team(2) as team:
        team.run([os.getpid] * 2)
        child = os.fork()
        if child == 0:
            os._exit(0 if team.run([os.getpid] * 2) == [os.getpid()] * 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
