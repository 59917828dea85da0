"""What codecs share: typed parts, the caller's memory as arrays, and copies of it.

A *source* or *destination* is a torch tensor on the CPU, any strides, or a contiguous buffer that holds
the component row-major. It is checked against the component's shape, dtype and bytes and then viewed;
nothing is copied, and nothing is read as another dtype.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, final

import numpy as np

from tiers._errors import CapacityExceeded, ComponentMissing, DtypeMismatch, LengthError
from tiers._format_common import as_bytes
from tiers._fp8_scratch import merge_axes, split_shape
from tiers.fp8 import Counts
from transfer._errors import LayoutMismatch
from transfer._extent import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tiers._fp8_scratch import Bits
    from tiers._layout import Component
    from tiers._team import Team

Memory: TypeAlias = Any
"""A torch tensor on the CPU, or anything with a contiguous buffer of exactly the component's bytes."""

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_COPY_SHARE: Final = 4 << 20


@final
@dataclass(frozen=True, slots=True)
class Output:
    """One thing a codec writes.

    Attributes:
        part: its layout; for data of no fixed length, bytes of the largest.
        capacity: bytes that its buffer has to have.
    """

    part: Component
    capacity: int


@final
@dataclass(frozen=True, slots=True)
class Encoded:
    """One thing a codec wrote.

    Attributes:
        part: its layout.
        data: its bytes, exactly as many as were written, in the caller's buffer.
        counts: NaN and infinite values among what was encoded.
    """

    part: Component
    data: memoryview
    counts: Counts = field(default=Counts())

    @property
    def nbytes(self) -> int:
        """Actual bytes."""
        return len(self.data)


class Codec(Protocol):
    """Turns the components of a block into outputs and back.

    A codec has no state that a call changes: calls may run in several threads at once.
    """

    @property
    def inputs(self) -> Mapping[str, Component]:
        """What `encode` takes and `decode` gives, by name."""
        ...

    @property
    def outputs(self) -> Mapping[str, Output]:
        """What `encode` writes and `decode` takes, by name."""
        ...

    def needs(self, name: str) -> frozenset[str]:
        """The outputs from which the input `name` is decoded."""
        ...

    def encode(self, source: Mapping[str, Memory], into: Mapping[str, Any]) -> dict[str, Encoded]:
        """Write the outputs named in `into` to the front of the buffers given for them.

        Args:
            source: the inputs that those outputs are made of.
            into: writable contiguous buffers of at least each output's capacity.

        Returns:
            What was written, by name. Everything is checked before the first byte is.

        Raises:
            LayoutMismatch: a source of another shape, dtype or size; an unknown name.
            CapacityExceeded: a buffer is too small.
            ComponentMissing: an input that an output is made of is not there.
            NonFiniteValue: if the codec refuses such values.
        """
        ...

    def decode(self, encoded: Mapping[str, Any], into: Mapping[str, Memory]) -> None:
        """Write the inputs named in `into`; others are left alone.

        Args:
            encoded: an `Encoded`, or a buffer of exactly the actual bytes, by output name.
            into: writable destinations by input name.

        Raises:
            LayoutMismatch: a destination of another shape, dtype or size; an unknown name.
            FormatError: bytes that are not what they should be. Destinations are then untouched.
        """
        ...


def bits_of(given: Memory, part: Component, *, write: bool = False) -> Bits:
    """View a component's memory as unsigned integers of its shape.

    Raises:
        LayoutMismatch: another shape, dtype or size, several tensors for one component, memory that
            is not the CPU's, or read-only memory with `write`.
    """
    if hasattr(given, "untyped_storage"):
        return _bits_of_tensor(given, part)
    if isinstance(given, (list, tuple)):
        raise LayoutMismatch(
            f"{part.name}: found {len(given)} objects, expected one pair of key and value per block"
        )
    data = as_bytes(given)
    if len(data) != part.nbytes or (write and data.readonly):
        raise LayoutMismatch(
            f"{part.name}: found {len(data)} {'read-only ' if data.readonly else ''}bytes, expected "
            f"{part.nbytes}{' writable' if write else ''} of {part.dtype}{list(part.shape)}"
        )
    return np.frombuffer(data, dtype=_UNSIGNED[DTYPES[part.dtype]]).reshape(part.shape)


