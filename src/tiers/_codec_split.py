"""Codecs with one output for each component: keys, value codes and scales can go separate ways."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

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
from tiers._errors import ComponentMissing, ScaleError
from tiers._format_common import as_bytes, check_scales
from tiers._layout import FP8, KEY, VALUE, VALUE_SCALE, PageLayout, ScaleScope, StaticScales
from tiers._team import Team
from tiers.fp8 import FORMATS, Counts, NonFinite, cast_values, decode_values
from transfer._errors import LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers._fp8_scratch import Bits
    from tiers._layout import Component


def _named(parts: tuple[Component, ...]) -> Mapping[str, Component]:
    return MappingProxyType({part.name: part for part in parts})


def _outputs(parts: tuple[Component, ...]) -> Mapping[str, Output]:
    return MappingProxyType({part.name: Output(part, part.nbytes) for part in parts})


@final
class K16V8Codec:
    """Keys as they are, values as FP8 codes with computed scales: up to three outputs.

    Args:
        layout: the page with full-width values; without values (a single latent component) there is
            only the key.
        pages: pages of a block.
        value: format of the codes.
        scope: how scales are shared.
        nonfinite: what becomes of NaN and infinities among the values.
        team: threads that work on one block; the calling thread alone when None.

    Raises:
        LayoutMismatch: the layout's values are FP8 already.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        pages: int = 1,
        value: str = "float8_e4m3fn",
        scope: ScaleScope = ScaleScope.HEAD,
        nonfinite: NonFinite = "saturate",
        team: Team | None = None,
    ) -> None:
        if layout.value in FP8:
            raise LayoutMismatch(f"values: found {layout.value}, expected a full-width float")
        self.layout = layout
        self.pages = pages
        has_values = layout.value is not None
        self.encoded_layout = layout.encoded(value=value, scope=scope) if has_values else layout
        self.nonfinite: NonFinite = nonfinite
        self.team = team or Team()
        self.inputs = _named(layout.components(pages))
        self.outputs = _outputs(self.encoded_layout.components(pages))
        axes = layout.order.axes
        self._kept = tuple(axis in ScaleScope(scope).kept for axis in axes)
        self._form = FORMATS[value]

    def needs(self, name: str) -> frozenset[str]:
        """Values need their codes and their scales."""
        return frozenset({VALUE, VALUE_SCALE} if name == VALUE else {name})

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        """See `Codec.encode`. Values and scales are written together or not at all."""
        check_names(source, self.inputs, "source")
        check_names(into, self.outputs, "outputs")
        if (VALUE in into) != (VALUE_SCALE in into):
            raise ComponentMissing("outputs", found=sorted(into), expected="values and scales")
        rooms = {name: room(into[name], self.outputs[name]) for name in into}
        names = [name for name in (KEY, VALUE) if name in into]
        bits = {name: bits_of(need(source, name), self.inputs[name]) for name in names}
        counts = self._encode_values(bits[VALUE], rooms) if VALUE in bits else Counts()
        if KEY in bits:
            copy_bits(bits[KEY], bits_of(rooms[KEY], self.outputs[KEY].part), self.team)
        return {
            name: Encoded(self.outputs[name].part, rooms[name], Counts() if name == KEY else counts)
            for name in rooms
        }

    def _encode_values(self, values: Bits, rooms: Mapping[str, memoryview]) -> Counts:
        target = np.frombuffer(rooms[VALUE_SCALE], dtype="<f4")
        return cast_values(
            values,
            self._kept,
            bits_of(rooms[VALUE], self.outputs[VALUE].part, write=True),
            partial(np.copyto, target),
            dtype=self.inputs[VALUE].dtype,
            form=self._form,
            team=self.team,
            nonfinite=self.nonfinite,
        )

    def decode(self, encoded: Mapping[str, Any], into: Mapping[str, Memory]) -> None:
        """See `Codec.decode`. Values come back in the layout's own dtype."""
        check_names(into, self.inputs, "destinations")
        targets = {
            name: bits_of(given, self.inputs[name], write=True) for name, given in into.items()
        }
        data = {
            name: taken(encoded, self.outputs[name])
            for target in targets
            for name in sorted(self.needs(target))
        }
        if VALUE in targets:
            check_scales("scale", data[VALUE_SCALE])
            decode_values(
                bits_of(data[VALUE], self.outputs[VALUE].part),
                np.frombuffer(data[VALUE_SCALE], dtype="<f4"),
                self._kept,
                targets[VALUE],
                dtype=self.inputs[VALUE].dtype,
                form=self._form,
                team=self.team,
            )
        if KEY in targets:
            copy_bits(bits_of(data[KEY], self.outputs[KEY].part), targets[KEY], self.team)


