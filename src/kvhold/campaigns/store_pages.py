"""Pages whose right bytes follow from their keys and a version, and that survive the FP8 cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiers import Keys, PageLayout, PageOrder, Provenance

if TYPE_CHECKING:
    import numpy.typing as npt

    from transfer import Blocks

LAYOUT: Final = PageLayout(layers=2, page_size=4, kv_heads=2, head_dim=8, order=PageOrder.NHD)
PROVENANCE: Final = Provenance(model="campaign", revision="1", layout=LAYOUT)
POISON: Final = 0xA5


def keys_of(sequence: int, pages: int) -> Keys:
    """Keys of a sequence that begins with its own number."""
    tokens = [sequence, *range(1, pages * LAYOUT.page_size)]
    return PROVENANCE.keys(tokens, extra=b"")


def _numbers() -> npt.NDArray[np.uint16]:
    """The bfloat16 patterns of the finite numbers of e4m3: each is exact in both."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    wide = np.where(
        exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6
    )
    wide = np.where(codes & 0x80, -wide, wide).astype(np.float32)
    bits: Any = (wide.view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(bits[(codes & 0x7F) != 0x7F], dtype=np.uint16)


_NUMBERS: Final = _numbers()
_LARGEST: Final = 0x43E0
"""448 in bfloat16: with it in every head, every scale is one and nothing is rounded."""


def page_bytes(digest: bytes, version: int = 0) -> bytes:
    """What one page holds."""
    rng = np.random.default_rng([int.from_bytes(digest[:8], "big"), version])
    out = bytearray(LAYOUT.block_layout.nbytes)
    for extent in LAYOUT.block_layout.extents:
        if extent.name == "key":
            data = rng.bytes(extent.nbytes)
        else:
            values = rng.choice(_NUMBERS, extent.nbytes // 2)
            values.reshape(LAYOUT.page_size, LAYOUT.kv_heads, -1)[0, :, 0] = _LARGEST
            data = values.tobytes()
        out[extent.offset : extent.offset + extent.nbytes] = data
    return bytes(out)


def fill(pages: Blocks, keys: Keys, version: int = 0) -> None:
    """Write what belongs to the keys."""
    for block, digest in zip(pages, keys.digests, strict=False):
        block.view(write=True)[:] = page_bytes(digest, version)


def poison(pages: Blocks) -> None:
    """Overwrite pages with what is never right."""
    for block in pages:
        block.view(write=True)[:] = bytes([POISON]) * block.nbytes


def versions_of(pages: Blocks, keys: Keys, count: int, newest: int) -> list[int | None]:
    """Which version each of the leading pages holds; None for bytes that were never put."""
    found: list[int | None] = []
    for block, digest in zip(pages, keys.digests[:count], strict=False):
        data = bytes(block.view())
        versions = range(newest, -1, -1)
        found.append(next((v for v in versions if data == page_bytes(digest, v)), None))
    return found
