"""The conformance suite itself: good codecs of one, two and three outputs pass, broken ones do not."""

import zlib
from collections.abc import Mapping
from typing import Any

import pytest
from tests.tiers.blobs import page

from tiers._errors import CapacityExceeded, LengthError
from tiers._layout import Component, ScaleScope
from tiers.codec import Encoded, K16V8Codec, Memory, Output
from tiers.testing import check_codec
from transfer._errors import LayoutMismatch


class ZlibCodec:
    """Each input compressed on its own: lengths depend on the data, not on any layout."""

    def __init__(self, names: tuple[str, ...] = ("key", "value")) -> None:
        layout = page()
        self.inputs: Mapping[str, Component] = {name: layout.component(name) for name in names}
        self.outputs: Mapping[str, Output] = {
            f"{name}.z": Output(
                Component(f"{name}.z", "", (part.nbytes + 64,), "uint8"), part.nbytes + 64
            )
            for name, part in self.inputs.items()
        }

    def needs(self, name: str) -> frozenset[str]:
        return frozenset({f"{name}.z"})

    def raw(self, name: str, given: Memory) -> memoryview:
        view = memoryview(given).cast("B")
        if len(view) != self.inputs[name].nbytes:
            raise LayoutMismatch(f"{name}: {len(view)} bytes")
        return view

    def check(self, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        if set(given) - set(known):
            raise LayoutMismatch(f"unknown {set(given) - set(known)}")

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        self.check(source, self.inputs)
        self.check(into, self.outputs)
        for name, room in into.items():
            if len(room) < self.outputs[name].capacity:
                raise CapacityExceeded(name)
        data = {name: self.raw(name, given) for name, given in source.items()}
        return {name: self.one(name, data[name[:-2]], into[name]) for name in into}

    def one(self, name: str, data: memoryview, room: Any) -> Encoded:
        packed = zlib.compress(data)
        room[: len(packed)] = packed
        return Encoded(self.outputs[name].part, memoryview(room)[: len(packed)])

    def decode(self, encoded: Mapping[str, Any], into: Mapping[str, Memory]) -> None:
        self.check(into, self.inputs)
        targets = {name: self.raw(name, given) for name, given in into.items()}
        found = {name: self.unpack(name, encoded[f"{name}.z"]) for name in targets}
        for name, target in targets.items():
            target[:] = found[name]

    def unpack(self, name: str, given: Any) -> bytes:
        data = given.data if isinstance(given, Encoded) else given
        size = self.inputs[name].nbytes
        reader = zlib.decompressobj()
        try:
            plain = reader.decompress(data, size + 1)
        except zlib.error as error:
            raise LengthError(name, found=str(error), expected="zlib data") from None
        if len(plain) != size or reader.unused_data or not reader.eof:
            raise LengthError(name, found=len(plain), expected=size)
        return plain


@pytest.mark.parametrize("names", [("key",), ("key", "value")])
def test_lengths_that_depend_on_the_data_pass(names: tuple[str, ...]) -> None:
    codec = ZlibCodec(names)
    assert len(codec.outputs) == len(names)
    check_codec(codec)
    lengths = {
        codec.encode({"key": s}, {"key.z": bytearray(256)})["key.z"].nbytes
        for s in (bytes(192), bytes(range(192)))
    }
    assert len(lengths) == 2


class LengthFromLayout(ZlibCodec):
    """Says that an output is as long as its layout."""

    def one(self, name: str, data: memoryview, room: Any) -> Encoded:
        super().one(name, data, room)
        return Encoded(self.outputs[name].part, memoryview(room)[: self.outputs[name].capacity])


class WritesBehind(ZlibCodec):
    """Clears the rest of the buffer."""

    def one(self, name: str, data: memoryview, room: Any) -> Encoded:
        encoded = super().one(name, data, room)
        room[encoded.nbytes] = 0
        return encoded


class OwnMemory(ZlibCodec):
    """Hands out memory of its own."""

    def one(self, name: str, data: memoryview, room: Any) -> Encoded:
        encoded = super().one(name, data, room)
        return Encoded(encoded.part, memoryview(bytes(encoded.data)))


class OtherLayout(ZlibCodec):
    """Gives every output the same layout."""

    def one(self, name: str, data: memoryview, room: Any) -> Encoded:
        return Encoded(Component("x", "", (1,), "uint8"), super().one(name, data, room).data)


class EncodesAll(ZlibCodec):
    """Encodes what was not asked for."""

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        rooms = {name: into.get(name, bytearray(o.capacity)) for name, o in self.outputs.items()}
        return super().encode(source, rooms)


class TouchesTooEarly(ZlibCodec):
    """Clears its destinations before it has looked at the data."""

    def decode(self, encoded: Mapping[str, Any], into: Mapping[str, Memory]) -> None:
        for name, given in into.items():
            if name in self.inputs:
                given[:] = bytes(len(given))
        super().decode(encoded, into)


class LossyKeys(ZlibCodec):
    """Loses a bit of the last byte."""

    def decode(self, encoded: Mapping[str, Any], into: Mapping[str, Memory]) -> None:
        super().decode(encoded, into)
        for given in into.values():
            if len(given):
                given[-1] ^= 1


class UntypedRefusal(ZlibCodec):
    """Lets the library's own error out."""

    def unpack(self, name: str, given: Any) -> bytes:
        return zlib.decompress(given.data if isinstance(given, Encoded) else given)


class IgnoresCapacity(ZlibCodec):
    """Fits by luck."""

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        self.check(source, self.inputs)
        self.check(into, self.outputs)
        return {n: self.one(n, self.raw(n[:-2], source[n[:-2]]), into[n]) for n in into}


class ChangesWithTime(ZlibCodec):
    """Gives other bytes every time."""

    calls = 0

    def one(self, name: str, data: memoryview, room: Any) -> Encoded:
        self.calls += 1
        packed = zlib.compress(data, 9 if self.calls % 3 else 0)
        room[: len(packed)] = packed
        return Encoded(self.outputs[name].part, memoryview(room)[: len(packed)])


# Seeded bugs: the suite has to see each one.
@pytest.mark.parametrize(
    "broken",
    [
        LengthFromLayout,
        WritesBehind,
        OwnMemory,
        OtherLayout,
        EncodesAll,
        TouchesTooEarly,
        LossyKeys,
        UntypedRefusal,
        IgnoresCapacity,
        ChangesWithTime,
    ],
)
def test_a_broken_codec_is_seen(broken: type[ZlibCodec]) -> None:
    with pytest.raises((AssertionError, zlib.error, LengthError)):
        check_codec(broken())


def test_a_loss_larger_than_stated_is_seen() -> None:
    codec = K16V8Codec(page(), scope=ScaleScope.HEAD)
    check_codec(codec, lossy={"value": 0.05})
    with pytest.raises(AssertionError, match="relative error"):
        check_codec(codec, lossy={"value": 0.005})
    with pytest.raises(AssertionError, match="bit for bit"):
        check_codec(codec)


def test_sources_of_ones_own() -> None:
    codec = ZlibCodec(("key",))
    check_codec(codec, sources=[{"key": bytes(192)}, {"key": bytes(range(192))}])
