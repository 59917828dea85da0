"""Valid blobs of every version, small enough to be turned over bit by bit."""

import numpy as np

from tiers._layout import PageLayout, PageOrder, ScaleScope
from tiers.codec import BLOB, ByteThroughCodec, K16V8Codec, V1Codec, V3Codec
from tiers.format import Identity, Strings, V1Scope

IDENTITY = Identity(
    key=bytes(range(32)), provenance=bytes(range(0x30, 0x50)), put=bytes(range(0x20, 0x30))
)


def page(
    order: PageOrder = PageOrder.NHD, *, key: str = "bfloat16", value: str | None = "bfloat16"
) -> PageLayout:
    return PageLayout(
        layers=2, page_size=4, kv_heads=2, head_dim=6, order=order, key=key, value=value
    )


def source(codec: V1Codec | V3Codec, seed: int = 0) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    found = {}
    for name, part in codec.inputs.items():
        numbers = rng.standard_normal(part.elements).astype("<f4")
        if part.dtype == "bfloat16":
            found[name] = (numbers.view("<u4") >> np.uint32(16)).astype("<u2").tobytes()
        elif part.dtype == "float16":
            found[name] = numbers.astype("<f2").tobytes()
        elif part.dtype == "float32":
            found[name] = abs(numbers).tobytes()
        else:
            found[name] = rng.integers(0, 127, part.nbytes, dtype=np.uint8).tobytes()
    return found


def encode(codec: V1Codec | V3Codec, seed: int = 0) -> bytes:
    blob = bytearray(codec.outputs[BLOB].capacity)
    return bytes(codec.encode(source(codec, seed), {BLOB: blob})[BLOB].data)


def codecs() -> dict[str, V1Codec | V3Codec]:
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
        "v3 latent": V3Codec(K16V8Codec(page(value=None)), identity=IDENTITY),
    }
    for scope in ScaleScope:
        inner = K16V8Codec(page(), pages=2, scope=scope)
        found[f"v3 {scope}"] = V3Codec(inner, identity=IDENTITY)
        names = ("value", "value_scale")
        found[f"v3 {scope} value only"] = V3Codec(inner, names=names, identity=IDENTITY)
    through = ByteThroughCodec(page(PageOrder.HND).encoded(scope=ScaleScope.PAGE_HEAD))
    found["v3 producer"] = V3Codec(through, identity=IDENTITY)
    return found
