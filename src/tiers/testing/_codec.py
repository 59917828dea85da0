"""What any codec has to do, as a suite that its author runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiers._errors import CapacityExceeded, TierError
from tiers.codec import encode_job
from tiers.testing._blobs import sample_source
from transfer._errors import BadWork

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from tiers._codec_parts import Encoded
    from tiers._layout import Component
    from tiers.codec import Codec

POISON: Final = 0xA5
_TAIL: Final = 37


def check_codec(
    codec: Codec,
    *,
    lossy: Mapping[str, float] | None = None,
    seed: int = 0,
    sources: Collection[Mapping[str, bytes]] = (),
) -> None:
    """Hold a codec against the contract of `Codec`.

    Every output arrives with its layout and its actual length, in the buffer that was given for it;
    nothing behind that length is written. What is absent stays untouched. Decoding takes the actual
    length, not one that a layout suggests. A refusal is typed and comes before the first byte.

    Args:
        codec: what to test.
        lossy: inputs that do not come back bit for bit, with the largest relative RMS error.
        seed: seeds the random inputs.
        sources: inputs to use instead, each as bytes by name; two or more of different content.

    Raises:
        AssertionError: the contract is broken; says where.
    """
    assert codec.inputs, "a codec has inputs"
    assert codec.outputs, "a codec has outputs"
    random = [sample_source(codec, seed), sample_source(codec, seed + 1)]
    blocks = [dict(s) for s in sources] or [*random, _zeros(codec)]
    for source in blocks:
        _check_encode(codec, source)
        _check_round_trip(codec, source, lossy or {})
        _check_subsets(codec, source)
        _check_refusals(codec, source)
    _check_batch(codec, blocks)


def _zeros(codec: Codec) -> dict[str, bytes]:
    return {
        name: np.ones(part.elements, "<f4").tobytes()
        if part.name.endswith("scale")
        else bytes(part.nbytes)
        for name, part in codec.inputs.items()
    }


def _buffers(codec: Codec) -> dict[str, bytearray]:
    return {
        name: bytearray([POISON]) * (output.capacity + _TAIL)
        for name, output in codec.outputs.items()
    }


def _encode(codec: Codec, source: Mapping[str, bytes]) -> tuple[dict[str, Encoded], dict[str, Any]]:
    buffers = _buffers(codec)
    return codec.encode(source, buffers), buffers


def _plain(encoded: Mapping[str, Encoded]) -> dict[str, bytes]:
    return {name: bytes(one.data) for name, one in encoded.items()}


def _check_encode(codec: Codec, source: Mapping[str, bytes]) -> None:
    before = dict(source)
    encoded, buffers = _encode(codec, source)
    assert set(encoded) == set(codec.outputs), f"encode gave {set(encoded)}"
    for name, one in encoded.items():
        output = codec.outputs[name]
        assert one.part == output.part, f"{name}: layout {one.part}, expected {output.part}"
        assert one.nbytes == len(one.data) <= output.capacity, f"{name}: {one.nbytes} bytes"
        own = np.frombuffer(buffers[name], np.uint8)
        got = np.frombuffer(one.data, np.uint8)
        assert not one.nbytes or got.ctypes.data == own.ctypes.data, (
            f"{name}: not at the front of the caller's buffer"
        )
        assert (own[one.nbytes :] == POISON).all(), f"{name}: written behind its actual length"
    assert dict(source) == before, "encode changed its source"
    assert _plain(_encode(codec, source)[0]) == _plain(encoded), "encode is not deterministic"


def _destinations(codec: Codec) -> dict[str, bytearray]:
    return {name: bytearray([POISON]) * part.nbytes for name, part in codec.inputs.items()}


def _check_round_trip(
    codec: Codec, source: Mapping[str, bytes], lossy: Mapping[str, float]
) -> None:
    encoded, _ = _encode(codec, source)
    for given in (encoded, _plain(encoded)):
        into = _destinations(codec)
        codec.decode(given, into)
        for name, part in codec.inputs.items():
            if name not in lossy:
                assert bytes(into[name]) == source[name], f"{name} does not come back bit for bit"
                continue
            exact, read = _numbers(source[name], part), _numbers(into[name], part)
            error = float(np.sqrt(((read - exact) ** 2).sum()))
            power = float(np.sqrt((exact**2).sum()))
            assert error <= lossy[name] * power, f"{name}: relative error {error / (power or 1)}"


def _numbers(data: bytes | bytearray, part: Component) -> npt.NDArray[np.float64]:
    if part.dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    kind = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}[part.dtype]
    return np.frombuffer(data, kind).astype(np.float64)


def _check_subsets(codec: Codec, source: Mapping[str, bytes]) -> None:
    """Absent parts stay untouched, on both sides."""
    encoded, _ = _encode(codec, source)
    plain = _plain(encoded)
    for name in codec.inputs:
        wanted = codec.needs(name)
        assert wanted <= set(codec.outputs), f"{name} needs {wanted}, which is not encoded"
        into = _destinations(codec)
        codec.decode({part: plain[part] for part in wanted}, {name: into[name]})
        for other in set(into) - {name}:
            assert into[other] == bytearray([POISON]) * len(into[other]), f"{other} was touched"
        buffers = _buffers(codec)
        part_of = codec.encode(source, {part: buffers[part] for part in wanted})
        assert set(part_of) == wanted, f"asked for {wanted}, encoded {set(part_of)}"
        for other in set(buffers) - wanted:
            assert set(buffers[other]) == {POISON}, f"{other} was touched"
    assert codec.encode(source, {}) == {}, "nothing asked for is nothing encoded"
    codec.decode(plain, {})


def _refused(call: Callable[[], object], *kinds: type[Exception]) -> bool:
    try:
        call()
    except kinds:
        return True
    return False


def _check_refusals(codec: Codec, source: Mapping[str, bytes]) -> None:
    encoded, _ = _encode(codec, source)
    plain = _plain(encoded)
    typed = (TierError, BadWork)
    for name, output in codec.outputs.items():
        if output.capacity:
            buffers = _buffers(codec)
            buffers[name] = bytearray([POISON]) * (output.capacity - 1)
            assert _refused(partial(codec.encode, source, buffers), CapacityExceeded), (
                f"{name}: a buffer too small was not refused"
            )
            assert all(set(b) <= {POISON} for b in buffers.values()), "written before the refusal"
        for bad in (plain[name][:-1], plain[name] + b"\0"):
            into = _destinations(codec)
            assert _refused(partial(codec.decode, {**plain, name: bad}, into), *typed), (
                f"{name}: {len(bad)} bytes instead of {len(plain[name])} were not refused"
            )
            assert all(set(b) <= {POISON} for b in into.values()), "written before the refusal"
    for name, part in codec.inputs.items():
        short = bytes(part.nbytes + 1)
        assert _refused(partial(codec.encode, {**source, name: short}, _buffers(codec)), *typed)
        into = _destinations(codec)
        into[name] = bytearray(part.nbytes + 1)
        assert _refused(partial(codec.decode, plain, into), *typed), f"{name}: destination size"
    assert _refused(lambda: codec.encode(source, {"no such output": bytearray(1)}), *typed)
    assert _refused(lambda: codec.decode(plain, {"no such input": bytearray(1)}), *typed)


def _check_batch(codec: Codec, blocks: list[dict[str, bytes]]) -> None:
    """Blocks encoded as one launch give what they give one by one."""
    buffers = [_buffers(codec) for _ in blocks]
    job = encode_job(codec, blocks, buffers)
    assert job.launch.reads == job.launch.writes == (), "nothing but the named blocks is held"
    job.launch.fn()
    for source, encoded in zip(blocks, job.result(), strict=True):
        assert _plain(encoded) == _plain(_encode(codec, source)[0]), "a batch gives other bytes"
    mixed = [*blocks, {name: bytes(part.nbytes + 2) for name, part in codec.inputs.items()}]
    assert _refused(lambda: encode_job(codec, mixed, [*buffers, _buffers(codec)]), BadWork), (
        "a batch that mixes layouts was not refused"
    )
