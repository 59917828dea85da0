"""The other side of the cross-check and of the benchmark: LMCache, in an environment of its own.

Run by that environment's interpreter as a script; it imports nothing of kvhold. Reads one JSON command
from each line of standard input and answers with one line. Blobs and tensors go through files, raw.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.distributed.serde.asym_k16_v8 import (
    AsymK16V8MultiDeserializer,
    AsymK16V8MultiSerializer,
    AsymK16V8VOnlyMultiDeserializer,
    AsymK16V8VOnlyMultiSerializer,
)
from lmcache.v1.kv_codec import AsymK16V8Codec, CodecHashes, ScaleScope, dequantize_v_fp8

if TYPE_CHECKING:
    from collections.abc import Callable

SCOPES = (ScaleScope.PER_TENSOR, ScaleScope.PER_LAYER_HEAD, ScaleScope.PER_PAGE_HEAD)


def load(path: Path, dtype: str, shape: list[int]) -> torch.Tensor:
    """A tensor from raw bytes."""
    data = bytearray(path.read_bytes())
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)


def save(path: Path, tensor: torch.Tensor) -> None:
    """Raw bytes of a tensor."""
    path.write_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def blob_of(case: dict[str, Any], key: torch.Tensor | None, value: torch.Tensor) -> bytes:
    """The blob that LMCache writes."""
    scope = SCOPES[case["scope"]]
    if key is None:
        writer = AsymK16V8VOnlyMultiSerializer(
            scale_scope=scope, k_dtype_tag=getattr(torch, case["key"])
        )
        room = torch.zeros(value.numel() * 2 + 4096, dtype=torch.uint8)
        length = writer.serialize(
            (None, SimpleNamespace(tensor=value)), SimpleNamespace(tensor=room), None
        )
        return room[:length].numpy().tobytes()
    codec = AsymK16V8Codec(scale_scope=scope)
    encoded = codec.encode(
        key,
        value,
        hashes=CodecHashes(**case["strings"]),
        head_axis=case["head_axis"],
        page_axis=case["page_axis"],
        **case["numbers"],
    )
    return bytes(codec.to_bytes(encoded))


def read(case: dict[str, Any], blob: bytes) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Keys and values that LMCache reads from a blob."""
    codec = AsymK16V8Codec(scale_scope=SCOPES[case["scope"]])
    encoded = codec.from_bytes(blob)
    if case["keys"]:
        key, codes, scales = codec.decode(encoded)
    else:
        # Its own decode cannot take a blob without keys; these are the steps of its V-only reader.
        key = None
        end = encoded.v_payload_len
        codes = torch.frombuffer(bytearray(encoded.payload[:end]), dtype=torch.float8_e4m3fn)
        scales = torch.frombuffer(bytearray(encoded.payload[end:]), dtype=torch.float32)
        scales = scales.reshape(encoded.scale_shape)
    value = dequantize_v_fp8(
        codes.reshape(case["shape"]),
        scales,
        encoded.scale_scope,
        out_dtype=getattr(torch, case["value"]),
        head_axis=case["head_axis"],
        page_axis=case["page_axis"],
    )
    return key, value


def exchange(command: dict[str, Any]) -> dict[str, Any]:
    """Write LMCache's blob of every case, and what it reads from ours."""
    folder = Path(command["folder"])
    for number, case in enumerate(command["cases"]):
        key = load(folder / f"{number}.k", case["key"], case["shape"]) if case["keys"] else None
        value = load(folder / f"{number}.v", case["value"], case["shape"])
        (folder / f"{number}.theirs").write_bytes(blob_of(case, key, value))
        got_key, got_value = read(case, (folder / f"{number}.ours").read_bytes())
        save(folder / f"{number}.value", got_value)
        if got_key is not None:
            save(folder / f"{number}.key", got_key)
    return {"cases": len(command["cases"])}


def make_calls(case: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Encode and decode of one block, whole blobs, into memory that is there already."""
    scope = SCOPES[case["scope"]]
    torch.manual_seed(0)
    value = torch.randn(case["shape"]).to(torch.bfloat16)
    key = torch.randn(case["shape"]).to(torch.bfloat16)
    into = (
        SimpleNamespace(tensor=torch.zeros_like(value)),
        SimpleNamespace(tensor=torch.zeros_like(value)),
    )
    room = SimpleNamespace(tensor=torch.zeros(4 * value.numel() + 65536, dtype=torch.uint8))
    if case["keys"]:
        pair = SimpleNamespace(tensor=key), SimpleNamespace(tensor=value)
        writer = AsymK16V8MultiSerializer(scale_scope=scope)
        reader: Any = AsymK16V8MultiDeserializer(scale_scope=scope)
        into_pair: tuple[Any, Any] = into
    else:
        pair = None, SimpleNamespace(tensor=value)  # type: ignore[assignment]
        writer = AsymK16V8VOnlyMultiSerializer(scale_scope=scope)
        reader = AsymK16V8VOnlyMultiDeserializer(scale_scope=scope)
        into_pair = None, into[1]
    length = writer.serialize(pair, room, None)
    blob = SimpleNamespace(tensor=room.tensor[:length].clone())

    def encode() -> None:
        writer.serialize(pair, room, None)

    def decode() -> None:
        if scope == ScaleScope.PER_TENSOR:
            reader.deserialize(blob, into_pair, None)
            return
        # Its readers know per-tensor scales only; these are its own parts in the same order.
        found_key, found = read(case, blob.tensor.numpy().tobytes())
        if found_key is not None:
            into[0].tensor.copy_(found_key.reshape(case["shape"]))
        into[1].tensor.copy_(found)

    return {"encode": encode, "decode": decode}


def timed(command: dict[str, Any], calls: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Seconds of a number of calls in a row, after one that is not counted."""
    call = calls[command["call"]]
    call()
    start = time.perf_counter()
    for _ in range(command["repeats"]):
        call()
    return {"seconds": time.perf_counter() - start}


def main() -> None:
    """Answer commands until the input ends."""
    calls: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "exchange":
            answer = exchange(command)
        elif command["do"] == "prepare":
            torch.set_num_threads(command["threads"])
            calls = make_calls(command["case"])
            answer = {"ready": True}
        else:
            answer = timed(command, calls)
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer goes through this pipe


if __name__ == "__main__":
    main()
