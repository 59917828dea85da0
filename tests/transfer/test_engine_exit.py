"""How processes end: real signals, no close, a loop that is gone, an operation that hangs.

Each script is a process of its own; what it prints and how it exits is the result.
"""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "src"
SECONDS = 60.0
"""Within which every script ends; an order of magnitude above what any takes."""

HEAD = """
import asyncio, os, signal, sys, threading, warnings
import anyio
from transfer import *

GATE, INSIDE = threading.Event(), threading.Event()

def gated():
    INSIDE.set()
    GATE.wait(30)

BACKEND = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}[sys.argv[1]]
LAYOUT = BlockLayout.raw(4096)
"""


def script(
    text: str, backend: str = "asyncio", flags: tuple[str, ...] = ("-W", "default")
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    program = HEAD + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, *flags, "-c", program, backend],
        env={"PYTHONPATH": str(SOURCE), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])

INTERRUPTED = """
    pool = HostPool(LAYOUT, 2)
    engine = Engine(HostDevice(threads=1))
    early = []
    left = threading.Event()
    strikes = int({strikes})

    def strike():
        INSIDE.wait(30)
        # asyncio's runner has no wake-up descriptor: a signal between its last look and its wait
        # is seen at the next event only, so there is one.
        main = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGINT)
        engine._home.loop.post(int)
        if {in_drain}:
            left.wait(30)
        for _ in range(strikes - 1):
            signal.pthread_kill(main, signal.SIGINT)
        GATE.set()

    def work():
        gated()
        if BLOCK.id in pool.book.free or not pool.book.held[BLOCK.id]:
            early.append(BLOCK.id)

    async def main():
        global BLOCK
        async with engine:
            with pool.lease() as BLOCK:
                try:
                    await engine.run(Launch(work, writes=[BLOCK]))
                finally:
                    left.set()

    threading.Thread(target=strike).start()
    try:
        anyio.run(main, **BACKEND)
    except BaseException as error:
        assert isinstance(error, KeyboardInterrupt) or error.subgroup(KeyboardInterrupt), error
    else:
        print("swallowed")
    engine.close_sync(30)
    print(pool.counts(), early, engine.statistics().devices["host"].in_flight)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("backend", "strikes", "in_drain"),
    [
        ("asyncio", 1, True),
        ("asyncio", 2, True),
        ("asyncio", 3, False),
        ("uvloop", 1, True),
        ("uvloop", 3, True),
        ("trio", 1, True),
        ("trio", 3, True),
    ],
)
def test_ctrl_c(backend: str, strikes: int, in_drain: bool) -> None:
    done = script(INTERRUPTED.format(strikes=strikes, in_drain=in_drain), backend)
    assert done.stdout == "PoolCounts(free=2, leased=0, held=0, quarantined=0) [] 0\n", done.stderr
    assert done.returncode == -signal.SIGINT


UNCLOSED = "ResourceWarning: engine was never closed: leave `async with`, or call aclose()"


@pytest.mark.parametrize(
    ("backend", "hangs"), [("asyncio", False), ("uvloop", True), ("trio", True)]
)
def test_a_script_without_close_ends_and_is_told(backend: str, hangs: bool) -> None:
    # case 79
    done = script(
        f"""
        async def main():
            engine.start()
            await engine.run(Launch(print))
            if {hangs}:
                engine.submit_nowait(Launch(gated))
                INSIDE.wait(30)

        engine = Engine(HostDevice(threads=2), FileDevice(threads=2))
        anyio.run(main, **BACKEND)
        print("end")
        """,
        backend,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\nend\n"
    assert UNCLOSED in done.stderr


def test_a_forgotten_engine_is_named_when_it_is_collected() -> None:
    done = script(
        """
        import gc

        async def main():
            Engine(HostDevice(threads=1)).start()
            await asyncio.sleep(0)

        anyio.run(main, **BACKEND)
        gc.collect()
        print("collected", file=sys.stderr)
        """
    )
    assert done.returncode == 0
    assert done.stderr.index(UNCLOSED) < done.stderr.index("collected")


@BACKENDS
def test_an_exception_ends_the_script(backend: str) -> None:
    # case 79
    done = script(
        """
        async def main():
            async with Engine(HostDevice(threads=1)) as engine:
                op = engine.submit_nowait(Launch(gated))
                threading.Timer(0, GATE.set).start()
                raise ValueError("mine")

        anyio.run(main, **BACKEND)
        """,
        backend,
    )
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "ResourceWarning" not in done.stderr


@BACKENDS
def test_closed_twice(backend: str) -> None:
    # case 79
    done = script(
        """
        engine = Engine(HostDevice(threads=1))

        async def main():
            engine.start()
            await engine.run(Launch(print))
            await engine.aclose()
            await engine.aclose()

        anyio.run(main, **BACKEND)
        engine.close_sync()
        engine.close_sync()
        print("end", threading.active_count())
        """,
        backend,
        ("-W", "error"),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\nend 1\n", "")


@BACKENDS
def test_closed_while_an_operation_hangs(backend: str) -> None:
    # case 79
    done = script(
        """
        async def main():
            async with Engine(HostDevice(threads=1), drain_deadline=0.1) as engine:
                engine.submit_nowait(Launch(threading.Event().wait), name="stuck")

        try:
            anyio.run(main, **BACKEND)
        except CompletionLost as error:
            print(error)
            sys.exit(3)
        """,
        backend,
    )
    assert done.returncode == 3, done.stderr
    assert "stuck, quarantined" in done.stdout
    assert "ResourceWarning" not in done.stderr


LOOP_GONE = """
    pool = HostPool(LAYOUT, 10)
    engine = Engine(HostDevice(threads=10))
    ops = []

    async def main():
        engine.start()
        for _ in range(10):
            with pool.lease() as block:
                ops.append(engine.submit_nowait(Launch(gated, writes=[block])))
        INSIDE.wait(30)

    {how}
    threading.excepthook = lambda args: print("worker died", args)
    print(pool.counts())
    try:
        engine.close_sync(0.05)
    except CompletionLost as error:
        print(len(ops), str(error).split(" whose")[0].split("with ")[1])

    def elsewhere():
        GATE.set()
        engine.close_sync(30)
        engine.close_sync(30)
        pool.close()
        print({{op.state.value for op in ops}}, pool.counts())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    {after}
    print(threading.active_count())
