import numpy as np
import pytest
import torch

from tiers._codec_parts import Encoded, Output, bits_of, check_names, copy_bits, need, room, taken
from tiers._errors import CapacityExceeded, ComponentMissing, DtypeMismatch, LengthError
from tiers._layout import Component
from tiers._team import Team
from transfer._errors import LayoutMismatch

PART = Component("key", "LPTHD", (2, 1, 3, 2, 4), "bfloat16")


def test_tensors_and_buffers_are_viewed_alike() -> None:
    tensor = torch.randn(PART.shape).bfloat16()
    raw = tensor.view(torch.uint8).numpy()
    for given in (tensor, tensor[:, 0], raw, raw.tobytes(), bytearray(raw.tobytes())):
        found = bits_of(given, PART)
        assert (found.shape, found.dtype) == (PART.shape, np.dtype(np.uint16))
        assert found.tobytes() == raw.tobytes()
    bits_of(tensor, PART, write=True)[...] = 0
    assert not tensor.any()


def test_strided_tensors_are_viewed_in_place() -> None:
    wide = torch.randn(2, 1, 3, 2, 9).bfloat16()
    part = wide[..., :4]
    assert bits_of(part, PART).tobytes() == part.contiguous().view(torch.uint8).numpy().tobytes()
    bits_of(part, PART, write=True)[...] = 0
    assert not part.any()
    assert wide[..., 4:].all()


# case 57, the other 16-bit float, float32, int16; and other shapes
@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(PART.shape, dtype=torch.float16),
        torch.zeros(PART.shape, dtype=torch.float32),
        torch.zeros(PART.shape, dtype=torch.int16),
        torch.zeros(2, 1, 2, 3, 4, dtype=torch.bfloat16),
        torch.zeros(48, dtype=torch.bfloat16),
        torch.zeros(PART.shape, dtype=torch.bfloat16, device="meta"),
        bytes(95),
        bytes(97),
    ],
)
def test_memory_of_another_kind_is_refused(given: object) -> None:
    with pytest.raises(LayoutMismatch, match=r"key: found .*, expected"):
        bits_of(given, PART)


def test_more_than_one_pair_per_block_is_refused() -> None:
    one = torch.zeros(PART.shape, dtype=torch.bfloat16)
    with pytest.raises(LayoutMismatch, match="one pair"):
        bits_of([one, one], PART)


def test_read_only_memory_is_no_destination() -> None:
    with pytest.raises(LayoutMismatch, match="writable"):
        bits_of(bytes(96), PART, write=True)
    output = Output(PART, 96)
    with pytest.raises(LayoutMismatch, match="writable"):
        room(bytes(96), output)
    with pytest.raises(CapacityExceeded, match="found 95 bytes, expected 96"):
        room(bytearray(95), output)
    assert len(room(bytearray(100), output)) == 96


def test_what_is_taken_has_the_layout_and_length_it_should() -> None:
    output = Output(PART, 96)
    data = memoryview(bytes(96))
    assert taken({"key": data}, output) == data
    assert taken({"key": Encoded(PART, data)}, output) == data
    assert len(taken({"key": data[:5]}, output, exact=False)) == 5
    with pytest.raises(ComponentMissing, match="expected key"):
        taken({"value": data}, output)
    with pytest.raises(LengthError):
        taken({"key": data[:95]}, output)
    other = Component("key", "LPTHD", (2, 1, 3, 2, 4), "float16")
    with pytest.raises(DtypeMismatch):
        taken({"key": Encoded(other, data)}, output)


def test_names() -> None:
    check_names({}, {"a": 1}, "x")
    with pytest.raises(LayoutMismatch, match="'b'"):
        check_names({"a": 1, "b": 2}, {"a": 1}, "x")
    assert need({"a": 1}, "a") == 1
    with pytest.raises(ComponentMissing):
        need({"a": 1}, "b")


@pytest.mark.parametrize("threads", [1, 2])
def test_copies_take_any_strides(threads: int) -> None:
    source = np.arange(2 << 20, dtype=np.uint16).reshape(4, -1, 64)
    turned = np.zeros((source.shape[1], 4, 64), np.uint16).transpose(1, 0, 2)
    with Team(threads) as team:
        copy_bits(source, turned, team)
        copy_bits(source[:0], turned[:0], team)
    assert np.array_equal(source, turned)
