"""Keys: where a page of K/V cache comes from, and which tokens lead to it.

A key is a chain of SHA-256 digests. Its root is the provenance: everything beside the tokens that the
bytes depend on. Each full page adds one link over the previous link, the page's tokens and the extra
bytes that tell apart tokens which mean different things (an adapter, an image behind placeholder
tokens, a soft prompt). Equal input gives equal bytes in every process.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Final, final, overload

import numpy as np

from tiers._layout import FP8, PageLayout, ScaleScope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    Tokens = Sequence[int] | npt.NDArray[np.integer]

_PROVENANCE: Final = b"kvhold provenance 1\0"
_ROOT: Final = b"kvhold key 1\0"
TOKEN_BYTES: Final = 4


@final
@dataclass(frozen=True, slots=True)
class BlockKey:
    """Names one page of one provenance.

    Attributes:
        digest: 32 bytes, the last link of the chain; differs wherever anything differs.
        provenance: 32 bytes, digest of the provenance.
    """

    digest: bytes
    provenance: bytes

    def __str__(self) -> str:
        return self.digest.hex()


@final
@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Everything beside tokens that the stored bytes of a page depend on.

    Text is taken as it is: two spellings of one name are two models.

    Attributes:
        model: name of the model.
        revision: which version of it.
        layout: the page as the caller has it: order, page size, heads, dtypes of K and V.
        tokenizer: digest or name of the tokenizer.
        rope: digest or name of the position encoding's settings.
        scheme: ``"computed"`` or ``"producer_scaled"``: whose scales the stored values have; by
            default what follows from the layout.
        scope: how scales are shared; by default the layout's, or per head for full-width values.
        static_scales: digest of scales that were fixed beforehand, `StaticScales.digest`; ``b""``
            if none. FP8 values without scales of their own have them.
        first_layer: number of the layout's first layer in the model.
        world_size: how many ranks share the model's heads.
        rank: which of them this is.
        format_version: of the stored bytes.
        tenant: whose entries they are; others never find them. Quotas are by tenant.
        salt: secret of the tenant, so that nobody can probe for another's prompts.
    """

    model: str
    revision: str
    layout: PageLayout
    tokenizer: str = ""
    rope: str = ""
    scheme: str | None = None
    scope: ScaleScope | None = None
    static_scales: bytes = b""
    first_layer: int = 0
    world_size: int = 1
    rank: int = 0
    format_version: int = 3
    tenant: str = ""
    salt: bytes = b""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.first_layer < 0:
            raise ValueError(
                f"provenance: found rank {self.rank} of {self.world_size}, first layer "
                f"{self.first_layer}; expected a rank below the world size, a layer from 0"
            )
        through = self.layout.value in FP8
        if self.scheme is None:
            object.__setattr__(self, "scheme", "producer_scaled" if through else "computed")
        if through and self.layout.scope is None and not self.static_scales:
            raise ValueError(
                f"provenance: found {self.layout.value} values without scales of their own; "
                "expected static_scales, the digest of those that they were written with"
            )
        if self.scope is None and self.layout.value is not None:
            scope = self.layout.scope if through else ScaleScope.HEAD
            object.__setattr__(self, "scope", scope)

    @cached_property
    def canonical(self) -> bytes:
        """The fields in order, each with its name, its type and its length: one-to-one."""
        parts = [_PROVENANCE]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, PageLayout):
                for part in fields(value):
                    parts += _field(f"layout.{part.name}", getattr(value, part.name))
            else:
                parts += _field(field.name, value)
        return b"".join(parts)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that differ wherever a field differs."""
        return hashlib.sha256(self.canonical).digest()

    def keys(self, tokens: Tokens = (), *, extra: bytes) -> Keys:
        """The keys of the full pages of `tokens`, counted from the start of the sequence.

        Args:
            tokens: token ids, each at least 0 and below 2**32.
            extra: what else these tokens' K and V depend on; ``b""`` if on nothing.

        Raises:
            ValueError: a token id out of range.
        """
        keys = Keys(self)
        keys.extend(tokens, extra=extra)
        return keys


def _field(name: str, value: object) -> list[bytes]:
    if value is None:
        kind, data = b"n", b""
    elif isinstance(value, bytes):
        kind, data = b"b", value
    elif isinstance(value, int):
        kind, data = b"i", str(value).encode()
    else:
        kind, data = b"s", str(value).encode("utf-8", "surrogatepass")
    title = name.encode()
    return [struct.pack("<HI", len(title), len(data)), kind, title, data]


@final
class Keys(Sequence[BlockKey]):
    """The keys of a sequence's full pages, longer by `extend`.

    Attributes:
        provenance: where the pages come from.
        digests: one of 32 bytes for each full page.
    """

    __slots__ = ("_extras", "_pending", "_root", "digests", "provenance")

    def __init__(self, provenance: Provenance, digests: Iterable[bytes] = ()) -> None:
        self.provenance = provenance
        self.digests: list[bytes] = list(digests)
        self._root = hashlib.sha256(_ROOT + provenance.digest).digest()
        self._pending = b""
        self._extras: list[tuple[int, bytes]] = []

    def __repr__(self) -> str:
        return f"<keys of {len(self)} pages of {self.provenance.model!r}>"

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, index: int) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> BlockKey | Keys:
        if isinstance(index, slice):
            return Keys(self.provenance, self.digests[index])
        return BlockKey(self.digests[index], self.provenance.digest)

    def __iter__(self) -> Iterator[BlockKey]:
        provenance = self.provenance.digest
        for digest in self.digests:
            yield BlockKey(digest, provenance)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.provenance.layout.page_size

    @property
    def pending(self) -> int:
        """Tokens behind the last full page."""
        return len(self._pending) // TOKEN_BYTES

    def extend(self, tokens: Tokens, *, extra: bytes) -> int:
        """Add tokens behind those that are there; of a slice, extend the whole instead.

        Args:
            tokens: token ids, each at least 0 and below 2**32.
            extra: what else these tokens' K and V depend on; ``b""`` if on nothing.

        Returns:
            How many pages became full.

        Raises:
            ValueError: a token id out of range; nothing changed.
        """
        fresh = _token_bytes(tokens)
        step = self.page_size * TOKEN_BYTES
        before = len(self.digests)
        if self._pending and fresh:
            fresh = self._finish_page(fresh, extra, step)
        # The link costs most of the time here: nothing else is done per page.
        tail = _extra_bytes([(0, extra)])
        link = self.digests[-1] if self.digests else self._root
        sha, add = hashlib.sha256, self.digests.append
        end = len(fresh) - len(fresh) % step
        for at in range(0, end, step):
            link = sha(link + fresh[at : at + step] + tail).digest()
            add(link)
        if end < len(fresh):
            self._pending = fresh[end:]
            self._extras = [(0, extra)]
        return len(self.digests) - before

    def _finish_page(self, fresh: bytes, extra: bytes, step: int) -> bytes:
        """Put tokens behind those of an unfinished page; what is left over."""
        if self._extras[-1][1] != extra:
            self._extras.append((self.pending, extra))
        missing = step - len(self._pending)
        page = self._pending + fresh[:missing]
        if len(page) < step:
            self._pending = page
            return b""
        link = self.digests[-1] if self.digests else self._root
        tail = _extra_bytes(self._extras)
        self.digests.append(hashlib.sha256(link + page + tail).digest())
        self._pending, self._extras = b"", []
        return fresh[missing:]


def _extra_bytes(extras: list[tuple[int, bytes]]) -> bytes:
    """From which token of a page on which extra bytes hold; one-to-one."""
    return b"".join(struct.pack("<IQ", start, len(extra)) + extra for start, extra in extras)


def _token_bytes(tokens: Tokens) -> bytes:
    """Token ids as little-endian 32-bit words.

    Raises:
        ValueError: an id below 0 or from 2**32 up.
    """
    if isinstance(tokens, np.ndarray):
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < 1 << 32:
            raise ValueError(f"tokens: found {tokens.min()} to {tokens.max()}, expected 32 bits")
        return tokens.astype("<u4").tobytes()
    try:
        words = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"tokens: expected integers from 0 to 2**32 - 1: {error}") from None
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
