"""Keys bit for bit, values through FP8, each part to a place of its own."""

import os
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tiers import _fp8_cast
from tiers._errors import ComponentMissing, NonFiniteValue, ScaleError
from tiers._layout import PageLayout, PageOrder, ScaleScope, StaticScales
from tiers._team import Team
from tiers.codec import ByteThroughCodec, Encoded, K16V8Codec
from tiers.fp8 import Counts, quantize
from tiers.testing import check_codec
from transfer._errors import LayoutMismatch


def page(order: PageOrder = PageOrder.NHD, **changes: Any) -> PageLayout:
    sizes: dict[str, Any] = {"layers": 2, "page_size": 4, "kv_heads": 2, "head_dim": 6}
    return PageLayout(order=order, **{**sizes, **changes})


def buffers(codec: K16V8Codec | ByteThroughCodec) -> dict[str, bytearray]:
    return {name: bytearray(output.capacity) for name, output in codec.outputs.items()}


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("scope", ScaleScope)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_contract(order: PageOrder, scope: ScaleScope, dtype: str) -> None:
    codec = K16V8Codec(page(order, value=dtype), pages=3, scope=scope)
    assert len(codec.outputs) == 3
    check_codec(codec, lossy={"value": 0.05})


@pytest.mark.parametrize("value", ["float8_e5m2", "float8_e4m3fnuz"])
def test_the_contract_with_other_formats(value: str) -> None:
    check_codec(K16V8Codec(page(), value=value), lossy={"value": 0.09})


def test_the_contract_of_a_single_component() -> None:
    codec = K16V8Codec(page(kv_heads=1, head_dim=36, value=None))
    assert list(codec.outputs) == ["key"]
    check_codec(codec)