@final
class ByteThroughCodec:
    """Values that are FP8 already: every component is stored as it is, bit for bit.

    With a scale scope in the layout the producer's own scales go along (producer-scaled). With
    `static_scales` pages have none; the codec puts them beside the codes and takes codes back only
    where the same are found. With neither there is no scale, and producer and reader both work with
    a scale of one (raw-unit).

    Args:
        layout: the page, with FP8 values.
        pages: pages of a block.
        static_scales: scales of values that have none of their own.
        team: threads that work on one block; the calling thread alone when None.

    Raises:
        LayoutMismatch: the layout's values are not FP8, or the scales are not for it.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        pages: int = 1,
        static_scales: StaticScales | None = None,
        team: Team | None = None,
    ) -> None:
        if layout.value not in FP8:
            raise LayoutMismatch(f"values: found {layout.value}, expected FP8 codes")
        self.layout = layout
        self.encoded_layout = static_scales.stored(layout) if static_scales else layout
        self.pages = pages
        self.team = team or Team()
        self.inputs = _named(layout.components(pages))
        self.outputs = _outputs(self.encoded_layout.components(pages))
        self._static = static_scales

    def needs(self, name: str) -> frozenset[str]:
        """Each component by itself; values also the static scales, to compare them."""
        if name == VALUE and self._static is not None:
            return frozenset({VALUE, VALUE_SCALE})
        return frozenset({name})

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        """See `Codec.encode`.

        Raises:
            ScaleError: a producer's scale is not finite and positive.
        """
        check_names(source, self.inputs, "source")
        check_names(into, self.outputs, "outputs")
        rooms = {name: room(into[name], self.outputs[name]) for name in into}
        names = [name for name in into if name in self.inputs]
        bits = {name: bits_of(need(source, name), self.inputs[name]) for name in names}
        if VALUE_SCALE in bits:
            check_scales("scale", as_bytes(np.ascontiguousarray(bits[VALUE_SCALE])))
        if self._static is not None and VALUE_SCALE in rooms:
            rooms[VALUE_SCALE][:] = self._static.data
        for name, given in bits.items():
            copy_bits(given, bits_of(rooms[name], self.outputs[name].part), self.team)
        return {name: Encoded(self.outputs[name].part, rooms[name]) for name in rooms}

    def decode(self, encoded: Mapping[str, Any], into: Mapping[str, Memory]) -> None:
        """See `Codec.decode`. Codes are never widened.

        Raises:
            ScaleError: a scale that is not finite and positive, or is not the static one.
        """
        check_names(into, self.inputs, "destinations")
        targets = {
            name: bits_of(given, self.inputs[name], write=True) for name, given in into.items()
        }
        wanted = sorted({part for name in targets for part in self.needs(name)})
        data = {name: taken(encoded, self.outputs[name]) for name in wanted}
        if self._static is not None and VALUE in targets:
            self._check_static(self._static, data[VALUE_SCALE])
        elif VALUE_SCALE in data:
            check_scales("scale", data[VALUE_SCALE])
        for name, target in targets.items():
            copy_bits(bits_of(data[name], self.outputs[name].part), target, self.team)

    @staticmethod
    def _check_static(static: StaticScales, found: memoryview) -> None:
        if found != static.data:
            raise ScaleError("static scales", found=found, expected=static.data)
