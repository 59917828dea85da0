"""Writing version 3: the document's vectors, and the reader that was written from it."""

import hashlib
import itertools
import struct

import numpy as np
import pytest
from tests.tiers.blobs import IDENTITY, codecs, encode, page, source
from tests.tiers.format_v3_reader import Refused, decode_values, read

from tiers._errors import ComponentMissing, LengthError
from tiers._format_common import Scheme, as_bytes
from tiers._format_v3 import Identity, encoded_size, plan_v3, seal_v3
from tiers._format_v3_read import parse_v3
from tiers._layout import PageLayout, PageOrder, ScaleScope
from tiers._team import Team
from tiers.codec import BLOB, V3Codec
from transfer._errors import LayoutMismatch


def seal(
    layout: PageLayout,
    parts: dict[str, bytes],
    *,
    pages: int = 1,
    scheme: Scheme = Scheme.COMPUTED,
) -> bytes:
    plan = plan_v3(layout, pages=pages, names=parts, scheme=scheme)
    blob = bytearray(b"\xaa" * plan.nbytes)
    for name, data in parts.items():
        plan.view(memoryview(blob), name)[:] = data
    seal_v3(plan, memoryview(blob), IDENTITY, Team())
    return bytes(blob)


def vector_a() -> bytes:
    layout = PageLayout(
        layers=1,
        page_size=2,
        kv_heads=1,
        head_dim=2,
        order=PageOrder.NHD,
        value="float8_e4m3fn",
        scope=ScaleScope.TENSOR,
    )
    parts = {"value": bytes.fromhex("69fe0039"), "value_scale": bytes.fromhex("b76ddb3b")}
    return seal(layout, parts)


def vector_b() -> bytes:
    layout = PageLayout(
        layers=2,
        page_size=3,
        kv_heads=2,
        head_dim=4,
        order=PageOrder.HND,
        key="float16",
        value="float8_e4m3fn",
        scope=ScaleScope.PAGE_HEAD,
    )
    parts = {
        "key": struct.pack("<96e", *range(96)),
        "value": bytes((5 * i) % 127 for i in range(96)),
        "value_scale": struct.pack("<8f", *((1 + i) / 8 for i in range(8))),
    }
    return seal(layout, parts, pages=2, scheme=Scheme.PRODUCER_SCALED)


def vector_c() -> bytes:
    layout = PageLayout(
        layers=2, page_size=4, kv_heads=1, head_dim=6, order=PageOrder.NHD, value=None
    )
    return seal(layout, {"key": struct.pack("<48H", *range(48))})


@pytest.mark.parametrize(
    ("blob", "digest"),
    [
        (vector_a(), "aba0b878cc02267068470fb4f2f318b56e7a455a25ab5daba11195276fe00a26"),
        (vector_b(), "b1167c0196c105c468078388c40b8f125d8020f53a45867ed8c6804c92305a1f"),
        (vector_c(), "ac05cac8596946e5e84494390fdae3bb1604ac490b294283b9ae82a9e38d9c6f"),
    ],
    ids="abc",
)
def test_the_documents_vectors(blob: bytes, digest: str) -> None:
    assert hashlib.sha256(blob).hexdigest() == digest
    assert read(blob).key_digest == IDENTITY.key
    assert parse_v3(as_bytes(blob)).identity == IDENTITY


@pytest.mark.parametrize("name", [name for name in codecs() if name.startswith("v3")])
def test_the_documents_reader_reads_what_we_write(name: str) -> None:
    codec = codecs()[name]
    assert isinstance(codec, V3Codec)
    blob = encode(codec)
    found = read(blob)
    assert (found.key_digest, found.provenance, found.put_id) == (
        IDENTITY.key,
        IDENTITY.provenance,
        IDENTITY.put,
    )
    assert list(found.components) == [s.part.name for s in codec.plan.sections]
    given = source(codec)
    if "key" in found.components:
        assert found.components["key"].data == given["key"]
    for section in codec.plan.sections:
        part = found.components[section.part.name]
        expected = (section.part.dtype, section.part.axes, section.part.shape)
        assert (part.dtype, part.axes, part.shape) == expected
        assert section.offset % 4096 == section.end % 4096 == 0
    if "value" in codec.inputs and codec.inputs["value"].dtype == "bfloat16":
        into = bytearray(codec.inputs["value"].nbytes)
        codec.decode({BLOB: blob}, {"value": into})
        assert np.frombuffer(into, "<u2").tolist() == decode_values(found)


def test_the_documents_reader_refuses_what_it_has_to() -> None:
    blob = bytearray(vector_b())
    for bit in itertools.chain(range(0, 4096 * 8, 7), range(4096 * 8, len(blob) * 8, 101)):
        blob[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(Refused):
            read(bytes(blob))
        blob[bit >> 3] ^= 1 << (bit & 7)
    read(bytes(blob))


def test_sizes_are_known_in_advance() -> None:
    layout = page().encoded(scope=ScaleScope.HEAD)
    assert encoded_size(layout) == 4 * 4096
    assert encoded_size(layout, names=["value", "value_scale"]) == 3 * 4096
    assert encoded_size(layout, names=["key"]) == 2 * 4096
    big = PageLayout(layers=32, page_size=16, kv_heads=8, head_dim=128, order=PageOrder.NHD)
    values = 32 * 16 * 8 * 128
    split = big.encoded(scope=ScaleScope.HEAD)
    assert encoded_size(split, names=["value", "value_scale"]) == 4096 + values + 4096
    assert encoded_size(split) == 4096 + 3 * values + 4096
    codec = codecs()["v3 head"]
    assert isinstance(codec, V3Codec)
    assert codec.nbytes == len(encode(codec))


def test_a_blob_that_the_format_cannot_hold_is_not_planned() -> None:
    layout = page().encoded(scope=ScaleScope.HEAD)
    for bad in (["value"], ["value_scale"], ["key", "value"], [], ["keys"]):
        with pytest.raises(LayoutMismatch, match="expected"):
            plan_v3(layout, names=bad)
    with pytest.raises(LayoutMismatch, match="pages"):
        plan_v3(layout, pages=0)
    with pytest.raises(LayoutMismatch, match="scale scope"):
        plan_v3(page())
    with pytest.raises(LayoutMismatch, match="scheme"):
        plan_v3(layout, scheme=Scheme.RAW_UNIT)


def test_sealing_wants_the_planned_length_and_an_identity_of_its_lengths() -> None:
    plan = plan_v3(page().encoded(scope=ScaleScope.HEAD))
    with pytest.raises(LengthError, match=str(plan.nbytes)):
        seal_v3(plan, memoryview(bytearray(plan.nbytes - 1)), IDENTITY, Team())
    with pytest.raises(ComponentMissing):
        plan_v3(page().encoded(scope=ScaleScope.HEAD), names=["key"]).section("value")
    with pytest.raises(ValueError, match="32, 32, 16"):
        Identity(key=b"", provenance=bytes(32), put=bytes(16))
