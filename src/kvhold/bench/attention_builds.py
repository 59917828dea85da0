"""Modules of the attention measurement, built in the background: FlashInfer's FA3 first, then ours."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, final

import torch

from attention.flashinfer import CORES_HEAD_DIMS, Library, ModuleKey
from kvhold.bench import attention_check, attention_time
from tiers._layout import ScaleScope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TOLD_EVERY: Final = 10.0
"""Seconds between two words about a build that is waited for."""


def keys() -> list[ModuleKey]:
    """The modules that the sweep and the tests need: those of the timed shapes first, then 128."""
    stored = ModuleKey(
        *(False, torch.bfloat16, torch.float8_e4m3fn, attention_time.HEAD_DIM), by_token=True
    )
    made = {stored: None}
    for cell in attention_check.cells():
        case = cell.case
        for cores in (False, True):
            by_token = case.scope is ScaleScope.TOKEN_HEAD
            if cores and (by_token or case.head_dim not in CORES_HEAD_DIMS):
                continue
            made[ModuleKey(cores, case.key, case.value, case.head_dim, by_token)] = None

    def late(key: ModuleKey) -> tuple[bool, bool]:
        timed = key._replace(cores=False, by_token=True) == stored and not key.by_token
        return not timed, key.head_dim != attention_time.HEAD_DIM

    return sorted(made, key=late)


@final
class Fa3:
    """FlashInfer's FA3 prefill, being built in the background with all compilers to itself.

    It is the module that `BatchPrefillWithPagedKVCacheWrapper(backend="fa3")` loads at plan: the same
    arguments, hence the same name and folder. Building takes the lock that loading takes, so that
    the two never write one folder at once.

    Args:
        spec: FlashInfer's description of the module.
        load: loads it as the wrapper does.
        patience: seconds that it may take, from now on.
        tell: is given a line about it now and then.
        every: seconds between such lines.
    """

    def __init__(
        self,
        spec: Any,
        load: Callable[[], object],
        *,
        patience: float,
        tell: Callable[[str], None],
        every: float = TOLD_EVERY,
    ) -> None:
        self.patience = patience
        self._spec = spec
        self._load = load
        self._tell = tell
        self._every = every
        self._start = time.monotonic()
        self._took = 0.0
        self._pool = ThreadPoolExecutor(1)
        self.future: Future[None] = self._pool.submit(self._build)
        self._pool.shutdown(wait=False)

    def _build(self) -> None:
        self._spec.build(verbose=False, need_lock=True)
        self._took = time.monotonic() - self._start

    def progress(self) -> str:
        """How far it is: object files there, of those that there will be."""
        paths = self._spec.get_object_paths()
        there = sum(path.exists() for path in paths)
        return f"{there} of {len(paths)} objects after {time.monotonic() - self._start:.0f} s"

    def get(self) -> dict[str, Any]:
        """Wait for it and load it: what became of it, for the record."""
        found: dict[str, Any] = {"module": self._spec.name}
        reason = self._wait()
        if reason is None:
            start = time.monotonic()
            try:
                self._load()
            except (RuntimeError, OSError) as error:
                reason = f"does not load: {_first_line(error)}"
            else:
                found |= {
                    "state": "compared",
                    "build_s": round(self._took, 1),
                    "load_s": round(time.monotonic() - start, 1),
                }
        if reason is not None:
            found |= {"state": "missing", "reason": reason}
        self._tell(f"FA3: {found}")
        return found

    def _wait(self) -> str | None:
        """Why it is not there; None if it is."""
        while not self.future.done():
            left = self._start + self.patience - time.monotonic()
            if left <= 0:
                return f"not built within {self.patience:.0f} s: {self.progress()}"
            wait([self.future], timeout=min(left, self._every))
            self._tell(f"FA3: {self.progress()}")
        error = self.future.exception()
        return None if error is None else f"does not build: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else repr(error))[:200]


class Builds:
    """Modules being built side by side in the background.

    Args:
        specs: FlashInfer's descriptions of them.
        workers: compilers side by side.
        fa3: is built before them, and then compared; None to leave it out.
        tell: is given a line when all are there.
    """

    def __init__(
        self, specs: Iterable[Any], *, workers: int, fa3: Fa3 | None, tell: Callable[[str], None]
    ) -> None:
        self._start = time.monotonic()
        self._tell = tell
        self._fa3 = fa3
        pool = ThreadPoolExecutor(workers)
        self._futures = [pool.submit(self._build, spec) for spec in specs]
        pool.shutdown(wait=False)

    @classmethod
    def of(
        cls,
        library: Library | None,
        *,
        workers: int,
        first: int,
        more: Sequence[Any],
        fa3: float,
        tell: Callable[[str], None],
    ) -> Builds:
        """Those that a run needs.

        Args:
            library: the installed FlashInfer, None to build nothing.
            workers: compilers side by side.
            first: build only so many of ours; 0 for all.
            more: descriptions of others that are built as well.
            fa3: seconds that FA3's prefill may take to build; 0 to leave it out.
            tell: is given lines about it.
        """
        if library is None:
            return cls([], workers=1, fa3=None, tell=tell)
        # Sources are written by one thread, compilers run in several.
        specs = [library.spec(key) for key in keys()[: first or None]]
        specs[2:2] = [*attention_time.stock_specs(library), *more]
        compared = None
        if fa3:
            compared = Fa3(
                attention_time.fa3_spec(library),
                lambda: attention_time.load_fa3(library),
                patience=fa3,
                tell=tell,
            )
        return cls(specs, workers=workers, fa3=compared, tell=tell)

    def _build(self, spec: Any) -> None:
        if self._fa3 is not None:
            wait([self._fa3.future], timeout=self._fa3.patience)
        spec.build(verbose=False)

    def wait(self) -> None:
        """Until all of ours are there.

        Raises:
            RuntimeError: one does not compile.
        """
        if self._futures:
            for future in self._futures:
                future.result()
            took = time.monotonic() - self._start
            self._tell(f"{len(self._futures)} modules built, {took:.0f} s after the start")
            self._futures = []

    def fa3(self) -> dict[str, Any]:
        """What became of FA3, for the record."""
        if self._fa3 is None:
            return {"state": "missing", "reason": "not asked for, or no FlashInfer"}
        return self._fa3.get()
