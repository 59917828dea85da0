"""A small server: prompts come in, pages come back from the tiers or are computed, tokens go out.

Prefill runs in chunks of whole pages. Every chunk reads all pages before it through K16/V8, as decode
does, so the bytes of a page depend on its tokens and nothing else: not on how many pages were
restored, nor on what else is running. A prefix that comes back short is used up to the last chunk,
and the rest is computed in the very steps that computed it first.
"""

from __future__ import annotations

import threading
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar, TypeVarTuple, final

import anyio
import torch

from attention import PageTable
from kvhold.model_attention import PagedReads
from kvhold.serving_pages import PageRoom, poison
from transfer._drain import wait_unstoppable
from transfer._handle import Blocks
from transfer._loop import current_loop
from transfer._work import External

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attention import PagedKVCache
    from kvhold.model import LanguageModel
    from tiers import Keys, KVStore, Provenance
    from transfer import Engine
    from transfer._handle import Lease

T = TypeVar("T")
Args = TypeVarTuple("Args")
How = Literal["restored", "in part", "computed"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how much is wanted of its continuation.

    Attributes:
        name: for people.
        tokens: the prompt.
        new: tokens to generate, greedily.
        patience: seconds that a fetch may take before the pages are computed instead; None for any.

    Raises:
        ValueError: no prompt, or no token wanted.
    """

    name: str
    tokens: tuple[int, ...]
    new: int
    patience: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens or self.new < 1:
            raise ValueError(
                f"{self.name}: {len(self.tokens)} tokens, {self.new} new ones, expected at least "
                f"one of each"
            )


@dataclass(slots=True)
class Answer:
    """What became of a request.

    Attributes:
        name: of the request.
        tokens: generated tokens.
        bits: CRC-32 over the float32 logits of every step: equal answers have equal bits.
        wanted: full pages of the prompt.
        restored: pages of them that came from the tiers and were used.
        computed: prompt tokens that were computed.
        first: seconds until the first token.
        total: seconds until the last token.
        late: whether its fetch was given up.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    bits: int = 0
    wanted: int = 0
    restored: int = 0
    computed: int = 0
    first: float = 0.0
    total: float = 0.0
    late: bool = False

    @property
    def how(self) -> How:
        """Where the prompt's pages came from."""
        if self.restored == self.wanted and self.wanted:
            return "restored"
        return "in part" if self.restored else "computed"


@final
class Stepper:
    """Runs the model on pages, one step at a time, off the loop; the pages are held meanwhile.

    Args:
        engine: holds the pages.
        cache: the pages.
        model: the model.
        chunk: tokens of a prefill step, a multiple of the page size.
        stepped: called after every step.
    """

    def __init__(
        self,
        engine: Engine,
        cache: PagedKVCache,
        model: LanguageModel,
        *,
        chunk: int,
        stepped: Callable[[], None] | None = None,
    ) -> None:
        if chunk % cache.page_size:
            raise ValueError(f"chunk of {chunk} tokens, expected whole pages of {cache.page_size}")
        self.engine = engine
        self.cache = cache
        self.model = model
        self.chunk = chunk
        self._stepped = stepped
        self._thread = anyio.CapacityLimiter(1)
        self._one = anyio.Lock()

    async def prefill(
        self, pages: Blocks, tokens: Sequence[int], start: int, answer: Answer
    ) -> int:
        """Compute a prompt from token `start` on, a chunk at a time; the token that follows it."""
        found = -1
        while start < len(tokens):
            end = min(start - start % self.chunk + self.chunk, len(tokens))
            answer.bits = 0  # the last chunk gives the first token; how many came before differs
            found = await self.step(pages, tokens[start:end], start, answer)
            answer.computed += end - start
            start = end
        return found

    async def step(self, pages: Blocks, tokens: Sequence[int], start: int, answer: Answer) -> int:
        """Append tokens to a request; the most likely token behind them."""
        cache = self.cache
        count = -(-(start + len(tokens)) // cache.page_size)
        fresh = start // cache.page_size
        mine = pages[:count]
        table = PageTable.of(
            [mine], [start + len(tokens)], pool=cache.pool, page_size=cache.page_size
        )
        stream = _stream(cache.device)
        hold = self.engine.submit_nowait(
            External(
                reads=[mine[:fresh]] if fresh else [], writes=[mine[fresh:]], on=cache.pool.kind
            ),
            after=() if stream is None else stream,
            name="model step",
        )
        try:
            token, answer.bits = await self.off_loop(
                self._forward, tokens, start, table, answer.bits
            )
        finally:
            hold.finish(stream)
        await hold.wait()
        if self._stepped is not None:
            self._stepped()
        return token

    async def off_loop(self, function: Callable[[*Args], T], *args: *Args) -> T:
        """Run something of the model's on the one worker thread that runs the model.

        It is over when this returns or raises: asyncio's own `Task.cancel`, which goes through
        shields, is held back until the thread is through.
        """
        job, loop = _Job(), current_loop()

        def run() -> T:
            if not job.begin():
                raise RuntimeError("it was cancelled before it began")
            try:
                return function(*args)
            finally:
                loop.post(job.end)

        async with self._one:
            try:
                return await anyio.to_thread.run_sync(run, limiter=self._thread)
            finally:
                caught = await job.over()
                if caught is not None:
                    raise caught

    def _forward(
        self, tokens: Sequence[int], start: int, table: PageTable, bits: int
    ) -> tuple[int, int]:
        """One step, on a worker thread."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        reads = PagedReads(self.cache, table, [len(tokens)])
        logits = self.model.forward(ids, start, reads, last=True)[0, -1].cpu()
        return int(logits.argmax()), zlib.crc32(logits.numpy().tobytes(), bits)


@final
class _Job:
    """Whether a thread has begun, and ended, what it was given."""

    def __init__(self) -> None:
        self._begun = threading.Lock()
        self._ended = False
        self._watchers: list[Callable[[], None]] = []

    def begin(self) -> bool:
        """Take it, for the thread to do or for the loop to drop; False if it was taken before."""
        return self._begun.acquire(blocking=False)

    def end(self) -> None:
        """The thread is through; called on the loop."""
        self._ended = True
        for watcher in list(self._watchers):
            watcher()

    async def over(self) -> BaseException | None:
        """Wait until the thread is through, or will never begin; what struck meanwhile."""
        if self.begin():
            return None
        return await wait_unstoppable(lambda: self._ended, self._watchers)


def _stream(device: torch.device) -> object | None:
    """The stream that a step runs in, where there are any."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device)


@final
class Server:
    """Answers requests on any number of tasks of one loop.

    Args:
        stepper: runs the model.
        room: leases pages.
        store: where pages are looked for; None computes everything.
        provenance: of the model's pages.
        watch: called with each answer when it is complete.
    """

    def __init__(
        self,
        stepper: Stepper,
        room: PageRoom,
        *,
        provenance: Provenance,
        store: KVStore | None = None,
        watch: Callable[[Answer], None] | None = None,
    ) -> None:
        self._stepper = stepper
        self._room = room
        self._store = store
        self._provenance = provenance
        self._watch = watch
        self._size = stepper.cache.page_size

    async def serve(self, requests: Sequence[Request], *, tasks: int) -> list[Answer]:
        """Answer all requests, `tasks` at a time; in their order."""
        answers: list[Answer | None] = [None] * len(requests)
        queue = iter(enumerate(requests))

        async def work() -> None:
            for number, request in queue:
                answers[number] = await self.answer(request)

        async with anyio.create_task_group() as group:
            for _ in range(tasks):
                group.start_soon(work)
        return [answer for answer in answers if answer is not None]

    async def answer(self, request: Request, *, prefix: Blocks | None = None) -> Answer:
        """Answer one request.

        Args:
            request: the prompt.
            prefix: pages that have its beginning already, and stay as they are. Whole chunks of
                them are read, up to the last token, which is computed; the tiers are not asked.
        """
        began = time.perf_counter()
        answer = Answer(request.name)
        keys = self._provenance.keys(request.tokens, extra=b"")
        answer.wanted = len(keys)
        total = -(-(len(request.tokens) + request.new) // self._size)
        shared = None if prefix is None else prefix[: self._usable(len(prefix), request)]
        lease = await self._room.take(total - (0 if shared is None else len(shared)))
        try:
            if shared is None:
                lease, found = await self._restore(lease, keys, request, answer)
                pages = lease.handle
            else:
                found, pages = len(shared), _joined(shared, lease.handle)
            token = await self._stepper.prefill(pages, request.tokens, found * self._size, answer)
            answer.first = time.perf_counter() - began
            await self._decode(pages, request, token, answer)
        finally:
            if not lease.released:  # struck between pages that were late and new ones
                self._room.give_back(lease)
        answer.total = time.perf_counter() - began
        if self._watch is not None:
            self._watch(answer)
        return answer

    def _usable(self, pages: int, request: Request) -> int:
        """Leading pages that save whole chunks: what follows is computed as it was at first."""
        found = min(pages, (len(request.tokens) - 1) // self._size)
        return found - found % (self._stepper.chunk // self._size)

    async def _decode(self, pages: Blocks, request: Request, token: int, answer: Answer) -> None:
        answer.tokens.append(token)
        for number in range(request.new - 1):
            at = len(request.tokens) + number
            token = await self._stepper.step(pages, [token], at, answer)
            answer.tokens.append(token)

    async def _restore(
        self, lease: Lease[Blocks], keys: Keys, request: Request, answer: Answer
    ) -> tuple[Lease[Blocks], int]:
        """Bring what the tiers have; the lease to go on with, and how many pages are right.

        A fetch that takes too long is cancelled. Copies into the old pages may go on, so other
        pages are taken and the old ones left: they come back to the pool when they are quiet.
        """
        store = self._store
        if store is None:
            return lease, 0
        count = len(lease.handle)
        with store.lookup(keys, max_tokens=len(request.tokens) - 1) as hit:
            if not hit.pages:
                return lease, 0
            pages = lease.handle[: hit.pages]
            poison(self._room.cache, pages)
            with anyio.move_on_after(request.patience) as scope:
                found = await store.fetch(hit, into=pages)
                answer.restored = self._usable(found, request)
                return lease, answer.restored
        answer.late = scope.cancelled_caught
        self._room.give_back(lease)
        return await self._room.take(count), 0

    async def keep(self, tokens: Sequence[int]) -> None:
        """Compute the pages of some tokens and store those that are not there yet.

        Raises:
            PutFailed: some could not be stored; the others are.
        """
        assert self._store is not None  # noqa: S101 - nobody asks a server without a store
        keys = self._provenance.keys(tokens, extra=b"")
        if self._store.match(keys) == len(keys):
            return
        lease = await self._room.take(len(keys))
        try:
            full = tokens[: len(keys) * self._size]
            await self._stepper.prefill(lease.handle, full, 0, Answer("kept"))
            ticket = await self._store.put(keys, lease.handle)
        finally:
            self._room.give_back(lease)
        await ticket.resident()


def _joined(first: Blocks, second: Blocks) -> Blocks:
    return Blocks.gather([*first, *second])
