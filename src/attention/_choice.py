"""Which backend computes a combination: the fastest by measurement that does not refuse it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from attention._backend import Backend, ReferenceBackend, Wanted
from attention._errors import MissingPart, Unsupported
from attention._triton import TritonBackend
from attention.flashinfer import FlashInferBackend, Library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AUTO: Final = "auto"
CORES_GROUP_MAX: Final = 2
"""Up to this many query heads per KV head CUDA cores keep up with memory."""
PREFILL_ROWS_MIN: Final = 132 * 128
"""Rows times query heads from which Triton's prefill has a program for each processor of an H200."""


def preference(wanted: Wanted) -> tuple[str, ...]:
    """Backends by measured speed on an H200, fastest first; each may still refuse.

    Memory-bound decode with one or two query heads per KV head is fastest on CUDA cores, with more
    it is the Triton kernel, which keeps more of the cache on the way than FlashInfer's template
    does. So is a prefill of many rows; one of few rows leaves processors idle there, while
    FlashInfer shares its keys out (docs/attention.md has the figures).
    """
    if wanted.device.type != "cuda":
        return ("reference",)
    if wanted.prefill:
        many = wanted.rows * wanted.query_heads >= PREFILL_ROWS_MIN
        first = ("triton", "flashinfer") if many else ("flashinfer", "triton")
        return (*first, "reference")
    if wanted.group <= CORES_GROUP_MAX:
        return ("flashinfer-cores", "triton", "flashinfer", "reference")
    return ("triton", "flashinfer", "reference")


@final
class Backends:
    """The backends of one process part, each made when it is first asked for.

    Args:
        others: backends of your own, by name; they replace ours of the same name.
        library: the installed FlashInfer, found when first needed if None.
    """

    def __init__(self, others: Sequence[Backend] = (), *, library: Library | None = None) -> None:
        self._library = library
        self._made: dict[str, Backend] = {backend.name: backend for backend in others}
        self._makers: dict[str, Callable[[], Backend]] = {
            "reference": ReferenceBackend,
            "triton": TritonBackend,
            "flashinfer": lambda: self._flashinfer(cores=False),
            "flashinfer-cores": lambda: self._flashinfer(cores=True),
        }

    def _flashinfer(self, *, cores: bool) -> Backend:
        if self._library is None:
            self._library = Library()
        return FlashInferBackend(cores=cores, library=self._library)

    def get(self, name: str) -> Backend:
        """The backend of that name.

        Raises:
            Unsupported: there is none, or the installed library was not tested.
            MissingPart: what it needs is not installed.
        """
        if name not in self._made:
            if name not in self._makers:
                known = ", ".join((AUTO, *self._makers))
                raise Unsupported(f"backend {name!r}: expected one of {known}")
            self._made[name] = self._makers[name]()
        return self._made[name]

    def pick(self, name: str, wanted: Wanted) -> tuple[Backend, str]:
        """The backend for a combination, and why it is that one.

        Raises:
            Unsupported: the named backend refuses; the message names what to use.
            MissingPart: the named backend is not installed.
        """
        if name != AUTO:
            backend = self.get(name)
            refusal = backend.refusal(wanted)
            if refusal is not None:
                raise Unsupported(refusal)
            return backend, f"{name}: asked for"
        passed = []
        for candidate in preference(wanted):
            try:
                backend = self.get(candidate)
            except (MissingPart, Unsupported) as error:
                passed.append(str(error))
                continue
            refusal = backend.refusal(wanted)
            if refusal is None:
                kind = "prefill" if wanted.prefill else "decode"
                best = f"{candidate}: fastest of those that do this {kind}, group {wanted.group}"
                return backend, "; ".join((best, *passed))
            passed.append(refusal)
        raise Unsupported("; ".join(passed))
