"""Valid blobs of every version, small enough to be turned over bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiers._layout import PageLayout, PageOrder, ScaleScope
from tiers.codec import BLOB, ByteThroughCodec, K16V8Codec, V1Codec, V3Codec
from tiers.format import Identity, Strings, V1Scope

if TYPE_CHECKING:
    from tiers._layout import Component
    from tiers.codec import Codec

IDENTITY: Final = Identity(
    key=bytes(range(32)), provenance=bytes(range(0x30, 0x50)), put=bytes(range(0x20, 0x30))
)


def sample_page(
    order: PageOrder = PageOrder.NHD, *, key: str = "bfloat16", value: str | None = "bfloat16"
) -> PageLayout:
    """A page of 2 layers, 4 tokens, 2 heads and rows of 6 elements."""
    return PageLayout(
        layers=2, page_size=4, kv_heads=2, head_dim=6, order=order, key=key, value=value
    )


def sample_source(codec: Codec, seed: int = 0) -> dict[str, bytes]:
    """Inputs of a codec: finite Gaussian numbers, positive scales, FP8 codes that are not NaN."""
    rng = np.random.default_rng(seed)
    return {name: _random_part(part, rng) for name, part in codec.inputs.items()}


def _random_part(part: Component, rng: np.random.Generator) -> bytes:
    if part.dtype == "bfloat16":
        wide = rng.standard_normal(part.elements).astype("<f4").view("<u4")
        return (wide >> np.uint32(16)).astype("<u2").tobytes()
    known = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}.get(part.dtype)
    if known is None:
        return rng.integers(0, 127, part.nbytes, dtype=np.uint8).tobytes()
    numbers = rng.standard_normal(part.elements)
    # Scales are positive, and nothing else minds.
    return (abs(numbers) if part.name.endswith("scale") else numbers).astype(known).tobytes()


def sample_blob(codec: V1Codec | V3Codec, seed: int = 0) -> bytes:
    """A valid blob of random contents."""
    blob = bytearray(codec.outputs[BLOB].capacity)
    return bytes(codec.encode(sample_source(codec, seed), {BLOB: blob})[BLOB].data)


def sample_codecs() -> dict[str, V1Codec | V3Codec]:
    """One codec for each kind of blob."""
    strings = Strings(model_id="m", kv_layout="NHD")
    shape = (3, 2, 4)
    found: dict[str, V1Codec | V3Codec] = {
        "v1 tensor": V1Codec(shape),
        "v1 value only": V1Codec(shape, keys=False, strings=strings),
        "v1 head": V1Codec(shape, key="float16", value="float16", scope=V1Scope.HEAD),
        "v1 page head": V1Codec(
            shape,
            scope=V1Scope.PAGE_HEAD,
            head_axis=1,
            page_axis=0,
            strings=strings,
            numbers={"layer_id": 3, "page_size": 16, "kv_head_count": 2, "head_dim": 4},
        ),
        "v2": V1Codec(shape, value="float8_e4m3fn", strings=strings),
        "v3 latent": V3Codec(K16V8Codec(sample_page(value=None)), identity=IDENTITY),
    }
    for scope in ScaleScope:
        inner = K16V8Codec(sample_page(), pages=2, scope=scope)
        found[f"v3 {scope}"] = V3Codec(inner, identity=IDENTITY)
        names = ("value", "value_scale")
        found[f"v3 {scope} value only"] = V3Codec(inner, names=names, identity=IDENTITY)
    through = ByteThroughCodec(sample_page(PageOrder.HND).encoded(scope=ScaleScope.PAGE_HEAD))
    found["v3 producer"] = V3Codec(through, identity=IDENTITY)
    return found
