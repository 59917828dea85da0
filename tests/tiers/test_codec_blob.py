"""Whole blobs: made in place, verified before anything is decoded."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiers.blobs import IDENTITY, codecs, encode, page, source

from tiers._errors import (
    ChecksumMismatch,
    ComponentMissing,
    DtypeMismatch,
    FormatError,
    LengthError,
    ProvenanceMismatch,
    ScaleError,
    SchemeMismatch,
)
from tiers._layout import ScaleScope
from tiers._team import Team
from tiers.codec import BLOB, ByteThroughCodec, K16V8Codec, V1Codec, V3Codec
from tiers.format import Strings, V1Header, V1Scope, as_bytes, parse_v3, seal_v1
from tiers.fp8 import decode_table
from tiers.testing import check_codec
from transfer._errors import LayoutMismatch


@pytest.mark.parametrize("name", codecs())
def test_the_contract(name: str) -> None:
    codec = codecs()[name]
    assert list(codec.outputs) == [BLOB]
    through = "producer" in name or name == "v2"
    lossy = {} if through or "value" not in codec.inputs else {"value": 0.05}
    check_codec(codec, lossy=lossy)


def destinations(codec: V1Codec | V3Codec) -> dict[str, bytearray]:
    return {name: bytearray(b"\xee" * part.nbytes) for name, part in codec.inputs.items()}


# case 30, any damage is found before a destination is touched
@pytest.mark.parametrize("name", codecs())
def test_a_damaged_blob_touches_nothing(name: str) -> None:
    codec = codecs()[name]
    blob = bytearray(encode(codec))
    rng = np.random.default_rng(9)
    into = destinations(codec)
    places = rng.integers(0, len(blob) * 8, 60).tolist()
    if name.startswith("v1"):  # the header of version 1 is covered by no checksum
        assert isinstance(codec, V1Codec)
        start = codec.header.header_bytes * 8
        places = [start + p % (len(blob) * 8 - start) for p in places]
    for bit in places:
        blob[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(FormatError):
            codec.decode({BLOB: blob}, into)
        blob[bit >> 3] ^= 1 << (bit & 7)
    assert all(set(room) == {0xEE} for room in into.values())
    codec.decode({BLOB: blob}, into)
    if "key" in into:
        assert into["key"] == source(codec)["key"]


# case 30, two files of equal size that were swapped
def test_a_blob_of_another_key_is_refused() -> None:
    codec = codecs()["v3 head"]
    assert isinstance(codec, V3Codec)
    other = codec.with_identity(replace(IDENTITY, key=bytes(32)))
    into = destinations(codec)
    with pytest.raises(ProvenanceMismatch, match="key digest"):
        other.decode({BLOB: encode(codec)}, into)
    assert all(set(room) == {0xEE} for room in into.values())
    anyone = V3Codec(codec.inner)
    anyone.decode({BLOB: encode(codec)}, into)
    with pytest.raises(LayoutMismatch, match="identity"):
        anyone.encode(source(codec), {BLOB: bytearray(codec.nbytes)})


def test_only_what_is_asked_for_is_verified() -> None:
    codec = codecs()["v3 head"]
    assert isinstance(codec, V3Codec)
    blob = bytearray(encode(codec))
    blob[4096] ^= 1
    into = destinations(codec)
    codec.decode({BLOB: blob}, {"value": into["value"]})
    with pytest.raises(ChecksumMismatch, match="key CRC"):
        codec.decode({BLOB: blob}, into)


def test_a_file_of_values_alone_knows_what_its_keys_are() -> None:
    alone = codecs()["v3 head value only"]
    whole = codecs()["v3 head"]
    assert isinstance(whole, V3Codec)
    assert list(alone.inputs) == ["value"]
    with pytest.raises(LayoutMismatch, match="key"):
        alone.decode({BLOB: encode(alone)}, {"key": bytearray(192)})
    with pytest.raises(ComponentMissing, match="key"):
        whole.decode({BLOB: encode(alone)}, {"key": bytearray(whole.inputs["key"].nbytes)})
    other = V3Codec(K16V8Codec(page(key="float16"), pages=2), names=["value", "value_scale"])
    with pytest.raises(DtypeMismatch, match="key dtype"):
        other.decode({BLOB: encode(alone)}, {"value": bytearray(other.inputs["value"].nbytes)})


def test_a_whole_blob_is_made_without_a_copy_in_aligned_memory() -> None:
    codec = codecs()["v3 head"]
    assert isinstance(codec, V3Codec)
    memory = memoryview(bytearray(codec.nbytes))
    encoded = codec.encode(source(codec), {BLOB: memory})
    assert np.shares_memory(
        np.frombuffer(encoded[BLOB].data, np.uint8), np.frombuffer(memory, np.uint8)
    )
    header = parse_v3(memory)
    key = header.plan.view(memory, "key")
    assert bytes(key) == source(codec)["key"]


def test_schemes_do_not_meet() -> None:
    layout = page().encoded(scope=ScaleScope.HEAD)
    through = V3Codec(ByteThroughCodec(layout, pages=2), identity=IDENTITY)
    computed = codecs()["v3 head"]
    with pytest.raises(SchemeMismatch):
        through.decode({BLOB: encode(computed)}, {"key": bytearray(through.inputs["key"].nbytes)})
    raw, plain = codecs()["v2"], codecs()["v1 tensor"]
    for reader, blob in ((raw, encode(plain)), (plain, encode(raw))):
        with pytest.raises(FormatError):
            reader.decode({BLOB: blob}, destinations(reader))


def test_version_2_keeps_codes_and_origin() -> None:
    shape = (3, 2, 4)
    codec = V1Codec(shape, value="float8_e4m3fn", strings=Strings(model_id="m"))
    codes = torch.arange(24, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(shape)
    keys = torch.randn(shape).bfloat16()
    room = bytearray(codec.outputs[BLOB].capacity)
    blob = codec.encode({"key": keys, "value": codes}, {BLOB: room})[BLOB].data
    back = torch.zeros(shape, dtype=torch.float8_e4m3fn)
    codec.decode({BLOB: blob}, {"value": back})
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
    silent = V1Codec(shape, value="float8_e4m3fn")
    blob = silent.encode({"key": keys, "value": codes}, {BLOB: bytearray(room)})[BLOB].data
    with pytest.raises(ProvenanceMismatch, match="model_id: found nothing, expected m"):
        codec.decode({BLOB: blob}, {"value": back})


# case 57, keys of another dtype; E other than the destination's
def test_version_1_is_read_as_what_it_is_only() -> None:
    blob = encode(codecs()["v1 tensor"])
    for other, error in (
        (V1Codec((3, 2, 4), key="float16"), DtypeMismatch),
        (V1Codec((3, 2, 5)), LengthError),
        (V1Codec((3, 2, 4), scope=V1Scope.HEAD), DtypeMismatch),
        (V1Codec((3, 2, 4), keys=False), ComponentMissing),
    ):
        with pytest.raises(error):
            other.decode({BLOB: blob}, destinations(other))
    wide = V1Codec((3, 2, 4), value="float32")
    wide.decode({BLOB: blob}, destinations(wide))


# case 59, scales per page and head, also with the head axis first
@pytest.mark.parametrize(("head_axis", "page_axis"), [(1, 0), (0, 1), (-2, -3), (2, 0)])
def test_scales_on_the_wire_are_pages_by_heads(head_axis: int, page_axis: int) -> None:
    torch.manual_seed(10)
    values = torch.randn(3, 4, 8).bfloat16()
    codec = V1Codec(
        (3, 4, 8), keys=False, scope=V1Scope.PAGE_HEAD, head_axis=head_axis, page_axis=page_axis
    )
    blob = encode_values(codec, values)
    pages, heads = values.shape[page_axis], values.shape[head_axis]
    assert codec.header.scale_shape == (pages, heads)
    rest = next(a for a in range(3) if a not in {head_axis % 3, page_axis % 3})
    expected = values.float().abs().amax(dim=rest) / 448
    if page_axis % 3 > head_axis % 3:
        expected = expected.T
    assert np.array_equal(
        np.frombuffer(blob[-4 * pages * heads :], "<f4").reshape(pages, heads), expected.numpy()
    )
    back = torch.zeros_like(values)
    codec.decode({BLOB: blob}, {"value": back})
    assert float((back - values).norm() / values.norm()) < 0.05


def encode_values(codec: V1Codec, values: torch.Tensor) -> bytes:
    room = bytearray(codec.outputs[BLOB].capacity)
    return bytes(codec.encode({"value": values}, {BLOB: room})[BLOB].data)


def test_external_scales_come_from_the_caller() -> None:
    codes = os.urandom(24).replace(b"\x7f", b"\0").replace(b"\xff", b"\0")
    header = V1Header(scope=V1Scope.EXTERNAL, key="bfloat16", key_bytes=0, value_bytes=24)
    blob = bytearray(header.nbytes)
    blob[header.header_bytes :] = codes
    seal_v1(header, as_bytes(blob), Team())
    codec = V1Codec((3, 2, 4), value="float32", keys=False, scope=V1Scope.HEAD)
    back = torch.zeros(3, 2, 4)
    scales = np.array([2.0, 0.5], np.float32)
    codec.decode({BLOB: blob}, {"value": back}, scales=scales)
    table = decode_table("float8_e4m3fn")[np.frombuffer(codes, np.uint8)].reshape(3, 2, 4)
    assert np.array_equal(back.numpy(), table * scales[None, :, None])
    bad: list[Any] = [None, np.ones(3, np.float32), np.array([1.0, np.nan], np.float32)]
    for given in bad:
        with pytest.raises(ScaleError, match="external"):
            codec.decode({BLOB: blob}, {"value": back}, scales=given)


@pytest.mark.parametrize(
    "options",
    [
        {"value": "float8_e5m2"},
        {"value": "uint8"},
        {"scope": V1Scope.EXTERNAL},
        {"scope": V1Scope.PAGE_HEAD},
        {"scope": V1Scope.HEAD, "head_axis": 3},
    ],
)
def test_what_version_1_does_not_have_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LayoutMismatch, match="expected"):
        V1Codec((3, 2, 4), **options)


def test_sizes_of_the_payload() -> None:
    """With K16/V8 and X bytes of V8: 3X together, 2X + 1X split, of 4X in 16 bit."""
    shape = (64, 8, 128)
    count = 64 * 8 * 128
    assert V1Codec(shape).header.payload_bytes == 3 * count + 4
    assert V1Codec(shape, keys=False).header.payload_bytes == count + 4
    assert V1Codec(shape).header.header_bytes == 213
    parts = K16V8Codec(page()).outputs
    assert parts["key"].capacity == 2 * parts["value"].capacity
