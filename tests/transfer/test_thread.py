"""The engine for programs without a loop: every verb, from several threads at once."""

import concurrent.futures
import os
import threading
from collections.abc import Callable

import anyio
import pytest
from tests.transfer.gates import (
    BYTES,
    LAYOUT,
    PATIENCE,
    HandDevice,
    gates,
    hand_launch,
    host_engine,
)

from transfer import (
    CompletionLost,
    Copy,
    Engine,
    EngineClosed,
    EngineThread,
    ForkDetected,
    HostDevice,
    HostPool,
    Launch,
    NotPosted,
    OperationCancelled,
    OperationFailed,
    PoolExhausted,
    State,
    SubmitError,
    WouldBlock,
    WrongThread,
)

UVLOOP = pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])


class Caller(threading.Thread):
    """Calls a function on a thread of its own and keeps what came of it."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self.result: object = None
        self._function = function
        self.start()

    def run(self) -> None:
        """Call it."""
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - given to the test's own thread
            self.error = error

    def outcome(self) -> BaseException | None:
        """Wait for its end."""
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.error


@UVLOOP
def test_every_verb(uvloop: bool) -> None:
    with HostPool(LAYOUT, 4) as pool, gates(1) as (gate,):
        with EngineThread(host_engine(), uvloop=uvloop) as thread:
            one = thread.lease(pool)
            two = thread.lease(pool, 2)
            one.handle.view(write=True)[:4] = b"mine"
            op = thread.submit_nowait(Copy(one, two.handle[0]), name="mine")
            thread.wait(op)
            assert bytes(two.handle[0].view()[:4]) == b"mine"
            assert thread.poll([op]) == [op]
            slow = thread.submit_nowait(Launch(gate, writes=[two]), after=op)
            assert gate.entered.wait(PATIENCE)
            assert thread.poll([op, slow]) == [op]
            assert thread.holders() == [slow]
            assert thread.holders(two) == [slow]
            assert thread.holders(one) == []
            thread.cancel(slow)
            assert slow.state is State.ABANDONED
            thread.release(one)
            thread.release(two)
            gate.open()
            with pytest.raises(OperationCancelled):
                thread.wait(slow)
            done = thread.call(thread.engine.statistics).devices["host"]
            assert (done.completed, done.cancelled) == (1, 1)
        assert pool.counts().free == 4


@UVLOOP
def test_it_runs_async_functions(uvloop: bool) -> None:
    async def drive(engine: Engine, pool: HostPool) -> tuple[int, str]:
        with await pool.wait_lease(2) as blocks:
            await engine.copy(blocks[:1], blocks[1:])
        return engine.statistics().devices["host"].completed, threading.current_thread().name

    with HostPool(LAYOUT, 2) as pool, EngineThread(host_engine(), uvloop=uvloop) as thread:
        assert thread.run(drive, thread.engine, pool) == (1, "kvhold-engine-loop")


def test_from_several_threads_at_once() -> None:
    with HostPool(LAYOUT, 64) as pool, EngineThread(host_engine()) as thread:

        def work() -> int:
            for number in range(50):
                src, dst = thread.lease(pool), thread.lease(pool)
                src.handle.view(write=True)[:] = bytes([number]) * BYTES
                op = thread.submit_nowait(Copy(src, dst))
                thread.wait(op)
                assert dst.handle.view()[-1] == number
                thread.release(src)
                thread.release(dst)
            return threading.get_ident()

        callers = [Caller(work) for _ in range(8)]
        assert [caller.outcome() for caller in callers] == [None] * 8
        assert thread.call(thread.engine.statistics).devices["host"].completed == 400
        assert pool.counts().free == 64


def test_errors_come_to_the_calling_thread() -> None:
    def fail() -> None:
        raise OSError(5, "broken")

    device = HandDevice()
    engine = Engine(HostDevice(threads=1), device, in_flight_max=1)
    with HostPool(LAYOUT, 1) as pool, EngineThread(engine) as thread:
        op = thread.submit_nowait(Launch(fail))
        with pytest.raises(OperationFailed, match="broken"):
            thread.wait(op)
        lease = thread.lease(pool)
        with pytest.raises(PoolExhausted):
            thread.lease(pool)
        thread.release(lease)

        def refuse() -> None:
            raise SubmitError("queue full")

        device.on_enqueue = refuse
        with pytest.raises(SubmitError, match="queue full"):
            thread.submit_nowait(hand_launch())
        device.on_enqueue = lambda: None
        first = thread.submit_nowait(hand_launch())
        with pytest.raises(WouldBlock):
            thread.submit_nowait(hand_launch())
        with pytest.raises(NotPosted):
            thread.call(op_order, thread, first)
        device.signal()
        thread.wait(first)


def op_order(thread: EngineThread, op: object) -> None:
    """Order a stream behind an operation whose device cannot."""
    thread.engine.order_before(op, "stream")  # type: ignore[arg-type]


def test_order_is_recorded_in_the_calling_thread() -> None:
    device = HandDevice(ordered=True)
    with EngineThread(Engine(device)) as thread:
        op = thread.submit_nowait(hand_launch(), after="stream")
        # The caller may queue more on its stream from here on, and it will not be waited for.
        assert [stream for stream, _ in device.marks] == ["stream"]
        assert op.state is State.PREPARED
        thread.call(device.completions.post, device.marks[0][1])
        thread.run(op.wait_posted)
        thread.call(device.signal)
        thread.wait(op)


def test_it_is_not_started_or_twice() -> None:
    others = set(threading.enumerate())
    thread = EngineThread(host_engine())
    with pytest.raises(EngineClosed, match="is not started"):
        thread.call(print)
    thread.close()
    with thread, pytest.raises(EngineClosed, match="already started"):
        thread.start()
    for call in (thread.holders, lambda: thread.run(anyio.sleep, 0)):
        with pytest.raises(EngineClosed, match="is not started"):
            call()
    thread.close()
    with thread:
        thread.wait(thread.submit_nowait(Launch(lambda: None)))
    assert not [t for t in threading.enumerate() if t not in others and "kvhold" in t.name]


def test_a_start_that_fails_is_told_and_may_be_retried() -> None:
    device = HandDevice()

    def refuse() -> None:
        raise OSError(11, "no threads")

    device.on_start = refuse
    thread = EngineThread(Engine(device))
    with pytest.raises(OSError, match="no threads"):
        thread.start()
    device.on_start = lambda: None
    with thread:
        thread.call(print)


def test_an_engine_that_another_loop_has_started() -> None:
    engine = host_engine()

    async def main() -> None:
        async with engine:
            with pytest.raises(EngineClosed, match="already started"):
                EngineThread(engine).start()

    anyio.run(main)


@UVLOOP
def test_closing_drains(uvloop: bool) -> None:
    with HostPool(LAYOUT, 2) as pool, gates(1) as (gate,):
        thread = EngineThread(host_engine(), uvloop=uvloop)
        thread.start()
        lease = thread.lease(pool, 2)
        flying = thread.submit_nowait(Launch(gate, writes=[lease.handle[0]]))
        behind = thread.submit_nowait(Launch(lambda: None, reads=[lease]), after=flying)
        waiter = Caller(lambda: thread.wait(behind))
        closers = [Caller(thread.close) for _ in range(3)]
        assert gate.entered.wait(PATIENCE)
        # Until it is drained, leases still come back, and new work is refused.
        refused = None
        while refused is None:
            try:
                thread.submit_nowait(Launch(lambda: None))
            except EngineClosed as error:
                refused = error
        thread.release(lease)
        assert thread.poll([flying, behind]) == []
        gate.open()
        assert [caller.outcome() for caller in (*closers, waiter)] == [None] * 4
        assert [op.state for op in (flying, behind)] == [State.COMPLETED] * 2
        assert pool.counts().free == 2


@UVLOOP
def test_closing_ends_at_the_deadline_though_a_thread_waits(uvloop: bool) -> None:
    with HostPool(LAYOUT, 1) as pool, gates(1) as (gate,):
        engine = host_engine(drain_deadline=0.05)
        thread = EngineThread(engine, uvloop=uvloop)
        thread.start()
        with thread.lease(pool) as block:
            op = thread.submit_nowait(Launch(gate, writes=[block]), name="stuck")
            waiter = Caller(lambda: thread.wait(op))
            assert gate.entered.wait(PATIENCE)
            with pytest.raises(CompletionLost, match="stuck"):
                thread.close()
            assert isinstance(waiter.outcome(), CompletionLost)
            thread.close()
            # The owner of the lease may end it on any thread now.
        assert pool.counts().quarantined == 1
        gate.open()
        engine.close_sync(PATIENCE)
        assert pool.counts().free == 1


def test_what_still_runs_when_it_closes_is_cancelled() -> None:
    thread = EngineThread(host_engine())
    thread.start()
    started = threading.Event()

    async def forever() -> None:
        started.set()
        await anyio.sleep_forever()

    runner = Caller(lambda: thread.run(forever))
    assert started.wait(PATIENCE)
    thread.close()
    assert isinstance(runner.outcome(), concurrent.futures.CancelledError)


def test_calls_that_race_the_close_end() -> None:
    for _ in range(20):
        thread = EngineThread(host_engine())
        thread.start()
        begin = threading.Barrier(4)

        def race(thread: EngineThread = thread, begin: threading.Barrier = begin) -> None:
            begin.wait(PATIENCE)
            while True:
                thread.wait(thread.submit_nowait(Launch(lambda: None)))

        racers = [Caller(race) for _ in range(3)]
        begin.wait(PATIENCE)
        thread.close()
        for racer in racers:
            assert isinstance(racer.outcome(), EngineClosed), racer.error


def test_its_own_thread_must_not_wait_for_itself() -> None:
    with EngineThread(host_engine()) as thread:
        for call in (thread.close, thread.holders, lambda: thread.call(print)):
            with pytest.raises(WrongThread, match=r"on the thread of .* itself"):
                thread.call(call)


def test_a_pool_belongs_to_the_engines_thread() -> None:
    with HostPool(LAYOUT, 2) as pool:
        before = pool.lease()  # nobody's thread yet
        with EngineThread(host_engine()) as thread:
            lease = thread.lease(pool)
            thread.wait(thread.submit_nowait(Copy(before, lease)))
            with pytest.raises(WrongThread, match="belongs to the thread of <engine on host>"):
                pool.lease()
            with pytest.raises(WrongThread):
                lease.release()
            thread.release(lease)
        before.release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_at_once() -> None:
    # case 82 - nobody would ever answer it there
    with EngineThread(host_engine()) as thread:
        thread.call(print)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = []
            for call in (thread.holders, thread.close, lambda: thread.call(print)):
                try:
                    call()
                except ForkDetected:
                    said.append("refused")
            os.write(writer, " ".join(said).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            assert stream.read() == "refused refused refused"
        assert os.waitpid(pid, 0)[1] == 0
        thread.call(print)


def test_an_exit_inside_a_call_is_the_callers() -> None:
    with EngineThread(host_engine()) as thread:
        for error in (SystemExit(3), KeyboardInterrupt()):

            def leave(error: BaseException = error) -> None:
                raise error

            async def leave_later(error: BaseException = error) -> None:
                await anyio.lowlevel.checkpoint()
                raise error

            with pytest.raises(type(error)):
                thread.call(leave)
            with pytest.raises(type(error)):
                thread.run(leave_later)
        thread.wait(thread.submit_nowait(Launch(lambda: None)))
