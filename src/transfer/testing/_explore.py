"""explore: every small interleaving of the ledger and a device, with the books checked after each.

A scene is a few operations on a few blocks with the order between them. What can happen next is
decided by what has happened: an operation can be submitted, refused, posted with or without a
fence, cancelled, signaled, signaled again, reported lost, proven quiet; a lease can be released.
Every sequence of such events up to a length is covered; sequences that lead to the same state are
followed once and counted as many times as there are.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple, final

from transfer._device import PlainDevice
from transfer._errors import CompletionLost, LeaseError, SubmitError, TransferError
from transfer._extent import BlockLayout
from transfer._fence import Completion, CompletionQueue, Fence
from transfer._lane import Lane
from transfer._ledger import Ledger
from transfer._state import SETTLED, State
from transfer._work import Copy, Launch
from transfer.testing._invariants import broken_invariants
from transfer.testing._memory import SimPool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from transfer._device import Device
    from transfer._handle import Block, Lease
    from transfer._operation import Operation
    from transfer._work import Route, Work


class Act(enum.Enum):
    """What can happen to one operation of a scene."""

    SUBMIT = "submit"
    REFUSE = "submit, refused"
    UNFENCED = "submit, posted without a fence"
    INTERRUPT = "submit, interrupted"
    CANCEL = "cancel"
    SIGNAL = "signal"
    FAIL = "signal an error"
    LOSE = "report lost"
    POISON = "report the context lost"
    RELEASE = "release the lease"

    __hash__ = object.__hash__


class Step(NamedTuple):
    """One event of a sequence."""

    act: Act
    which: int


class Plan(NamedTuple):
    """One operation of a scene.

    Attributes:
        reads: blocks by number.
        writes: blocks by number.
        after: operations by number.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[int, ...] = ()


class Exploration(NamedTuple):
    """What was covered.

    Attributes:
        states: different states that were reached.
        steps: different events from them.
        interleavings: sequences of the full length, or shorter ones that nothing can follow.
        settled: states in which every operation had ended.
    """

    states: int
    steps: int
    interleavings: int
    settled: int


class InvariantBroken(AssertionError):
    """Something does not hold; `path` leads there.

    Attributes:
        path: the events, in order.
        broken: what does not hold.
    """

    def __init__(self, path: Sequence[Step], broken: Sequence[str]) -> None:
        super().__init__(f"{'; '.join(broken)} after {list(path)}")
        self.path = list(path)
        self.broken = list(broken)


SCENES: Final[tuple[tuple[Plan, ...], ...]] = (
    (Plan((0,), (1,)), Plan((0,), (2,)), Plan((0,), (3,))),
    (Plan((0,), (1,)), Plan((1,), (2,), (0,)), Plan((2,), (3,), (1,))),
    (Plan((0,), (1,)), Plan((2,), (1,), (0,)), Plan((1,), (3,), (1,))),
    (Plan((0,), (1,)), Plan((1,), (2,), (0,)), Plan((1,), (3,), (0,))),
    (Plan((), (0, 1)), Plan((0,), (2,), (0,)), Plan((3,), (1,), (0, 1))),
)
"""Independent readers, a chain, two writers and a reader, a fork, a join."""


