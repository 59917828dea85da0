"""From the end of a copy to the coroutine."""

import threading
from contextlib import nullcontext

import anyio
import pytest
import torch
from tests.kvhold.bench.fake_gpu import LAYOUT, stand_in

from kvhold.bench import gpu_latency, gpu_rig
from transfer import Copy
from transfer.cuda import Pace, Way


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


def test_copies_beside_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies are in flight as long as the products run; all of them have ended at the end."""
    settings = stand_in(monkeypatch, gpu_latency)
    asked: list[int] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.left = 3
            assert enable_timing

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            self.left -= 1
            asked.append(self.left)
            return self.left < 0

        def elapsed_time(self, _other: object) -> float:
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    for name, value in (("GPU", "cpu"), ("SIDE", 8), ("MANY", 2)):
        monkeypatch.setattr(gpu_latency, name, value)
    trials = (("as ever", {"pace": Pace()}), ("batch", {"ways": (Way.BATCH,)}))
    monkeypatch.setattr(gpu_latency, "GEMM_TRIALS", trials)
    found = gpu_latency.gemm(True, settings)
    assert [(row["trial"], row["direction"]) for row in found["rows"]] == [
        ("as ever", "out"),
        ("as ever", "in"),
        ("batch", "out"),
        ("batch", "in"),
    ]
    for row in found["rows"]:
        assert row["alone"] == row["with"] == 3.0
        assert row["slower"] == 0
        assert row["rate"] > 0
    assert len(asked) == 4 * 4 * 4  # rows, rounds, looks
