"""Pages of campaigns: their bytes follow from key and version, and FP8 keeps them."""

from kvhold.campaigns.store_pages import LAYOUT, fill, keys_of, page_bytes, poison, versions_of
from tiers import K16V8Codec
from transfer import HostPool


def test_the_cast_keeps_every_value() -> None:
    codec = K16V8Codec(LAYOUT)
    part = LAYOUT.component("value")
    page = page_bytes(keys_of(1, 1).digests[0], 3)
    value = page[LAYOUT.block_layout.extent("value", 0).offset :][: part.nbytes]
    into = {name: bytearray(output.capacity) for name, output in codec.outputs.items()}
    parts = {name: into[name] for name in ("value", "value_scale")}
    codec.encode({"value": value}, parts)
    back = bytearray(part.nbytes)
    codec.decode(parts, {"value": back})
    assert bytes(back) == value


def test_versions_are_told_apart() -> None:
    keys = keys_of(5, 3)
    with HostPool(LAYOUT, 3) as pool, pool.lease(3) as pages:
        fill(pages, keys, 2)
        assert versions_of(pages, keys, 3, 4) == [2, 2, 2]
        fill(pages[:1], keys, 1)
        poison(pages[2:])
        assert versions_of(pages, keys, 3, 4) == [1, 2, None]
        assert versions_of(pages, keys, 1, 4) == [1]
