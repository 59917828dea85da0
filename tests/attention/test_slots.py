"""Places of a step's new tokens."""

from attention import PagedKVCache, PageTable


def test_slots_say_where_tokens_go_and_where_their_requests_begin() -> None:
    cache = PagedKVCache(layers=1, pages=8, page_size=4, kv_heads=1, head_dim=16)
    table = PageTable.raw([0, 2, 2, 3], [5, 1, 7], [3, 0, 4], page_size=4, pages=8)
    slots = cache.slots(table, [4, 0, 4])
    assert len(slots) == 8
    assert slots.where.tolist() == [23, 4, 5, 6, 28, 29, 30, 31]
    assert slots.starts == [3, 0, 0]
    assert slots.counts == [4, 0, 4]
    assert slots.first == [20, 0, 28]