def _bits_of_tensor(tensor: torch.Tensor, part: Component) -> Bits:
    dtype, signed, unsigned = _torch_dtypes(part.dtype)
    shape = tuple(tensor.shape)
    if tensor.dtype != dtype or not tensor.is_cpu or shape not in _shapes(part):
        found = str(tensor.dtype).removeprefix("torch.")
        raise LayoutMismatch(
            f"{part.name}: found {found}{list(shape)} on {tensor.device}, expected "
            f"{part.dtype}{list(part.shape)} on cpu"
        )
    own = tensor.detach() if tensor.requires_grad else tensor
    plain: Bits = own.view(signed).numpy()
    if shape != part.shape:
        plain = np.expand_dims(plain, part.axes.index("P"))
    return plain.view(unsigned)


@functools.cache
def _torch_dtypes(name: str) -> tuple[Any, Any, Any]:
    """A dtype of torch, the signed integers of its size, and numpy's unsigned ones."""
    import torch  # noqa: PLC0415 - whoever hands a tensor over has imported it

    size = DTYPES[name]
    return getattr(torch, name), getattr(torch, _SIGNED[size]), _UNSIGNED[size]


def _shapes(part: Component) -> tuple[tuple[int, ...], ...]:
    """The shapes that a component's tensor may have: one page goes without its axis too."""
    if "P" not in part.axes or part.shape[part.axes.index("P")] > 1:
        return (part.shape,)
    page = part.axes.index("P")
    return part.shape, part.shape[:page] + part.shape[page + 1 :]


def room(given: object, output: Output) -> memoryview:
    """The front of a caller's buffer: exactly the output's capacity.

    Raises:
        CapacityExceeded: the buffer is smaller.
        LayoutMismatch: it is read-only.
    """
    data = as_bytes(given)
    name = output.part.name
    if data.readonly:
        raise LayoutMismatch(f"{name}: found read-only memory, expected writable")
    if len(data) < output.capacity:
        raise CapacityExceeded(f"{name}: found {len(data)} bytes, expected {output.capacity}")
    return data[: output.capacity]


def taken(encoded: Mapping[str, Any], output: Output, *, exact: bool = True) -> memoryview:
    """The bytes that are to be decoded as `output`.

    Raises:
        ComponentMissing: none are given.
        DtypeMismatch: they are of another layout.
        LengthError: another number of bytes than the layout has, unless not `exact`.
    """
    name = output.part.name
    given = encoded.get(name)
    if given is None:
        raise ComponentMissing("encoded", found=sorted(encoded), expected=name)
    data = given.data if isinstance(given, Encoded) else as_bytes(given)
    if isinstance(given, Encoded) and exact and given.part != output.part:
        raise DtypeMismatch(f"{name} layout", found=given.part, expected=output.part)
    if exact and len(data) != output.part.nbytes:
        raise LengthError(f"{name} bytes", found=len(data), expected=output.part.nbytes)
    return data


def check_names(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Refuse names that a codec does not have.

    Raises:
        LayoutMismatch: there is one.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise LayoutMismatch(f"{what}: found {unknown}, expected some of {sorted(known)}")


def need(source: Mapping[str, Memory], name: str) -> Memory:
    """The source called `name`.

    Raises:
        ComponentMissing: it is not there.
    """
    if name not in source:
        raise ComponentMissing("source", found=sorted(source), expected=name)
    return source[name]


def copy_bits(source: Bits, target: Bits, team: Team) -> None:
    """Copy an array into another of its shape, each with any strides."""
    if not source.size:
        return
    parts = min(team.threads, source.nbytes // _COPY_SHARE)
    if parts < 2:
        np.copyto(target, source)
        return
    kept = [False] * source.ndim
    (source, target), _ = merge_axes([source, target], kept)
    boxes = split_shape(source.shape, parts)
    team.run([functools.partial(np.copyto, target[box], source[box]) for box in boxes])
