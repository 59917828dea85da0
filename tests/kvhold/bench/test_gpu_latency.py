"""From the end of a copy to the coroutine."""

import threading

import anyio
import pytest
from tests.kvhold.bench.fake_gpu import LAYOUT, stand_in

from kvhold.bench import gpu_latency, gpu_rig
from transfer import Copy


def test_a_thread_that_wakes_is_counted() -> None:
    go, done = threading.Event(), threading.Event()

    def wake_once() -> None:
        go.wait()
        done.set()

    thread = threading.Thread(target=wake_once)
    before = gpu_latency.switches()
    thread.start()
    go.set()
    assert done.wait(10)
    thread.join()
    assert before > 0
    assert gpu_latency.switches() > 0


def test_figures_of_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = stand_in(monkeypatch, gpu_latency)
    gpu, host = gpu_rig.page_pools(LAYOUT, 2, 2)
    work = Copy(gpu.lease().handle, host.lease().handle)
    row = anyio.run(gpu_latency._wait_for, settings, work, 0.0, 20)
    assert row["call"] >= row["posted"] > 0
    assert row["p99"] >= row["call"]
    assert row["loop_cpu"] > 0
    assert row["process_cpu"] >= row["loop_cpu"] * 0.5