"""

CLOSED = "anyio.run(main, **BACKEND)"
STOPPED = """
    if sys.argv[1] == "uvloop":
        import uvloop as made
    else:
        made = asyncio
    loop = made.new_event_loop()
    loop.run_until_complete(main())
""".strip()


@pytest.mark.parametrize(
    ("backend", "how", "after"),
    [
        pytest.param("asyncio", CLOSED, "", id="asyncio-closed"),
        pytest.param("uvloop", CLOSED, "", id="uvloop-closed"),
        pytest.param("trio", CLOSED, "", id="trio-over"),
        pytest.param("asyncio", STOPPED, "loop.close()", id="asyncio-stopped"),
        pytest.param("uvloop", STOPPED, "loop.close()", id="uvloop-stopped"),
    ],
)
def test_the_loop_is_gone_with_ten_in_flight(backend: str, how: str, after: str) -> None:
    # case 70
    done = script(LOOP_GONE.format(how=how, after=after), backend, ("-W", "error"))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "PoolCounts(free=0, leased=0, held=10, quarantined=0)",
        "10 10 operations",
        "{'failed'} PoolCounts(free=10, leased=0, held=0, quarantined=0)",
        "1",
    ]
    assert done.returncode == 0


def test_what_waited_on_a_loop_that_is_gone_does_not_stop_close_sync() -> None:
    # case 70 - waiters of every kind belong to the dead loop and must not be woken there
    done = script(
        """
        pool = HostPool(LAYOUT, 1)
        engine = Engine(HostDevice(threads=1), in_flight_max=1)
        loop = asyncio.new_event_loop()

        async def main():
            engine.start()
            lease = pool.lease()
            op = engine.submit_nowait(Launch(gated, writes=[lease]))
            block = lease.handle
            lease.release()
            waits = [op.wait(), engine.submit(Launch(gated)), pool.wait_lease(1)]
            waits += [block.wait_unheld(), engine.drain()]
            tasks = [asyncio.ensure_future(wait) for wait in waits]
            for _ in range(5):
                await asyncio.sleep(0)
            return tasks

        tasks = loop.run_until_complete(main())
        for task in tasks:
            task._log_destroy_pending = False
        loop.close()
        GATE.set()
        engine.close_sync(30)
        print(pool.counts(), [task.done() for task in tasks])
        """
    )
    assert done.stdout == (
        "PoolCounts(free=1, leased=0, held=0, quarantined=0) [False, False, False, False, False]\n"
    ), done.stderr
    assert done.returncode == 0


def test_teardown_of_asyncio_run_waits_for_a_forgotten_task() -> None:
    done = script(
        """
        pool = HostPool(LAYOUT, 1)
        engine = Engine(HostDevice(threads=1))
        struck = []

        async def background(started):
            async with engine:
                with pool.lease() as block:
                    started.set()
                    try:
                        await engine.run(Launch(gated, writes=[block]))
                    except asyncio.CancelledError:
                        struck.append(pool.counts().held)
                        threading.Timer(0, GATE.set).start()
                        raise

        async def main():
            started = asyncio.Event()
            global task
            task = asyncio.create_task(background(started))
            await started.wait()
            await asyncio.sleep(0)
            # The end of the program, with an operation in flight.

        asyncio.run(main())
        print(struck, pool.counts(), task.cancelled(), GATE.is_set())
        """,
        flags=("-W", "error"),
    )
    assert done.stdout == ("[1] PoolCounts(free=1, leased=0, held=0, quarantined=0) True True\n"), (
        done.stderr
    )
    assert (done.returncode, done.stderr) == (0, "")