@final
class _Device(PlainDevice):
    """A device that meets each piece of work as its submission said."""

    routes: frozenset[Route] = frozenset()
    name = "explored"

    def __init__(self, *, waits: bool) -> None:
        self.completions = CompletionQueue()
        self.outcomes: dict[int, Act] = {}
        self._waits = waits

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to stop."""

    def check(self, work: Work) -> None:
        """Anything goes."""

    def enqueue(self, work: Work, waits: Sequence[Fence]) -> Fence:
        """Post, refuse or lose."""
        del waits
        outcome = self.outcomes[id(work)]
        if outcome is Act.REFUSE:
            raise SubmitError("refused")
        if outcome is Act.UNFENCED:
            raise CompletionLost("no fence")
        if outcome is Act.INTERRUPT:
            raise KeyboardInterrupt
        return Fence()

    def can_wait(self, fence: Fence) -> bool:
        """As the scene says."""
        del fence
        return self._waits

    def finish(self, fence: Fence, stream: object | None) -> None:
        """There is no external work."""


class _Driver:
    """Nobody waits for the operations of a scene."""

    def cancel(self, op: Operation) -> None: ...
    async def wait(self, op: Operation) -> None: ...
    async def wait_posted(self, op: Operation) -> None: ...
    def order_before(self, op: Operation, stream: object) -> None: ...
    def finish(self, op: Operation, stream: object | None) -> None: ...


@final
class _Scene:
    """A ledger and a pool in the state that a sequence of events leads to."""

    def __init__(self, plans: Sequence[Plan], *, waits: bool) -> None:
        self.plans = plans
        self.pool = SimPool(BlockLayout.raw(1), 4, kind="host")
        self.leases: list[Lease[Block]] = [self.pool.lease() for _ in range(4)]
        self.blocks = [lease.handle for lease in self.leases]
        self.device = _Device(waits=waits)
        device: Device = self.device
        self.lane = Lane(device)
        self.ledger = Ledger(_Driver())
        self.ops: dict[int, Operation] = {}
        self.fences: dict[int, Fence] = {}
        self.signaled: set[int] = set()
        self.outcomes: dict[int, Act] = {}
        self.works: list[Work] = []  # kept, since the device knows them by identity

    def able(self) -> Iterator[Step]:
        """What can happen next."""
        for which, plan in enumerate(self.plans):
            op = self.ops.get(which)
            if op is None:
                if all(earlier in self.ops for earlier in plan.after):
                    for act in (Act.SUBMIT, Act.REFUSE, Act.UNFENCED, Act.INTERRUPT):
                        yield Step(act, which)
                continue
            yield Step(Act.CANCEL, which)
            if which in self.fences:
                yield Step(Act.SIGNAL, which)
                if which not in self.signaled:
                    yield Step(Act.FAIL, which)
                    yield Step(Act.LOSE, which)
                    yield Step(Act.POISON, which)
        for which, lease in enumerate(self.leases[:2]):
            if not lease.released:
                yield Step(Act.RELEASE, which)

    def note(self) -> None:
        """Keep every fence that was ever given: a device may signal it again at any time."""
        for which, op in self.ops.items():
            if op.fence is not None:
                self.fences.setdefault(which, op.fence)

    def do(self, step: Step) -> None:
        """Let one event happen; only what a caller or device may raise is expected."""
        act, which = step
        if act in (Act.SUBMIT, Act.REFUSE, Act.UNFENCED, Act.INTERRUPT):
            self._submit(act, which)
        elif act is Act.CANCEL:
            _patiently(lambda: self.ledger.cancel(self.ops[which]))
        elif act is Act.RELEASE:
            self.leases[which].release()
        else:
            if act in (Act.SIGNAL, Act.FAIL):
                self.signaled.add(which)
            error = RuntimeError("device") if act is not Act.SIGNAL else None
            lost = act in (Act.LOSE, Act.POISON)
            done = Completion(self.fences[which], error, lost, act is Act.POISON)
            _patiently(lambda: self.ledger.complete(done))

    def _submit(self, act: Act, which: int) -> None:
        plan = self.plans[which]
        work = self._work(plan)
        self.works.append(work)
        self.device.outcomes[id(work)] = act
        after = [self.ops[earlier] for earlier in plan.after]
        try:
            op = self.ledger.prepare(work, self.lane, after, name=str(which))
        except LeaseError:
            return  # a lease was released, or an earlier loss stands in the way: nothing was taken
        self.ops[which] = op
        self.outcomes[which] = act
        try:
            self.ledger.start(op)
        except (TransferError, KeyboardInterrupt):
            _patiently(self.ledger.advance)

    def _work(self, plan: Plan) -> Work:
        reads = [self.blocks[i] for i in plan.reads]
        writes = [self.blocks[i] for i in plan.writes]
        if len(reads) == len(writes) == 1:
            return Copy(reads[0], writes[0])
        return Launch(lambda: None, reads=reads, writes=writes)

    def key(self) -> tuple[object, ...]:
        """What tells this state from another, as far as what can follow goes."""
        book = self.pool.book
        ops = tuple(
            (
                which,
                op.state,
                op.posted,
                op.parked is not None,
                op.spoiled is not None,
                bool(op.taint),
                op.fence is not None,
                which in self.signaled,
                tuple(hold.live for hold in op.holds),
                tuple(sorted(p.serial for p in op.before)),
                op.serial,
            )
            for which, op in sorted(self.ops.items())
        )
        return (
            ops,
            tuple(book.held),
            tuple(sorted(book.free)),
            tuple(lease.released for lease in self.leases),
            self.lane.poisoned is not None,
            tuple(sorted((which, act.name) for which, act in self.outcomes.items())),
        )

    def broken(self) -> list[str]:
        """What does not hold."""
        found = broken_invariants([self.lane], [self.pool])
        for which, op in self.ops.items():
            for earlier in self.plans[which].after:
                before = self.ops[earlier]
                if op.state is State.COMPLETED and before.state is State.QUARANTINED:
                    found.append(f"{op!r} completed behind {before!r}")
                if op.state is State.COMPLETED and before.state not in SETTLED:
                    found.append(f"{op!r} completed before {before!r}")
                waits = self.device.can_wait(Fence())
                if op.posted and not before.posted and before.state is State.PREPARED:
                    found.append(f"{op!r} was posted before {before!r}")
                if op.posted and not waits and before.state is State.IN_FLIGHT:
                    found.append(f"{op!r} was posted while {before!r} was in flight")
        return found


def _patiently(act: Callable[[], None]) -> None:
    """Do something again for as long as an interrupt strikes, as a reaper and a drain do."""
    try:
        act()
    except KeyboardInterrupt:
        _patiently(act)


def explore(
    scene: Sequence[Plan],
    *,
    events: int = 8,
    device_waits: bool = False,
    acts: Collection[Act] = frozenset(Act),
) -> Exploration:
    """Cover every sequence of up to `events` events in a scene.

    Args:
        scene: the operations; `SCENES` has some of three.
        events: the longest sequence.
        device_waits: whether the device can put work behind work that has not ended.
        acts: what may happen; less, to look further in the same time.

    Raises:
        InvariantBroken: with the path that leads there.
        IllegalTransition: an event met a state that the table has no cell for.
    """
    # States by depth, each with a shortest path there and the number of sequences that lead to it.
    level: dict[tuple[object, ...], tuple[tuple[Step, ...], int]] = {
        _reach(scene, (), waits=device_waits).key(): ((), 1)
    }
    seen = set(level)
    steps = ended = done = 0
    for _ in range(events):
        following: dict[tuple[object, ...], tuple[tuple[Step, ...], int]] = {}
        for path, count in level.values():
            able = [s for s in _reach(scene, path, waits=device_waits).able() if s.act in acts]
            steps += len(able)
            if not able:
                done += count
            for step in able:
                longer = (*path, step)
                reached = _reach(scene, longer, waits=device_waits)
                broken = reached.broken()
                if broken:
                    raise InvariantBroken(longer, broken)
                key = reached.key()
                if key not in seen:
                    seen.add(key)
                    ended += all(op.settled for op in reached.ops.values())
                first, known = following.get(key, (longer, 0))
                following[key] = (first, known + count)
        level = following
    return Exploration(len(seen), steps, done + sum(n for _, n in level.values()), ended)


def _reach(scene: Sequence[Plan], path: Sequence[Step], *, waits: bool) -> _Scene:
    """Play a sequence from the start; all but its last event were checked before."""
    reached = _Scene(scene, waits=waits)
    for step in path:
        reached.do(step)
        reached.note()
    return reached
