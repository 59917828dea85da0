"""A second reader of version 3 blobs, written from docs/format-v3.md alone.

It imports nothing of kvhold and shares no code with it: what both agree on is what the document says.
"""

import math
import struct
import zlib
from dataclasses import dataclass

KEY_TYPES = {1: ("bfloat16", 2), 2: ("float16", 2), 3: ("float32", 4), 4: ("float64", 8)}
VALUE_TYPES = {16: ("float8_e4m3fn", 1), 17: ("float8_e5m2", 1), 18: ("float8_e4m3fnuz", 1)}
SCALE_AXES = {1: "L", 2: "LH", 3: "LPH", 4: "LPTH"}
NAMES = {1: "key", 2: "value", 3: "value_scale"}


class Refused(Exception):
    """The document says that a reader refuses this."""


@dataclass
class Component:
    """One section: its bytes, with what the entry says of them."""

    dtype: str
    axes: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Blob:
    """Everything a blob says."""

    key_digest: bytes
    provenance: bytes
    put_id: bytes
    scheme: int
    scope: int
    components: dict[str, Component]


def demand(good: bool, why: str) -> None:
    if not good:
        raise Refused(why)


def geometry(head: bytes) -> tuple[dict[str, int], int, int, int, int, int, str]:
    scheme, scope, order, zero = head[24:28]
    sizes = dict(zip("LPTHKV", struct.unpack_from("<6I", head, 28), strict=True))
    key, value, scale = head[52:55]
    demand(zero == 0, "byte 27")
    demand(scheme in {0, 1, 2} and scope in range(5) and order in {1, 2}, "scheme, scope or order")
    demand(key in KEY_TYPES and (value == 0 or value in VALUE_TYPES), "dtype")
    demand(scale == (3 if value else 0), "dtype of scales")
    absent = {scheme == 0, scope == 0, value == 0, sizes["V"] == 0}
    demand(len(absent) == 1, "values are there or not")
    demand(all(sizes[axis] >= 1 for axis in "LPTHK"), "geometry")
    axes = "LPTHD" if order == 1 else "LPHTD"
    return sizes, scheme, scope, key, value, scale, axes


def expected_section(
    component: int, sizes: dict[str, int], scope: int, dtypes: tuple[int, int, int], axes: str
) -> tuple[str, tuple[int, ...], int]:
    if component == 3:
        demand(scope in SCALE_AXES, "scales without a scope")
        axes = "".join(axis for axis in axes if axis in SCALE_AXES[scope])
    row = sizes["K"] if component == 1 else sizes["V"]
    shape = tuple(row if axis == "D" else sizes[axis] for axis in axes)
    return axes, shape, dtypes[component - 1]


def read(blob: bytes) -> Blob:
    """Read a whole blob, in the document's order of checks."""
    demand(len(blob) >= 4096 and len(blob) % 4096 == 0, "length")
    head = blob[:4096]
    demand(head[:8] == bytes.fromhex("894b56484f4c440a"), "magic")
    version, count, header_bytes, total = struct.unpack_from("<HHIQ", head, 8)
    demand(version == 3 and header_bytes == 4096 and total == len(blob), "version or length")
    sizes, scheme, scope, key, value, scale, axes = geometry(head)
    demand(head[55:64] == bytes(9) and head[144:192] == bytes(48), "zeros")
    demand(1 <= count <= 3, "number of sections")
    demand(head[192 + 64 * count : 4092] == bytes(4092 - 192 - 64 * count), "zeros")
    at, last, found = 4096, 0, {}
    for index in range(count):
        entry = head[192 + 64 * index : 256 + 64 * index]
        component, dtype, rank, zero = entry[:4]
        crc, offset, nbytes = struct.unpack_from("<IQQ", entry, 4)
        demand(component in NAMES and component > last and zero == 0, "component")
        demand(component == 1 or value != 0, "values in a geometry without")
        last = component
        letters, shape, kind = expected_section(component, sizes, scope, (key, value, scale), axes)
        demand(dtype == kind and rank == len(shape), "dtype or rank")
        demand(entry[24:32] == letters.encode().ljust(8, b"\0"), "axes")
        demand(struct.unpack_from("<6I", entry, 32) == (*shape, *[0] * (6 - rank)), "sizes")
        demand(entry[56:] == bytes(8), "zeros")
        name, width = {**KEY_TYPES, **VALUE_TYPES}[dtype]
        demand(nbytes == width * math.prod(shape) and offset == at, "bytes or offset")
        at += -(-nbytes // 4096) * 4096
        found[NAMES[component]] = (name, letters, shape, offset, nbytes, crc)
    demand(at == len(blob), "end")
    demand(("value" in found) == ("value_scale" in found), "values with their scales")
    demand(zlib.crc32(head[:4092]) == struct.unpack_from("<I", head, 4092)[0], "header CRC")
    parts = {}
    for name, (dtype_name, letters, shape, offset, nbytes, crc) in found.items():
        data = blob[offset : offset + nbytes]
        if name == "value_scale":
            scales = struct.unpack(f"<{nbytes // 4}f", data)
            demand(all(math.isfinite(s) and s > 0 for s in scales), "scales")
        demand(zlib.crc32(data) == crc, f"{name} CRC")
        padding = blob[offset + nbytes : offset + -(-nbytes // 4096) * 4096]
        demand(padding == bytes(len(padding)), "padding")
        parts[name] = Component(dtype_name, letters, shape, data)
    return Blob(head[64:96], head[96:128], head[128:144], scheme, scope, parts)


def value_of_e4m3fn(code: int) -> float:
    """A code's value, from the definition of the format."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 0x80 else size


def to_bfloat16(number: float) -> int:
    """Nearest bfloat16 of a binary32, ties to even, as 16 bits."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def decode_values(blob: Blob) -> list[int]:
    """e4m3fn values as bfloat16 bits, in the section's order."""
    value, scale = blob.components["value"], blob.components["value_scale"]
    scales = struct.unpack(f"<{len(scale.data) // 4}f", scale.data)
    found = []
    for position, code in enumerate(value.data):
        rest, index = position, {}
        for axis, size in reversed(list(zip(value.axes, value.shape, strict=True))):
            rest, index[axis] = divmod(rest, size)
        at = 0
        for axis, size in zip(scale.axes, scale.shape, strict=True):
            at = at * size + index[axis]
        product = struct.unpack("<f", struct.pack("<f", value_of_e4m3fn(code) * scales[at]))[0]
        found.append(to_bfloat16(product))
    return found
