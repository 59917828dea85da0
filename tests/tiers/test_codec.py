"""Codec calls as work of an engine, and what a batch may hold."""

import pytest
import torch
from tests.tiers.blobs import IDENTITY, page

from tiers._errors import CapacityExceeded, ChecksumMismatch
from tiers._layout import PageOrder
from tiers.codec import BLOB, K16V8Codec, V3Codec, decode_job, encode_job, group
from transfer._engine import Engine
from transfer._errors import HoldConflict, LayoutMismatch, LeaseError, OperationFailed
from transfer._extent import BlockLayout
from transfer._memory import HostPool
from transfer._work import Launch
from transfer.host import HostDevice

pytestmark = pytest.mark.anyio


def make() -> V3Codec:
    names = ["value", "value_scale"]
    return V3Codec(K16V8Codec(page()), names=names, identity=IDENTITY)


async def test_a_batch_is_encoded_and_decoded_by_the_engine() -> None:
    codec = make()
    with (
        HostPool(page(), blocks=4) as pages,
        HostPool(BlockLayout.raw(codec.nbytes), blocks=2) as slots,
    ):
        async with Engine(HostDevice()) as engine:
            with pages.lease(2) as full, slots.lease(2) as staged, pages.lease(2) as empty:
                values = [view(b.view(write=True)) for b in full]
                for index, part in enumerate(values):
                    part[:] = bytes([index + 1, 0x3F] * (len(part) // 2))
                rooms = [b.view(write=True) for b in staged]
                job = encode_job(
                    codec,
                    [{"value": v} for v in values],
                    [{BLOB: r} for r in rooms],
                    reads=[full],
                    writes=[staged],
                )
                assert job.launch.nbytes == 2 * codec.inputs["value"].nbytes
                await engine.run(job.launch, after=())
                assert [list(found) for found in job.result()] == [[BLOB], [BLOB]]
                back = [view(b.view(write=True)) for b in empty]
                await engine.run(
                    decode_job(
                        codec,
                        [{BLOB: r} for r in rooms],
                        [{"value": v} for v in back],
                        reads=[staged],
                        writes=[empty],
                    ).launch,
                    after=(),
                )
                for one, other in zip(values, back, strict=True):
                    first = torch.frombuffer(one, dtype=torch.bfloat16).float()
                    assert torch.allclose(
                        torch.frombuffer(other, dtype=torch.bfloat16).float(), first, rtol=0.07
                    )
                    other.release()
                    one.release()
                for room in rooms:
                    room.release()


def view(slot: memoryview) -> memoryview:
    part = page().component("value")
    start = page().block_layout.extent("value", 0).offset
    return slot[start : start + part.nbytes]


async def test_a_bad_blob_fails_the_operation_with_its_reason() -> None:
    codec = make()
    with HostPool(BlockLayout.raw(codec.nbytes), blocks=1) as slots:
        async with Engine(HostDevice()) as engine:
            with slots.lease() as slot:
                room = slot.view(write=True)
                values = torch.randn(page().component("value").shape).bfloat16()
                codec.encode({"value": values}, {BLOB: room})
                room[4096] ^= 1
                into = bytearray(b"\xee" * values.nbytes)
                job = decode_job(codec, [{BLOB: room}], [{"value": into}], reads=[slot])
                with pytest.raises(OperationFailed) as caught:
                    await engine.run(job.launch, after=())
                assert isinstance(caught.value.__cause__, ChecksumMismatch)
                assert set(into) == {0xEE}
                with pytest.raises(RuntimeError, match="not completed"):
                    job.result()
                room.release()


async def test_blocks_are_held_until_the_call_has_returned() -> None:
    import threading

    entered, gate = threading.Event(), threading.Event()

    class Slow:
        """A codec that waits inside `encode`."""

        def __init__(self) -> None:
            self.inner = make()
            self.inputs, self.outputs, self.needs = (
                self.inner.inputs,
                self.inner.outputs,
                self.inner.needs,
            )
            self.decode = self.inner.decode

        def encode(self, source, into):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            entered.set()
            gate.wait()
            return self.inner.encode(source, into)

    codec = Slow()
    with HostPool(BlockLayout.raw(codec.inner.nbytes), blocks=1) as slots:
        async with Engine(HostDevice()) as engine:
            with slots.lease() as slot:
                room = slot.view(write=True)
                values = torch.randn(page().component("value").shape).bfloat16()
                job = encode_job(codec, [{"value": values}], [{BLOB: room}], writes=[slot])
                operation = await engine.submit(job.launch, after=())
                assert slots.counts().held == 1
                with pytest.raises(LeaseError):
                    slot.view()
                with pytest.raises(HoldConflict):
                    engine.submit_nowait(Launch(lambda: None, writes=[slot]), after=())
                gate.set()
                await operation.wait()
                assert entered.is_set()
                assert slots.counts().held == 0
                room.release()


def test_a_job_refuses_before_there_is_anything_to_submit() -> None:
    codec = K16V8Codec(page())
    other = K16V8Codec(page(PageOrder.HND))
    good = {name: bytes(part.nbytes) for name, part in codec.inputs.items()}
    room = {name: bytearray(output.capacity) for name, output in codec.outputs.items()}
    turned = {"value": torch.zeros(other.inputs["value"].shape, dtype=torch.bfloat16)}
    with pytest.raises(LayoutMismatch, match="batch"):
        encode_job(codec, [good, good], [room])
    with pytest.raises(LayoutMismatch, match="expected bfloat16"):
        encode_job(codec, [good, {**good, **turned}], [room, room])
    with pytest.raises(CapacityExceeded):
        encode_job(codec, [good], [{**room, "key": bytearray(3)}])
    with pytest.raises(LayoutMismatch):
        decode_job(codec, [room], [turned])
    with pytest.raises(LayoutMismatch, match="writable"):
        decode_job(codec, [room], [good])


def test_a_mixed_batch_is_grouped_by_exact_layout() -> None:
    layouts = [page(), page(PageOrder.HND), page(), page(key="float16"), page(PageOrder.HND)]
    assert group(layouts) == {
        page(): [0, 2],
        page(PageOrder.HND): [1, 4],
        page(key="float16"): [3],
    }
    assert group([]) == {}


# case 51, no blocks are no work
def test_no_blocks_are_a_job_of_nothing() -> None:
    job = encode_job(make(), [], [])
    job.launch.fn()
    assert job.result() == []
