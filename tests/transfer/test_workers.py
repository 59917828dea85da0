"""Worker threads: who runs what, when an end is posted, when the loop is woken."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.transfer.device_kit import Ends, Gate, started

from transfer import _workers
from transfer._errors import ForkDetected, SubmitError, TransferError
from transfer._fence import CompletionQueue, Fence
from transfer._work import External, Launch
from transfer._workers import Job, Workers
from transfer.host import HostDevice

SOURCE = Path(__file__).parent.parent.parent / "src"


def names(prefix: str) -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(prefix))


def nothing() -> None:
    pass


def brief(part: Callable[[], None]) -> Job:
    return Job(Fence(), Launch(part), (part,), brief=True)


def test_threads_are_named_bounded_daemons_and_exist_only_while_started() -> None:
    device = HostDevice(threads=3, name="named")
    assert names("kvhold-named") == []
    for _ in range(2):  # closed devices can be started again
        with started(device) as ends:
            assert names("kvhold-named") == [f"kvhold-named-{n}" for n in range(3)]
            assert all(t.daemon for t in threading.enumerate() if "kvhold-named" in t.name)
            for _ in range(20):
                device.enqueue(Launch(nothing), ())
            ends.wait(20)
            assert len(names("kvhold-named")) == 3
        assert names("kvhold-named") == []
    device.close()


def test_a_second_start_is_refused() -> None:
    device = HostDevice(threads=1)
    with started(device), pytest.raises(RuntimeError, match="started already"):
        device.start()


def test_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="0 threads, expected at least 1"):
        HostDevice(threads=0)


def test_work_for_a_device_that_is_not_started_is_refused() -> None:
    device = HostDevice(threads=1)
    with pytest.raises(SubmitError, match="not started"):
        device.enqueue(Launch(nothing), ())
    with started(device):
        pass
    with pytest.raises(SubmitError, match="not started"):
        device.enqueue(Launch(nothing), ())
    assert not device.completions.items


def test_a_thread_that_does_not_start_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start
    count = iter(range(10))

    def start(thread: threading.Thread) -> None:
        if next(count) == 2:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    device = HostDevice(threads=4, name="few")
    with pytest.raises(TransferError, match="few: thread 3 of 4 did not start: can't start"):
        device.start()
    assert names("kvhold-few") == []
    with started(device):
        assert len(names("kvhold-few")) == 4


# case 4, a batch that fails part-way ends when everything that was begun is quiet, once.
@pytest.mark.parametrize("failing", range(3))
def test_a_split_job_ends_after_its_last_part_with_the_first_error(failing: int) -> None:
    queue = CompletionQueue()
    workers = Workers("split", 3, queue)
    gates = [Gate() for _ in range(3)]
    errors = [OSError(str(number)) for number in range(3)]

    def part(number: int) -> Callable[[], None]:
        def run() -> None:
            gates[number]()
            if number >= failing:
                raise errors[number]

        return run

    job = Job(Fence(), Launch(nothing), [part(number) for number in range(3)])
    workers.put(job, hands=3)
    for gate in gates:
        gate.wait_entered()
    order = [failing, *(n for n in range(3) if n != failing)]
    for number in order[:2]:
        gates[number].open()
        wait_busy(workers, 2 - order.index(number))
        assert not queue.items
    gates[order[2]].open()
    wait_busy(workers, 0)
    workers.close()
    assert [c.error for c in queue.items] == [errors[failing]]


def wait_busy(workers: Workers, count: int) -> None:
    turn = threading.Event()
    while workers.busy > count:
        turn.wait(0.0001)  # lets other threads run; the loop ends by their progress alone


def test_after_an_error_no_further_part_begins() -> None:
    ran: list[int] = []

    def fail() -> None:
        ran.append(0)
        raise OSError

    job = Job(Fence(), Launch(nothing), [fail, lambda: ran.append(1)])
    assert job.run()
    assert ran == [0]
    assert isinstance(job.error, OSError)


def test_a_job_without_waiting_for_a_late_worker_ends_once() -> None:
    ran: list[int] = []
    job = Job(Fence(), Launch(nothing), [lambda: ran.append(0)])
    assert job.run()
    assert not job.run()
    assert ran == [0]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_a_worker_outlives_whatever_a_part_raises(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("x")

    device = HostDevice(threads=1)
    with started(device) as ends:
        first = device.enqueue(Launch(fail), ())
        second = device.enqueue(Launch(nothing), ())
        one, two = ends.wait(2)
        assert one.fence is first
        assert type(one.error) is kind
        assert not one.lost
        assert two == (second, None, False, False)


# case 12, what an operation uses lives until its end is posted, and not a moment longer.
def test_work_is_referenced_until_its_end_is_posted() -> None:
    class Thing:
        def __init__(self) -> None:
            self.gate = Gate()

        def __call__(self) -> None:
            self.gate()

    device = HostDevice(threads=2)
    with started(device) as ends:
        thing = Thing()
        gate, alive = thing.gate, weakref.ref(thing)
        device.enqueue(Launch(thing), ())
        del thing
        gate.wait_entered()
        assert alive() is not None
        gate.open()
        ends.wait(1)
        device.close()  # joins: both workers are idle
        assert alive() is None


def test_a_completion_is_never_kept_from_the_loop_by_long_work() -> None:
    queue = CompletionQueue()
    rung = threading.Event()
    queue.wake = rung.set
    workers = Workers("long", 1, queue)
    first, last = Gate(), Gate()
    workers.put(brief(first))
    first.wait_entered()
    workers.put(Job(Fence(), Launch(last), (last,)))
    first.open()
    last.wait_entered()
    assert rung.is_set()  # before the long one began
    last.open()
    workers.close()


def rings_of(jobs: int, monkeypatch: pytest.MonkeyPatch, clock: Callable[[], int]) -> int:
    monkeypatch.setattr("transfer._workers.time.monotonic_ns", clock)
    queue = CompletionQueue()
    rings = []

    def wake() -> None:
        rings.append(len(queue.items))
        queue.open()

    queue.wake = wake
    workers = Workers("rings", 1, queue)
    gate = Gate()
    workers.put(brief(gate))
    gate.wait_entered()
    for _ in range(jobs):
        workers.put(brief(nothing))
    gate.open()
    wait_busy(workers, 0)
    workers.close()
    assert len(queue.items) == jobs + 1
    assert rings[-1] == jobs + 1  # the last ring came after the last completion
    return len(rings)


def test_brief_work_that_follows_shares_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rings_of(50, monkeypatch, lambda: 1) == 1


def test_a_wake_up_is_not_put_off_beyond_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10**12, 600_000))
    # Every look at the clock is 0.6 ms later: posted, kept once, rung at the second look.
    assert rings_of(50, monkeypatch, lambda: next(now)) == 26


def test_an_idle_device_makes_no_wake_up() -> None:
    device = HostDevice(threads=4)
    with started(device) as ends:
        for _ in range(8):
            device.enqueue(Launch(nothing), ())
        ends.wait(8)
        assert device._workers is not None
        wait_busy(device._workers, 0)
        threads = [t.native_id for t in threading.enumerate() if t.name.startswith("kvhold-host")]
        assert len(threads) == 4
        window = threading.Event()
        window.wait(0.1)  # each goes to its rest
        before = list(map(switches, threads))
        window.wait(0.3)  # what is measured: nothing happens in it
        assert list(map(switches, threads)) == before


def switches(thread: int | None) -> list[str]:
    status = Path(f"/proc/self/task/{thread}/status").read_text(encoding="utf-8")
    return [line for line in status.splitlines() if "ctxt_switches" in line]


# case 79, closing while an operation hangs does not wait for it.
def test_close_does_not_wait_for_busy_threads_and_their_ends_still_arrive() -> None:
    device = HostDevice(threads=2, name="hung")
    gates = [Gate(), Gate()]
    with started(device) as ends:
        fences = [device.enqueue(Launch(gate), ()) for gate in gates]
        for gate in gates:
            gate.wait_entered()
        fences.append(device.enqueue(Launch(nothing), ()))  # queued behind both
        device.close()
        assert not ends.look()
        device.start()  # fresh threads; they do not wait for the old ones
        assert len(names("kvhold-hung")) == 4
        fences.append(device.enqueue(Launch(nothing), ()))
        assert ends.wait(1)[0].fence is fences[3]
        for gate in gates:
            gate.open()
        assert {c.fence for c in ends.wait(4)} == set(fences)


# case 74, the host program's default thread pool is not used.
def test_the_default_executor_is_free_while_every_worker_is_blocked() -> None:
    device = HostDevice(threads=2)
    gates = [Gate() for _ in range(6)]
    with started(device) as ends:
        for gate in gates:
            device.enqueue(Launch(gate), ())
        gates[0].wait_entered()

        async def main() -> int:
            return await asyncio.wait_for(asyncio.to_thread(lambda: 7), 30)

        assert asyncio.run(main()) == 7
        for gate in gates:
            gate.open()
        ends.wait(6)


# case 82, threads do not survive a fork; that is detected and refused.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_work_in_a_forked_child_is_refused() -> None:
    device = HostDevice(threads=2)
    with started(device) as ends:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                device.enqueue(Launch(nothing), ())
            except ForkDetected as error:
                device.close()
                code = 0 if "spawn" in str(error) and not device.completions.items else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        device.enqueue(Launch(nothing), ())
        ends.wait(1)


# case 79, a program that forgets to close ends all the same.
@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "raise ValueError"])
def test_a_program_ends_with_work_hanging_on_a_worker(end: str) -> None:
    script = f"""
        import threading
        from transfer._work import Launch
        from transfer.host import HostDevice

        device = HostDevice(threads=2)
        device.start()
        inside = threading.Event()
        def hang():
            inside.set()
            threading.Event().wait()
        device.enqueue(Launch(hang), ())
        inside.wait()
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        timeout=60,
        check=False,
        capture_output=True,
        env={"PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == {"pass": 0, "raise SystemExit(3)": 3, "raise ValueError": 1}[end]


def test_finishing_what_is_not_there_is_refused() -> None:
    device = HostDevice(threads=1)
    fence = Fence()
    with pytest.raises(TypeError, match="no External work"):
        _workers.WorkerDevice.finish(device, fence, None)
    assert not device.completions.items


def test_external_work_occupies_no_worker() -> None:
    device = HostDevice(threads=1)
    with started(device) as ends:
        fence = device.enqueue(External(), ())
        other = device.enqueue(Launch(nothing), ())
        assert [c.fence for c in ends.wait(1)] == [other]
        device.finish(fence, None)
        assert [c.fence for c in ends.wait(2)] == [other, fence]


def test_ends_are_collected_by_wake_ups_only() -> None:
    device = HostDevice(threads=1)
    ends = Ends(device)
    device.completions.post(Fence(), wake=False)
    assert ends.rings == 0
    device.completions.ring()
    assert len(ends.wait(1)) == 1
