"""Ctrl-C at every line: what an interrupt leaves behind is owned for too long, never too short.

A trace function raises KeyboardInterrupt at the Nth line that runs inside the pure floors, for
N = 1, 2, … until a whole scenario passes without one. After each, the device is asked what it
really has, and the pools are asked what they would give out.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from tests.transfer.kit import Rig

from transfer._errors import LeaseError, SubmitError, TransferError
from transfer._state import State

if TYPE_CHECKING:
    from transfer._handle import Block, Blocks, Lease
    from transfer._operation import Operation

Step: TypeAlias = Callable[[], object]

SWEPT = tuple(
    f"/transfer/_{name}.py"
    for name in ("ledger", "book", "boundary", "operation", "order", "lane", "memory", "handle")
)


class Interrupter:
    """Raises KeyboardInterrupt at the Nth line of the swept files, once.

    Args:
        nth: counted from 1.
    """

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.struck: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        # Not `enqueue` of a test's device, and not a generator's clean-up, which swallows nothing.
        return self.line if code.co_filename.endswith(SWEPT) else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and self.struck is None:
            self.left -= 1
            if self.left == 0:
                self.struck = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.line

    def run(self, step: Step) -> bool:
        """Run a step; whether it was struck."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            step()
        except KeyboardInterrupt:
            return True
        except SubmitError:
            return False
        finally:
            sys.settrace(before)
        return False


class Scene:
    """A rig, every operation that its ledger ever made, and the steps to be struck.

    Args:
        streams: successors are posted behind their predecessors.
    """

    def __init__(self, *, streams: bool) -> None:
        self.rig = Rig(blocks=24, devices=2, streams=streams)
        self.leases: list[Lease[Block] | Lease[Blocks]] = [
            self.rig.pool.lease(),
            self.rig.pool.lease(2),
            self.rig.pool.lease(12),
        ]
        self.ops: list[Operation] = []
        self.steps: list[Step] = []
        # What a caller does once more when it was interrupted.
        self.again: list[Step] = []

    def submit(self, *, block: int, after: tuple[int, ...] = ()) -> None:
        """Submit a writer of a lease, as the engine does."""

        def step() -> None:
            rig = self.rig
            handle = self.leases[block].handle
            preds = [self.ops[number] for number in after if number < len(self.ops)]
            op = rig.prepare(writes=[handle], after=preds)
            self.ops.append(op)
            rig.ledger.start(op)

        self.steps.append(step)

    def signal(self, number: int, *, lost: bool = False, error: OSError | None = None) -> None:
        """The device ends an operation; the completion stays at the head until it was taken."""

        def step() -> None:
            op = self.ops[number]
            if op.fence is not None:
                self.rig.device.completions.post(op.fence, error, lost=lost)
                if not lost:
                    self.rig.device.posted.pop(op.fence, None)
            self.rig.reap()

        self.steps.append(step)

    def cancel(self, number: int) -> None:
        def step() -> None:
            self.rig.ledger.cancel(self.ops[number])

        self.steps.append(step)
        self.again.append(step)

    def release(self, number: int) -> None:
        step = self.leases[number].release
        self.steps.append(step)
        self.again.append(step)

    def refuse(self) -> None:
        self.steps.append(lambda: setattr(self.rig.device, "mood", SubmitError("full")))

    # What must hold at any moment, however badly a step was cut short

    def device_has(self) -> set[int]:
        """Blocks that a device may touch now: what it was given and has not ended."""
        return {
            int(i)
            for device in self.rig.devices
            for work in device.posted.values()
            for handle in (*work.reads, *work.writes)
            for i in handle.ids
        }

    def check(self) -> None:
        pool = self.rig.pool
        busy = self.device_has()
        assert not busy & set(pool.book.free)
        assert len(set(pool.book.free)) == len(pool.book.free)
        assert all(pool.book.held[i] > 0 for i in busy)
        assert all(not pool.book.leased[i] and not pool.book.held[i] for i in pool.book.free)
        assert sum(pool.counts()) == pool.blocks
        works = [work for device in self.rig.devices for work in device.posted.values()]
        for op in (*self.ops, *self.rig.lane.live):
            posted = any(op.work is work for work in works)
            assert not (posted and op.state is State.PREPARED), op
            assert not (posted and op.settled), op
            assert not (op.posted and op.state is State.PREPARED), op
        # The proof that matters: whatever can be leased now is touched by nobody.
        taken = [pool.lease() for _ in range(len(pool.book.free))]
        assert not busy & {lease.handle.id for lease in taken}
        for lease in taken:
            lease.release()

    def mend(self) -> None:
        """What an engine does after an interrupt and at its end; none of it may hurt."""
        ledger = self.rig.ledger
        for _ in range(2):
            self.rig.reap()
            ledger.advance()
            self.check()
        for device in self.rig.devices:
            while device.posted:
                fence = next(iter(device.posted))
                device.posted.pop(fence)
                device.completions.post(fence)
                self.rig.reap()
                self.check()
        for op in list(self.rig.lane.live):
            ledger.cancel(op)
            ledger.lose(op, TimeoutError("deadline"))
            self.check()


