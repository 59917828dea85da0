"""Codecs with one output: a whole blob in one of the wire formats, made in the caller's memory."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from tiers._codec_parts import (
    Encoded,
    Memory,
    Output,
    bits_of,
    check_names,
    copy_bits,
    need,
    room,
    taken,
)
from tiers._codec_split import ByteThroughCodec, K16V8Codec
from tiers._errors import DtypeMismatch, ScaleError
from tiers._format_common import NO_STRINGS, Scheme, Strings
from tiers._format_v1 import (
    V1Blob,
    V1Header,
    V1Scope,
    need_keys,
    open_v1,
    seal_v1,
    split_v1,
)
from tiers._format_v3 import Identity, plan_v3, seal_v3
from tiers._format_v3_read import parse_v3
from tiers._layout import KEY, VALUE, Component
from tiers._team import Team
from tiers.fp8 import FORMATS, Counts, NonFinite, cast_values, decode_values
from transfer._errors import LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from tiers._fp8_scratch import Bits

BLOB: Final = "blob"
"""Name of the one output."""
_E4M3: Final = FORMATS["float8_e4m3fn"]


def _blob_output(nbytes: int) -> Mapping[str, Output]:
    return MappingProxyType({BLOB: Output(Component(BLOB, "", (nbytes,), "uint8"), nbytes)})


@final
class V1Codec:
    """A blob of version 1 (computed scales) or 2 (values that are FP8 already, scale one).

    Args:
        shape: shape of keys and of values, any rank.
        key: dtype of keys.
        value: dtype of values: bfloat16, float16 or float32; float8_e4m3fn makes version 2.
        keys: whether the blob holds keys; without them their dtype is a tag.
        scope: how scales are shared: TENSOR, HEAD or PAGE_HEAD; not looked at in version 2.
        head_axis: axis of the heads.
        page_axis: axis of the pages, for PAGE_HEAD.
        strings: origin; checked on reading.
        numbers: layer_id, chunk_id, chunk_size, page_size, kv_head_count, head_dim as far as set.
        nonfinite: what becomes of NaN and infinities among the values.
        team: threads that work on one block; the calling thread alone when None.

    Raises:
        LayoutMismatch: a dtype, scope or axis that the format does not have.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        key: str = "bfloat16",
        value: str = "bfloat16",
        keys: bool = True,
        scope: V1Scope = V1Scope.TENSOR,
        head_axis: int = -2,
        page_axis: int | None = None,
        strings: Strings = NO_STRINGS,
        numbers: Mapping[str, int] | None = None,
        nonfinite: NonFinite = "saturate",
        team: Team | None = None,
    ) -> None:
        self.raw_unit = value == "float8_e4m3fn"
        if not self.raw_unit and value not in {"bfloat16", "float16", "float32"}:
            raise LayoutMismatch(f"values: found {value}, expected bfloat16, float16 or float32")
        self.keys = keys
        self.nonfinite: NonFinite = nonfinite
        self.team = team or Team()
        axes = _scale_axes(
            V1Scope.NONE if self.raw_unit else scope, len(shape), head_axis, page_axis
        )
        self._kept = tuple(axis in axes for axis in range(len(shape)))
        self._transposed = list(axes) != sorted(axes)
        parts = {KEY: Component(KEY, "", shape, key), VALUE: Component(VALUE, "", shape, value)}
        self.header = V1Header(
            scope=V1Scope.NONE if self.raw_unit else scope,
            key=key,
            key_bytes=parts[KEY].nbytes if keys else 0,
            value_bytes=math.prod(shape),
            scale_shape=tuple(shape[axis] for axis in axes),
            strings=strings,
            raw_unit=self.raw_unit,
            **(numbers or {}),
        )
        self.inputs: Mapping[str, Component] = MappingProxyType(
            parts if keys else {VALUE: parts[VALUE]}
        )
        self._packed = self.header.pack()
        self._start = len(self._packed) + 4
        self.outputs = _blob_output(self.header.nbytes)

    def needs(self, name: str) -> frozenset[str]:
        """Everything is in the blob."""
        assert name in self.inputs  # noqa: S101 - only our own names are asked for
        return frozenset({BLOB})

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        """See `Codec.encode`. Bytes are those of LMCache for finite values."""
        check_names(source, self.inputs, "source")
        check_names(into, self.outputs, "outputs")
        if BLOB not in into:
            return {}
        blob = room(into[BLOB], self.outputs[BLOB])
        bits = {name: bits_of(need(source, name), part) for name, part in self.inputs.items()}
        key, value, scale = self._sections(blob)
        if self.raw_unit:
            counts = Counts()
            copy_bits(bits[VALUE], value, self.team)
        else:
            counts = self._encode_values(bits[VALUE], value, scale)
        if self.keys:
            copy_bits(bits[KEY], key, self.team)
        seal_v1(self.header, blob, self.team, packed=self._packed)
        return {BLOB: Encoded(self.outputs[BLOB].part, blob, counts)}

    def _sections(self, blob: memoryview) -> tuple[Bits, Bits, memoryview]:
        start = self._start
        middle = start + self.header.key_bytes
        end = middle + self.header.value_bytes
        shape = self.inputs[VALUE].shape
        key = bits_of(blob[start:middle], self.inputs[KEY]) if self.keys else np.empty(0)
        return key, np.frombuffer(blob[middle:end], np.uint8).reshape(shape), blob[end:]

    def _encode_values(self, values: Bits, codes: Bits, target: memoryview) -> Counts:
        wire = np.frombuffer(target, dtype="<f4")
        return cast_values(
            values,
            self._kept,
            codes,
            lambda scales: np.copyto(wire, self._swap(scales)),
            dtype=self.inputs[VALUE].dtype,
            form=_E4M3,
            team=self.team,
            nonfinite=self.nonfinite,
        )

    def _swap(self, scales: Bits) -> Bits:
        """Scales on the wire are (pages, heads) also where the head axis comes first."""
        if not self._transposed:
            return scales.reshape(-1)
        pages, heads = self.header.scale_shape
        return scales.reshape(heads, pages).T.reshape(-1)

    def decode(
        self,
        encoded: Mapping[str, Any],
        into: Mapping[str, Memory],
        *,
        scales: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """See `Codec.decode`.

        Args:
            encoded: the blob.
            into: destinations.
            scales: for a blob of scope EXTERNAL: its scales, float32, as shaped as the codec's.
        """
        check_names(into, self.inputs, "destinations")
        targets = {
            name: bits_of(given, self.inputs[name], write=True) for name, given in into.items()
        }
        blob = self._open(taken(encoded, self.outputs[BLOB], exact=False))
        need_keys(blob.header, keys=self.keys)
        found = None if self.raw_unit else self._scales_of(blob.header, blob.scale, scales)
        blob.verify(self.team)
        if KEY in targets:
            copy_bits(bits_of(blob.key, self.inputs[KEY]), targets[KEY], self.team)
        if VALUE not in targets:
            return
        codes = np.frombuffer(blob.value, np.uint8).reshape(self.inputs[VALUE].shape)
        if found is None:
            copy_bits(codes, targets[VALUE], self.team)
            return
        decode_values(
            codes,
            found,
            self._kept,
            targets[VALUE],
            dtype=self.inputs[VALUE].dtype,
            form=_E4M3,
            team=self.team,
        )

    def _open(self, data: memoryview) -> V1Blob:
        """The checked blob; a header that is byte for byte our own needs no second look."""
        end = len(self._packed)
        if len(data) == self._start + self.header.payload_bytes and data[:end] == self._packed:
            return split_v1(self.header, data, end)
        return open_v1(
            data,
            elements=self.header.value_bytes,
            key=self.header.key,
            scheme=self.header.scheme,
            strings=self.header.strings,
        )

    def _scales_of(
        self, header: V1Header, data: memoryview, given: npt.NDArray[np.float32] | None
    ) -> Bits:
        """The scales in the order of the codec's axes."""
        if header.scope == V1Scope.EXTERNAL:
            if given is None or given.shape != self.header.scale_shape:
                found = None if given is None else given.shape
                raise ScaleError("external scales", found=found, expected=self.header.scale_shape)
            flat: Bits = np.ascontiguousarray(given, dtype=np.float32).reshape(-1)
            if not (np.isfinite(flat).all() and (flat > 0).all()):
                raise ScaleError("external scales", found=flat.min(), expected="finite, above 0")
        else:
            pair = (header.scope.name, header.scale_shape)
            asked = (self.header.scope.name, self.header.scale_shape)
            if pair != asked:
                raise DtypeMismatch("scale scope and shape", found=pair, expected=asked)
            flat = np.frombuffer(data, dtype="<f4")
        if not self._transposed:
            return flat
        return flat.reshape(self.header.scale_shape).T.reshape(-1)


def _scale_axes(
    scope: V1Scope, rank: int, head_axis: int, page_axis: int | None
) -> tuple[int, ...]:
    """Axes with scales of their own, in the order of the wire."""
    if scope in {V1Scope.TENSOR, V1Scope.NONE}:
        return ()
    axes = (head_axis,) if scope == V1Scope.HEAD else (page_axis, head_axis)
    if scope == V1Scope.EXTERNAL or any(a is None or not -rank <= a < rank for a in axes):
        raise LayoutMismatch(
            f"scale scope {scope.name}: found axes {axes} of rank {rank}, expected a scope to "
            "compute and its axes"
        )
    return tuple(a % rank for a in axes if a is not None)


@final
class V3Codec:
    """A blob of version 3 around a codec of components.

    Args:
        inner: what encodes the components.
        names: components that the blob holds; all when None.
        identity: whose bytes `encode` writes and `decode` asks for; see `with_identity`.

    Raises:
        LayoutMismatch: values without scales, or a choice of components that the format lacks.
    """

    def __init__(
        self,
        inner: K16V8Codec | ByteThroughCodec,
        *,
        names: Iterable[str] | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.inner = inner
        self.identity = identity
        computed = isinstance(inner, K16V8Codec)
        self.plan = plan_v3(
            inner.encoded_layout,
            pages=inner.pages,
            names=names,
            scheme=Scheme.COMPUTED if computed else Scheme.PRODUCER_SCALED,
        )
        held = {section.part.name for section in self.plan.sections}
        self.inputs: Mapping[str, Component] = MappingProxyType(
            {name: part for name, part in inner.inputs.items() if inner.needs(name) <= held}
        )
        self.outputs = _blob_output(self.plan.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the blob: a multiple of 4096, known before anything is encoded."""
        return self.plan.nbytes

    def with_identity(self, identity: Identity) -> V3Codec:
        """The same codec for one block's bytes; costs next to nothing."""
        other = object.__new__(V3Codec)
        other.inner, other.plan = self.inner, self.plan
        other.inputs, other.outputs = self.inputs, self.outputs
        other.identity = identity
        return other

    def needs(self, name: str) -> frozenset[str]:
        """Everything is in the blob."""
        assert name in self.inputs  # noqa: S101 - only our own names are asked for
        return frozenset({BLOB})

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        """See `Codec.encode`. Sections are encoded where they belong in the blob.

        Raises:
            LayoutMismatch: also when no identity was given.
        """
        check_names(into, self.outputs, "outputs")
        if BLOB not in into:
            return {}
        if self.identity is None:
            raise LayoutMismatch("blob: found no identity, expected one to write")
        blob = room(into[BLOB], self.outputs[BLOB])
        parts = self.inner.encode(source, self.plan.views(blob))
        seal_v3(self.plan, blob, self.identity, self.inner.team)
        counts = next((p.counts for name, p in parts.items() if name == VALUE), Counts())
        return {BLOB: Encoded(self.outputs[BLOB].part, blob, counts)}

    def decode(self, encoded: Mapping[str, Any], into: Mapping[str, Memory]) -> None:
        """See `Codec.decode`. Only the sections that the destinations need are verified."""
        check_names(into, self.inputs, "destinations")
        for name, given in into.items():
            bits_of(given, self.inputs[name], write=True)
        data = taken(encoded, self.outputs[BLOB], exact=False)
        plan = self.plan
        header = parse_v3(
            data,
            layout=plan.layout,
            pages=plan.pages,
            scheme=plan.scheme,
            identity=self.identity,
        )
        wanted = sorted({part for name in into for part in self.inner.needs(name)})
        parts = {name: header.verify(data, name, self.inner.team) for name in wanted}
        self.inner.decode(parts, into)
