"""`kvhold demo`: a real model whose pages go to the tiers and come back, first well, then with faults.

Every answer is compared, to the last bit of its logits, with the answer of a run whose pages never left
the cache. Pages that are given back are filled with NaN, so that reading one that is not yours shows.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast, final

from kvhold import demo_faults as faults
from kvhold._errors import UserError
from kvhold._output import brief
from kvhold.demo_report import Report, phase_of
from kvhold.serving import Answer, Request, Server, Stepper
from kvhold.serving_pages import PageRoom, cache_for, provenance_of
from tiers import DiskTier, HostTier, KVStore, Placement, PutFailed
from transfer import Engine, FileDevice, HostDevice
from transfer.testing import NaiveEngine

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvhold.model import LanguageModel
    from transfer._device import Device

    Progress = Callable[[str, int, int], None]

QUESTIONS: Final = (
    "Question: What is this news about?\nAnswer:",
    "Question: Who is named, and what did they do?\nAnswer:",
    "Question: Where did this happen?\nAnswer:",
    "Question: What may happen next?\nAnswer:",
)

CHUNK: Final = 128
"""Tokens of a prefill step."""
WHOLE, SPLIT, FAULTS = "whole", "split", "faults"
OWN_FOLDERS: Final = frozenset({SPLIT, FAULTS})
"""Folders in which nothing is of use after a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Size and faults of a run.

    Attributes:
        documents: how many prefixes.
        tokens: length of each, a multiple of the chunk.
        questions: requests for each document.
        new: tokens of an answer.
        tasks: requests served at once.
        page_size: tokens of a page.
        chunk: tokens of a prefill step.
        seed: of the faults.
        patience: seconds that a fetch may take once faults are on; most of them.
        slow: seconds that a slow read takes.
        late: steps of the model by which copies over a slow link begin late.
        naive: use the engine that goes by convenience instead of proof.
    """

    documents: int = 6
    tokens: int = 512
    questions: int = 2
    new: int = 16
    tasks: int = 4
    page_size: int = 32
    chunk: int = CHUNK
    seed: int = 7
    patience: float = 0.15
    slow: float = 0.3
    late: int = 18
    naive: bool = False

    @property
    def document_pages(self) -> int:
        """Pages of a document."""
        return self.tokens // self.page_size


@final
class Demo:
    """One run.

    Args:
        model: the model.
        documents: token lists of equal length.
        folder: where files go.
        settings: size and faults.
        progress: called with the round's name, steps done and steps in all.

    Raises:
        UserError: the requests are longer than the model takes.

    Attributes:
        report: what was found so far.
        opened: the folders below `folder` that this run has, or had.
    """

    def __init__(
        self,
        model: LanguageModel,
        documents: list[list[int]],
        *,
        folder: Path,
        settings: Settings,
        progress: Progress,
    ) -> None:
        self._model = model
        self._documents = documents
        self._folder = folder
        self._settings = settings
        self._progress = progress
        self._requests = self._make_requests()
        longest = max(len(request.tokens) for request in self._requests) + settings.new
        if longest > model.geometry.max_tokens:
            raise UserError(
                f"prefix, question and answer are {longest} tokens: {model.name} takes "
                f"{model.geometry.max_tokens}"
            )
        each = -(-longest // settings.page_size)
        self._cache = cache_for(
            model, pages=each * (settings.tasks + 1), page_size=settings.page_size
        )
        self._room = PageRoom(self._cache)
        self._provenance = provenance_of(model, self._cache, chunk=settings.chunk)
        self._expected: dict[str, Answer] = {}
        self.opened: set[str] = set()
        self._steps = 0
        self.report = Report(
            model={"name": model.name, "revision": model.revision}
            | asdict(model.geometry)
            | {"licence": "Apache-2.0" if model.name.startswith("SmolLM2") else "see its folder"},
            settings=asdict(settings),
            engine="naive" if settings.naive else "kvhold",
            page_bytes=self._page_bytes(),
        )

    def _make_requests(self) -> list[Request]:
        """The questions, round-robin over the documents, so that neighbours differ."""
        asked = [self._model.encode("\n" + text) for text in QUESTIONS[: self._settings.questions]]
        return [
            Request(f"document {d}, question {q}", (*document, *question), self._settings.new)
            for q, question in enumerate(asked)
            for d, document in enumerate(self._documents)
        ]

    def _page_bytes(self) -> dict[str, int]:
        layout = self._cache.page_layout
        found = {part.name: part.nbytes for part in layout.components()}
        return found | {"bfloat16": 2 * layout.component("key").nbytes}

    async def run(self) -> Report:
        """All rounds.

        Raises:
            TierBusy: another run has the folder.
            OSError: the folder cannot be used.
        """
        async with Engine(HostDevice(), FileDevice()) as engine:
            await self._never_offloaded(engine)
            await self._restarted(engine)
            await self._from_tiers(engine)
        await self._with_faults()
        self.report.leftover = self._room.still_held
        return self.report

    # Rounds

    async def _round(self, name: str, engine: Engine, store: KVStore | None) -> list[Answer]:
        """All requests, several at a time."""
        done = 0

        def watch(_answer: Answer) -> None:
            nonlocal done
            done += 1
            self._progress(name, done, len(self._requests))

        self._progress(name, 0, len(self._requests))
        server = self._server(engine, store, watch)
        began = time.perf_counter()
        answers = await server.serve(self._requests, tasks=self._settings.tasks)
        seconds = time.perf_counter() - began
        if not self._expected:
            self._expected = {answer.name: answer for answer in answers}
        self.report.phases.append(phase_of(name, answers, self._expected, seconds))
        return answers

    def _server(
        self,
        engine: Engine,
        store: KVStore | None,
        watch: Callable[[Answer], None] | None = None,
    ) -> Server:
        def stepped() -> None:
            self._steps += 1

        stepper = Stepper(
            engine, self._cache, self._model, chunk=self._settings.chunk, stepped=stepped
        )
        return Server(stepper, self._room, provenance=self._provenance, store=store, watch=watch)

    async def _never_offloaded(self, engine: Engine) -> None:
        answers = await self._round("never offloaded", engine, None)
        request, answer = self._requests[0], answers[0]
        asked = self._model.decode(request.tokens[self._settings.tokens :])
        self.report.sample = (asked.strip(), self._model.decode(answer.tokens).strip())

    async def _restarted(self, engine: Engine) -> None:
        """Serve from what an earlier process left in whole files, then keep this one's pages there."""
        disk = DiskTier(self._folder / WHOLE)
        async with KVStore(
            engine, layout=self._cache.page_layout, placement=Placement.WHOLE_DISK, disk=disk
        ) as store:
            adopted = await store.recovered()
            useful = self._matching(store)
            self.report.kept = {"pages adopted": adopted, "pages of these documents": useful}
            if useful:
                await self._round("an earlier run's files", engine, store)
            await self._put_documents("storing whole pages", engine, store)
            kept = self._matching(store)
        self.report.notes.append(
            f"an earlier run left {adopted} whole pages, {useful} of these documents: used"
            if adopted
            else f"no whole pages of an earlier run: the next run finds {kept} of this one"
        )

    def _matching(self, store: KVStore) -> int:
        keys = (self._provenance.keys(tokens, extra=b"") for tokens in self._documents)
        return sum(store.match(each) for each in keys)

    async def _from_tiers(self, engine: Engine) -> None:
        disk = DiskTier(self._folder / SPLIT)
        async with self._split(engine, disk) as store:
            self.opened.add(SPLIT)
            await store.recovered()
            found = store.statistics()
            self.report.kept["value files without keys, removed"] = found.orphans_removed
            if found.orphans_removed:
                self.report.notes.append(
                    f"an earlier run died with {found.orphans_removed} value files, whose keys "
                    f"were in its memory: misses, removed"
                )
            await self._put_documents("storing keys in memory, values in files", engine, store)
            await self._round("the tiers", engine, store)

    @asynccontextmanager
    async def _split(self, engine: Engine, disk: DiskTier) -> AsyncIterator[KVStore]:
        """A store of keys in host memory and values in files."""
        layout = self._cache.page_layout
        pages = len(self._documents) * self._settings.document_pages
        host = HostTier.of(layout, ("key",), blocks=pages)
        try:
            async with KVStore(
                engine, layout=layout, placement=Placement.SPLIT, host=host, disk=disk
            ) as store:
                yield store
        finally:
            host.close()

    async def _put_documents(self, name: str, engine: Engine, store: KVStore) -> None:
        """Compute each document's pages, store them, give them back poisoned."""
        server = self._server(engine, store)
        refused: list[str] = []
        for number, document in enumerate(self._documents):
            self._progress(name, number, len(self._documents))
            try:
                await server.keep(document)
            except PutFailed as error:
                refused += error.pages.values()
        self._progress(name, len(self._documents), len(self._documents))
        if refused:
            self.report.notes.append(
                f"{name}: {len(refused)} pages could not be stored ({brief(refused[0])}); recomputed"
            )

    # Faults

    async def _with_faults(self) -> None:
        """The same requests on a bad disk and a slow link, with files lost and damaged."""
        settings = self._settings
        pages = len(self._documents) * settings.document_pages
        calls = faults.ShakyCalls((pages // 4, pages // 2 + 1), slow_every=0, seconds=settings.slow)
        link = faults.SlowLink(
            settings.seed, rate=0.6, steps=settings.late, clock=lambda: self._steps
        )
        disk = DiskTier(self._folder / FAULTS)
        struck: Counter[str] = calls.injected
        async with (
            self._engine(link.device, FileDevice(calls=calls)) as engine,
            self._split(engine, disk) as store,
        ):
            self.opened.add(FAULTS)
            await self._put_documents("storing, with failing writes", engine, store)
            self._harm(store, disk, struck)
            calls.slow_every = 10
            self._requests = self._impatient()
            async with link.slow():
                answers = await self._round("the tiers, with faults", engine, store)
            calls.slow_every = 0
            struck[faults.SLOW_COPY] += link.delayed
            struck[faults.CANCELLED] += sum(answer.late for answer in answers)
        self.report.faults = dict(sorted(struck.items()))

    def _impatient(self) -> list[Request]:
        """Two of three requests leave a slow fetch; who stays differs from question to question."""
        found, documents = [], len(self._documents)
        for number, request in enumerate(self._requests):
            stays = number % 3 == number // documents % 3
            patience = None if stays else self._settings.patience
            found.append(replace(request, patience=patience))
        return found

    def _harm(self, store: KVStore, disk: DiskTier, struck: Counter[str]) -> None:
        """Remove one file in the middle of a document and damage one of another."""
        files = faults.value_files(store, disk)
        for number, (what, harm) in enumerate(
            ((faults.LOST_FILE, faults.lose), (faults.DAMAGED_FILE, faults.damage))
        ):
            at = number * self._settings.document_pages + self._settings.document_pages * 3 // 4
            if at < len(files):
                harm(files[at])
                struck[what] += 1

    @asynccontextmanager
    async def _engine(self, *devices: Device) -> AsyncIterator[Engine]:
        """The engine, or the control that the demonstration must be able to fail with."""
        made: Any = NaiveEngine(*devices) if self._settings.naive else Engine(*devices)
        engine = cast("Engine", made)
        engine.start()
        try:
            yield engine
        finally:
            await engine.aclose()