def life(scene: Scene) -> None:
    scene.submit(block=0)
    scene.release(0)
    scene.signal(0)


def batches(scene: Scene) -> None:
    scene.submit(block=2)
    scene.submit(block=1)
    scene.release(2)
    scene.signal(0)
    scene.release(1)
    scene.signal(1)


def released(scene: Scene) -> None:
    scene.submit(block=0)
    scene.signal(0)
    for number in range(3):
        scene.release(number)


def chain(scene: Scene) -> None:
    scene.submit(block=0)
    scene.submit(block=0, after=(0,))
    scene.submit(block=0, after=(1,))
    scene.release(0)
    scene.signal(0)
    scene.signal(1)
    scene.signal(2)


def parked(scene: Scene) -> None:
    scene.submit(block=0)
    scene.submit(block=1, after=(0,))
    scene.submit(block=1, after=(0, 1))
    scene.release(1)
    scene.signal(1)
    scene.signal(0)


def failing(scene: Scene) -> None:
    scene.submit(block=0)
    scene.submit(block=1, after=(0,))
    scene.release(0)
    scene.signal(0, error=OSError("broken"))


def cancelled(scene: Scene) -> None:
    scene.submit(block=0)
    scene.submit(block=0, after=(0,))
    scene.submit(block=0, after=(1,))
    scene.cancel(1)
    scene.cancel(0)
    scene.release(0)
    scene.signal(0)


def lost(scene: Scene) -> None:
    scene.submit(block=0)
    scene.submit(block=0, after=(0,))
    scene.submit(block=2)
    scene.release(0)
    scene.signal(0, lost=True)
    scene.signal(2, lost=True)
    scene.release(2)
    scene.signal(0)
    scene.signal(2)


def refused(scene: Scene) -> None:
    scene.submit(block=0)
    scene.refuse()
    scene.submit(block=0, after=(0,))
    scene.release(0)
    scene.signal(0)


SCENES = [life, released, batches, chain, parked, failing, cancelled, lost, refused]


def play(write: Callable[[Scene], None], nth: int, *, streams: bool) -> tuple[Scene, str | None]:
    """Play a scene, struck at the Nth line; later steps that lost their ground are left out."""
    scene = Scene(streams=streams)
    write(scene)
    interrupter = Interrupter(nth)
    for step in scene.steps:
        try:
            struck = interrupter.run(step)
        except IndexError:  # an operation that its interrupted submit never handed out
            continue
        except (LeaseError, TransferError):
            if interrupter.struck is None:
                raise
            continue  # a hold that leaked conflicts, a second release is refused: no early reuse
        scene.check()
        if struck:
            scene.rig.reap()
            scene.check()
            if step in scene.again:
                with suppress(LeaseError):
                    step()
                scene.check()
    return scene, interrupter.struck


@pytest.mark.parametrize("streams", [False, True], ids=["waits", "posts behind"])
@pytest.mark.parametrize("write", SCENES, ids=lambda write: write.__name__)
def test_an_interrupt_at_any_line_frees_nothing_early(
    write: Callable[[Scene], None], streams: bool
) -> None:
    places = []
    for nth in range(1, 5000):
        scene, struck = play(write, nth, streams=streams)
        try:
            scene.mend()
        except BaseException:
            print(f"struck at {struck}, line event {nth}")
            raise
        if struck is None:
            break
        places.append(struck)
    else:
        pytest.fail("the sweep has no end")
    assert len(places) > 50
    # Untouched, the scene ends with everything back.
    assert scene.rig.lane.live == {}
    assert scene.rig.pool.counts().held == 0


def test_an_interrupt_while_a_step_settles_is_finished_by_its_completion() -> None:
    """Not just safe: where the completion is seen again, nothing leaks that was not lost before."""
    leaked = []
    for nth in range(1, 5000):
        scene = Scene(streams=True)
        chain(scene)
        steps = iter(scene.steps)
        for _ in range(4):
            next(steps)()
        interrupter = Interrupter(nth)
        interrupter.run(next(steps))
        for _ in range(2):
            scene.rig.reap()
        for step in steps:
            step()
        scene.rig.ledger.advance()
        if interrupter.struck is None:
            break
        if any(not op.settled for op in scene.ops):
            leaked.append(interrupter.struck)
    assert nth > 50
    assert leaked == []