@pytest.mark.parametrize("scope", [*ScaleScope, None])
@pytest.mark.parametrize("value", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_the_contract_of_byte_through(scope: ScaleScope | None, value: str) -> None:
    codec = ByteThroughCodec(page().encoded(value=value, scope=scope))
    assert len(codec.outputs) == (2 if scope is None else 3)
    check_codec(codec)


# case 57, every pattern of 16 bits, NaN payloads included, comes back as it went in
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_are_exact_in_every_bit(dtype: str) -> None:
    layout = page(layers=1, page_size=512, kv_heads=1, head_dim=128, key=dtype)
    codec = K16V8Codec(layout)
    keys = np.arange(65536, dtype="<u2").tobytes()
    encoded = codec.encode({"key": keys}, {"key": bytearray(len(keys))})
    back = torch.zeros(layout.component("key").shape, dtype=getattr(torch, dtype))
    codec.decode(encoded, {"key": back})
    assert back.view(torch.uint8).numpy().tobytes() == keys


# case 56, every one of the 256 codes passes through unchanged
def test_codes_pass_through_bit_for_bit() -> None:
    layout = page(layers=1, page_size=4, kv_heads=1, head_dim=64).encoded(scope=ScaleScope.HEAD)
    codec = ByteThroughCodec(layout)
    source: dict[str, bytes] = {
        "key": os.urandom(512),
        "value": bytes(range(256)),
        "value_scale": np.float32(0.125).tobytes(),
    }
    encoded = codec.encode(source, buffers(codec))
    assert {name: bytes(one.data) for name, one in encoded.items()} == source
    into = torch.zeros(layout.component("value").shape, dtype=torch.float8_e4m3fn)
    codec.decode(encoded, {"value": into})
    assert into.view(torch.uint8).numpy().tobytes() == source["value"]
    other = torch.zeros(layout.component("value").shape, dtype=torch.float8_e4m3fnuz)
    with pytest.raises(LayoutMismatch, match="float8_e4m3fnuz"):
        codec.decode(encoded, {"value": other})


def test_a_producers_scale_has_to_be_good() -> None:
    codec = ByteThroughCodec(page().encoded(scope=ScaleScope.TENSOR))
    bad = np.array([1.0, np.inf], np.float32).tobytes()
    room = {"value_scale": bytearray(8)}
    with pytest.raises(ScaleError):
        codec.encode({"value_scale": bad}, room)
    assert room["value_scale"] == bytes(8)
    with pytest.raises(ScaleError):
        codec.decode({"value_scale": bad}, {"value_scale": bytearray(8)})
    with pytest.raises(LayoutMismatch, match="expected FP8"):
        ByteThroughCodec(page())
    with pytest.raises(LayoutMismatch, match="full-width"):
        K16V8Codec(page().encoded(scope=ScaleScope.HEAD))


def test_values_and_scales_go_together() -> None:
    codec = K16V8Codec(page())
    source = {name: bytes(part.nbytes) for name, part in codec.inputs.items()}
    with pytest.raises(ComponentMissing, match="values and scales"):
        codec.encode(source, {"value": bytearray(10_000)})
    with pytest.raises(ComponentMissing, match="expected value"):
        codec.encode({"key": source["key"]}, buffers(codec))
    encoded = codec.encode(source, buffers(codec))
    with pytest.raises(ComponentMissing, match="value_scale"):
        codec.decode({"value": encoded["value"]}, {"value": bytearray(192)})


def test_a_bad_scale_is_refused_before_the_destination_is_touched() -> None:
    codec = K16V8Codec(page())
    source = {name: bytes(part.nbytes) for name, part in codec.inputs.items()}
    parts = {
        name: bytearray(one.data) for name, one in codec.encode(source, buffers(codec)).items()
    }
    parts["value_scale"][3] = 0x80
    into = {"key": bytearray(b"\xee" * 192), "value": bytearray(b"\xee" * 192)}
    with pytest.raises(ScaleError):
        codec.decode(parts, into)
    assert set(into["key"]) == set(into["value"]) == {0xEE}


# case 53, counted or refused, as the caller asks
def test_values_that_are_not_finite_are_counted_or_refused() -> None:
    values = torch.randn(page().component("value").shape).bfloat16()
    values[0, 0, 0, 0, 0] = float("nan")
    values[1, 0, 0, 0, 0] = float("inf")
    codec = K16V8Codec(page())
    rooms = {"value": bytearray(192), "value_scale": bytearray(16)}
    encoded = codec.encode({"value": values}, rooms)
    assert encoded["value"].counts == Counts(nan=1, infinite=1)
    strict = K16V8Codec(page(), nonfinite="refuse")
    rooms = {name: bytearray(b"\xee" * 192) for name in rooms}
    with pytest.raises(NonFiniteValue):
        strict.encode({"value": values}, rooms)
    assert all(set(room) == {0xEE} for room in rooms.values())


# case 16, the same numbers in both orders; case 17, strided sources and destinations
def test_both_orders_hold_the_same_numbers() -> None:
    torch.manual_seed(7)
    values = torch.randn(page(page_size=2).component("value").shape).bfloat16()
    for scope in ScaleScope:
        plain = K16V8Codec(page(page_size=2), scope=scope)
        turned = K16V8Codec(page(PageOrder.HND, page_size=2), scope=scope)
        rooms = {name: room for name, room in buffers(plain).items() if name != "key"}
        first = plain.encode({"value": values}, rooms)
        rooms = {name: room for name, room in buffers(turned).items() if name != "key"}
        second = turned.encode({"value": values.transpose(2, 3)}, rooms)
        shape = plain.outputs["value"].part.shape
        codes = np.frombuffer(first["value"].data, np.uint8).reshape(shape)
        other = np.frombuffer(second["value"].data, np.uint8).reshape(
            turned.outputs["value"].part.shape
        )
        assert np.array_equal(codes, other.swapaxes(2, 3))
        expected, scales = quantize(
            values, shared=[i for i, axis in enumerate("LPTHD") if axis not in scope.kept]
        )
        assert np.array_equal(codes, expected.view(torch.uint8).numpy())
        assert bytes(first["value_scale"].data) == scales.numpy().tobytes()
        back = torch.full((2, 1, 2, 2, 12), 9.0).bfloat16()
        plain.decode(first, {"value": back[..., :6]})
        assert torch.equal(back[..., :6], (expected.float() * scales).bfloat16())
        assert bool((back[..., 6:] == 9).all())


@pytest.mark.parametrize("scope", ScaleScope)
def test_encoding_allocates_nothing_once_it_is_warm(scope: ScaleScope) -> None:
    layout = page(layers=4, page_size=16, kv_heads=8, head_dim=128)
    codec = K16V8Codec(layout, scope=scope)
    values = torch.randn(layout.component("value").shape).bfloat16()
    source, rooms = {"key": values, "value": values}, buffers(codec)
    back = {"key": torch.zeros_like(values), "value": torch.zeros_like(values)}

    def once() -> None:
        codec.decode(codec.encode(source, rooms), back)

    once()
    assert traced_peak(once) < values.nbytes // 2
    assert traced_peak(values.clone) >= values.nbytes  # the control: a copy is seen
    assert traced_peak(lambda: np.zeros(values.nbytes, np.uint8)) >= values.nbytes


def traced_peak(call: Any) -> int:
    """Most memory that numpy and torch's CPU allocator took at any time during a call."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    taken = sum(e.self_cpu_memory_usage for e in seen.events() if e.self_cpu_memory_usage > 0)
    return int(peak + taken)


def test_threads_give_the_bytes_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fp8_cast, "SHARE", 1024)
    layout = page(layers=2, page_size=64, kv_heads=4, head_dim=64)
    source = {name: torch.randn(2, 64, 4, 64).bfloat16() for name in ("key", "value")}
    found = []
    for threads in (1, 2):
        with Team(threads) as team:
            codec = K16V8Codec(layout, team=team)
            found.append(codec.encode(source, buffers(codec)))
    assert {n: bytes(e.data) for n, e in found[0].items()} == {
        n: bytes(e.data) for n, e in found[1].items()
    }


def test_a_codec_serves_several_threads_at_once() -> None:
    layout = page(layers=2, page_size=32, kv_heads=4, head_dim=64)
    codec = K16V8Codec(layout)
    sources = [torch.randn(2, 32, 4, 64).bfloat16() for _ in range(4)]
    expected = [codec.encode({"key": s, "value": s}, buffers(codec)) for s in sources]
    failures: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            own = codec.encode({"key": sources[index], "value": sources[index]}, buffers(codec))
            if {n: bytes(e.data) for n, e in own.items()} != plain(expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def plain(encoded: dict[str, Encoded]) -> dict[str, bytes]:
    return {name: bytes(one.data) for name, one in encoded.items()}


@pytest.mark.parametrize("scope", ScaleScope)
def test_the_error_of_decoded_gaussian_values_is_the_formats(scope: ScaleScope) -> None:
    torch.manual_seed(8)
    layout = page(layers=8, page_size=16, kv_heads=8, head_dim=128)
    values = torch.randn(layout.component("value").shape).bfloat16()
    codec = K16V8Codec(layout, scope=scope)
    encoded = codec.encode({"key": values, "value": values}, buffers(codec))
    back = torch.zeros_like(values)
    codec.decode(encoded, {"value": back})
    exact = values.double()
    error = float(((back.double() - exact).square().sum() / exact.square().sum()).sqrt())
    low, high = (0.0245, 0.0262) if scope is ScaleScope.TOKEN_HEAD else (0.0264, 0.0267)
    assert low <= error <= high
    assert encoded["key"].nbytes == 2 * encoded["value"].nbytes


# case 51, no pages at all, and pages of one token
@pytest.mark.parametrize("pages", [0, 1])
def test_few_and_no_pages(pages: int) -> None:
    codec = K16V8Codec(page(page_size=1), pages=pages)
    source = {name: os.urandom(part.nbytes) for name, part in codec.inputs.items()}
    source["value"] = bytes(codec.inputs["value"].nbytes)
    encoded = codec.encode(source, buffers(codec))
    into = {name: bytearray(part.nbytes) for name, part in codec.inputs.items()}
    codec.decode(encoded, into)
    assert into == source


STATIC = {
    ScaleScope.TENSOR: StaticScales(ScaleScope.TENSOR, [0.5, 3.0]),
    ScaleScope.HEAD: StaticScales(ScaleScope.HEAD, [[0.5, 3.0], [0.25, 1.5]]),
}


@pytest.mark.parametrize("scope", STATIC)
@pytest.mark.parametrize("order", PageOrder)
def test_the_contract_of_static_scales(order: PageOrder, scope: ScaleScope) -> None:
    layout = page(order).encoded(scope=None)
    codec = ByteThroughCodec(layout, pages=3, static_scales=STATIC[scope])
    assert list(codec.inputs) == ["key", "value"]
    assert list(codec.outputs) == ["key", "value", "value_scale"]
    assert codec.encoded_layout == page(order).encoded(scope=scope)
    check_codec(codec)


def test_static_scales_go_along_and_have_to_be_the_readers() -> None:
    layout = page().encoded(scope=None)
    codec = ByteThroughCodec(layout, static_scales=STATIC[ScaleScope.HEAD])
    value = bytes(range(0x10, 0x10 + 96))
    source = {"value": value, "key": bytes(192)}
    into = buffers(codec)
    codec.encode(source, into)
    assert bytes(into["value"]) == value
    assert bytes(into["value_scale"]) == STATIC[ScaleScope.HEAD].data
    other = StaticScales(ScaleScope.HEAD, [[0.5, 3.0], [0.25, 1.5000001]])
    reader = ByteThroughCodec(layout, static_scales=other)
    back = bytearray(b"\xa5" * 96)
    with pytest.raises(ScaleError, match="static scales"):
        reader.decode(into, {"value": back})
    assert back == bytearray(b"\xa5" * 96)
    codec.decode(into, {"value": back})
    assert bytes(back) == value
    assert codec.needs("value") == {"value", "value_scale"}
    assert codec.needs("key") == {"key"}


def test_static_scales_are_for_values_without_their_own() -> None:
    with pytest.raises(LayoutMismatch, match="without scales of their own"):
        ByteThroughCodec(
            page().encoded(scope=ScaleScope.HEAD), static_scales=STATIC[ScaleScope.HEAD]
        )
