"""check_device: every device of ours passes, and every broken promise is seen."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from transfer import (
    BlockLayout,
    Copy,
    FileDevice,
    FileRead,
    FileWrite,
    HostDevice,
    HostPool,
    Launch,
    Pool,
)
from transfer._fence import CompletionQueue, Fence
from transfer._work import Work
from transfer.testing import (
    DeviceFault,
    FaultPlan,
    FaultyDevice,
    SimDevice,
    SimPool,
    Subject,
    check_device,
    peek,
    poke,
)

SIZE = 8192
COUNT = 70


def fail() -> None:
    raise ValueError("as asked")


class Copies:
    """Copies between the blocks of one pool, each pair once."""

    def __init__(self, pool: Pool) -> None:
        self.blocks = pool.lease(2 * COUNT).handle
        for number in range(COUNT):
            for plane in range(len(pool.layout.plane_bytes)):
                poke(self.blocks[number], bytes([number + 1]) * SIZE, plane=plane)

    def work(self, number: int) -> Work:
        return Copy(self.blocks[number], self.blocks[COUNT + number])

    def done(self, number: int) -> bool:
        return peek(self.blocks[COUNT + number]) == bytes([number + 1]) * SIZE


def host_subject(*, inline: int = 1 << 14, split: int = 1 << 20) -> Subject:
    copies = Copies(HostPool(BlockLayout.raw(SIZE), 2 * COUNT))
    nothing = HostPool(BlockLayout.raw(0), 2)
    pair = nothing.lease(2).handle
    return Subject(
        lambda: HostDevice(threads=2, inline_bytes_max=inline, split_bytes=split),
        copies.work,
        copies.done,
        failing=lambda: Launch(fail),
        empty=lambda: Copy(pair[0], pair[1]),
        wrong=lambda: Launch(fail, on="cuda:0"),
    )


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_host_device(inline: int) -> None:
    ran = check_device(host_subject(inline=inline))
    assert len(ran) == 12
    assert "names and ends its threads" in ran


def test_host_device_that_splits() -> None:
    assert len(check_device(host_subject(inline=0, split=1024))) == 12


@pytest.mark.parametrize("kind", ["host", "sim:0"])
def test_sim_device(kind: str) -> None:
    copies = Copies(SimPool(BlockLayout.raw(SIZE), 2 * COUNT, kind=kind))
    nothing = SimPool(BlockLayout.raw(0), 2, kind=kind).lease(2).handle
    made: list[SimDevice] = []

    def make() -> SimDevice:
        made.append(SimDevice(kind=kind, chunk=(4096, 8192)))
        return made[-1]

    ran = check_device(
        Subject(
            make,
            copies.work,
            copies.done,
            failing=lambda: Launch(lambda *_: fail(), on=kind),
            empty=lambda: Copy(nothing[0], nothing[1]),
            wrong=lambda: Launch(fail, on="cuda:0"),
            pump=lambda _: made[-1].step(),
            threads=False,
        )
    )
    assert len(ran) == 12
    assert "waits for what it says it can" in ran


@pytest.mark.parametrize("direct", [None, False])
def test_file_device(tmp_path: Path, direct: bool | None) -> None:
    pool = HostPool(BlockLayout.raw(SIZE), COUNT)
    blocks = pool.lease(COUNT).handle
    for number in range(COUNT):
        poke(blocks[number], bytes([number + 1]) * SIZE)
    made: dict[int, int] = {}

    def path(number: int) -> Path:
        return tmp_path / f"{number}-{made[number]}"

    def work(number: int) -> Work:
        made[number] = made.get(number, 0) + 1
        return FileWrite(path(number), blocks[number])

    ran = check_device(
        Subject(
            lambda: FileDevice(threads=2, direct=direct),
            work,
            lambda n: path(n).exists() and path(n).read_bytes() == bytes([n + 1]) * SIZE,
            failing=lambda: FileRead(tmp_path / "missing", blocks[0]),
            empty=lambda: FileRead(tmp_path / "missing", blocks[0].span(0, 0)),
            wrong=lambda: Launch(fail),
        )
    )
    assert len(ran) == 12


def test_a_wrapped_device_is_a_device() -> None:
    subject = host_subject(inline=0)

    def make() -> FaultyDevice:
        return FaultyDevice(subject.make(), FaultPlan())

    wrapped = Subject(
        make, subject.work, subject.done, pump=lambda device: device.completions.open()
    )
    assert "signals each fence once when it is done" in check_device(wrapped)


class Lying:
    """A device that works at once, and breaks one promise."""

    name = "lying"
    ordered = False

    def __init__(self, lie: str) -> None:
        self.lie = lie
        self.routes = HostDevice.routes
        self.completions = CompletionQueue()
        self.inner = HostDevice(threads=1, inline_bytes_max=1 << 20)
        self.inner.completions = self.completions
        self.fence = Fence()

    def start(self) -> None:
        self.inner.start()

    def close(self) -> None:
        self.inner.close()

    def check(self, work: Work) -> None:
        if self.lie != "checks nothing":
            self.inner.check(work)

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        if self.lie == "always open":
            self.inner._workers = self.inner._workers or HostDevice(threads=1)._workers
            fence = Fence()
            self.completions.post(fence)
            return fence
        if self.lie == "signals without work":
            self.inner.ready()
            fence = Fence()
            self.completions.post(fence)
            return fence
        fence = self.inner.enqueue(work, waits)
        if self.lie == "signals twice":
            self.completions.post(fence)
        if self.lie == "one fence":
            return self.fence
        if self.lie == "swallows errors" and isinstance(work, Launch):
            self.completions.post(fence)
        return fence

    def can_wait(self, fence: Fence) -> bool:
        return self.lie == "waits for anything"

    def owns_stream(self, stream: object) -> bool:
        return self.lie == "owns anything"

    def stream_key(self, stream: object) -> None:
        return None

    def record(self, stream: object) -> Fence:
        return Fence()

    def join(self, stream: object, fence: Fence) -> None:
        return None

    def finish(self, fence: Fence, stream: object | None) -> None:
        return None


@pytest.mark.parametrize(
    "lie",
    [
        "checks nothing",
        "always open",
        "signals without work",
        "signals twice",
        "one fence",
        "swallows errors",
        "waits for anything",
        "owns anything",
    ],
)
def test_a_broken_promise_is_seen(lie: str) -> None:
    good = host_subject()
    subject = Subject(lambda: Lying(lie), good.work, good.done, good.failing, wrong=good.wrong)
    with pytest.raises(DeviceFault, match="lying"):
        check_device(subject)
