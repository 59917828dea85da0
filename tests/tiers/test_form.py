"""Forms: which component goes where, and what the codec may work on as it is."""

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.tiers.store_kit import LAYOUT, SCALES, STATIC, THROUGH

from tiers import CapacityExceeded, HostTier
from tiers._form import Form, Placement, Stages, dense, stages_of
from transfer import BlockLayout, Extent, HostPool, LayoutMismatch, Pool, PoolBusy


def test_components_by_placement() -> None:
    split, host, disk = (Form(LAYOUT, placement) for placement in Placement)
    assert (split.host_names, split.copied, split.kind) == (("key",), ("key",), "part")
    assert [part.name for part in split.disk_parts] == ["value", "value_scale"]
    assert host.host_names == ("key", "value", "value_scale")
    assert (host.blob, host.file_bytes, host.disk_parts) == (None, 0, ())
    assert (disk.host_names, disk.host_bytes, disk.kind) == ((), 0, "whole")
    assert [part.name for part in disk.disk_parts] == ["key", "value", "value_scale"]
    assert Form(THROUGH, Placement.SPLIT).inputs == ("value", "value_scale")
    assert Form(THROUGH, Placement.SPLIT).through


def test_what_a_placement_cannot_do_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="without values"):
        Form(replace(LAYOUT, value=None), Placement.SPLIT)
    for placement in Placement:
        with pytest.raises(LayoutMismatch, match="static scales"):
            Form(replace(THROUGH, scope=None), placement)
        for layout in (LAYOUT, THROUGH):
            with pytest.raises(LayoutMismatch, match="without scales of their own"):
                Form(layout, placement, static_scales=SCALES)


def test_static_scales_are_stored_and_not_taken_from_pages() -> None:
    split, host, disk = (Form(STATIC, p, static_scales=SCALES) for p in Placement)
    assert split.stored == host.stored == disk.stored == THROUGH
    assert (split.inputs, disk.inputs) == (("value",), ("key", "value"))
    assert host.host_names == ("key", "value", "value_scale")
    assert [part.name for part in split.disk_parts] == ["value", "value_scale"]


def test_dense_components_are_told_from_others() -> None:
    plan = LAYOUT.block_layout
    found = dense(plan, LAYOUT, ("key", "value"))
    assert found == {name: (0, plan.extent(name, 0).offset) for name in ("key", "value")}
    apart = BlockLayout(
        tuple(replace(e, offset=0, plane=number) for number, e in enumerate(plan.extents)),
        tuple(e.nbytes for e in plan.extents),
    )
    assert dense(apart, LAYOUT, ("key",)) is None
    with pytest.raises(LayoutMismatch):
        dense(plan, LAYOUT, ("value_scale",))
    for change in ({"shape": (4, 2, 4)}, {"dtype": "float16"}):
        extents = [Extent("key", (4, 2, 8), "bfloat16", layer=1, offset=128)]
        extents.append(replace(extents[0], layer=0, offset=0, strides=(), **change))
        with pytest.raises(LayoutMismatch, match="key of layer 0"):
            dense(BlockLayout(tuple(extents), (256,)), LAYOUT, ("key",))


def test_stages_are_bounded_and_come_back() -> None:
    for placement in Placement:
        form = Form(LAYOUT, placement)
        stages = Stages(form, 2, name="stages")
        taken = [stages.lease(raw=True), stages.lease(raw=placement is Placement.WHOLE_HOST)]
        assert stages.free(raw=False) == (2 if placement is Placement.WHOLE_HOST else 0)
        with pytest.raises(CapacityExceeded, match="all 2 stages"):
            stages.lease(raw=True)
        for stage in taken:
            stage.release()
            stage.release()
        assert stages.free(raw=True) == 2
        stages.close()


def test_identity_is_the_entrys() -> None:
    form = Form(LAYOUT, Placement.SPLIT)
    entry = SimpleNamespace(digest=bytes(32), provenance=b"p" * 32, put=b"q" * 16)
    identity = form.identity(entry)  # type: ignore[arg-type]
    assert (identity.key, identity.provenance, identity.put) == (bytes(32), b"p" * 32, b"q" * 16)


class Maker:
    """Makes pools, keeps them, and may make one of them wrong."""

    def __init__(self, *, wrong: int = -1, how: str = "") -> None:
        self.made: list[Pool] = []
        self.names: list[str] = []
        self.wrong = wrong
        self.how = how

    def __call__(self, layout: BlockLayout, blocks: int, *, name: str) -> Pool:
        how = self.how if len(self.made) == self.wrong else ""
        self.names.append(name)
        if how == "fails":
            raise OSError("no memory can be page-locked")
        if how == "same":
            self.made.append(self.made[0])
            return self.made[0]
        other = BlockLayout.raw(layout.nbytes + 4096)
        pool = HostPool(other if how == "layout" else layout, blocks + (how == "blocks"), name=name)
        if how == "foreign":
            pool.foreign = True
        if how == "in use":
            pool.lease()
        self.made.append(pool)
        return pool


def test_stages_lie_in_pools_of_the_caller() -> None:
    for placement in Placement:
        make = Maker()
        form = Form(LAYOUT, placement)
        writes, reads = stages_of(form, write_bytes=1, read_bytes=1 << 20, make_pool=make)
        assert [*writes.pools, *reads.pools] == make.made
        assert len(set(make.names)) == len(make.names) == (2 if form.blob is None else 4)
        assert writes.count == 1
        assert reads.count == (1 << 20) // (form.file_bytes or form.raw_layout.nbytes)
        for stages in (writes, reads):
            stages.close()


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("how", ["layout", "blocks", "foreign", "in use", "fails"])
def test_a_pool_that_is_not_what_was_asked_for_is_refused(how: str, wrong: int) -> None:
    make = Maker(wrong=wrong, how=how)
    error = OSError if how == "fails" else LayoutMismatch
    form = Form(LAYOUT, Placement.SPLIT)
    with pytest.raises(error, match=r"expected|page-locked"):
        stages_of(form, write_bytes=1 << 16, read_bytes=1 << 16, make_pool=make)
    # What was taken before is given back; what was refused stays the caller's.
    assert all(pool._closed for pool in make.made[:wrong])
    assert not any(pool._closed for pool in make.made[wrong:])
    with suppress(PoolBusy):
        for pool in make.made[wrong:]:
            pool.close()


def test_a_pool_that_was_given_before_is_refused() -> None:
    make = Maker(wrong=2, how="same")
    form = Form(LAYOUT, Placement.SPLIT)
    with pytest.raises(LayoutMismatch, match="one pool twice"):
        stages_of(form, write_bytes=1 << 16, read_bytes=1 << 16, make_pool=make)
    assert all(pool._closed for pool in make.made)


def test_components_that_lie_apart_cannot_be_encoded_in_place() -> None:
    plan = LAYOUT.encoded(scope=SCALES.scope).block_layout
    extents = sorted(plan.extents, key=lambda extent: (extent.layer, extent.name))
    offset, apart = 0, []
    for extent in extents:  # layer by layer: no component is in one piece
        apart.append(replace(extent, offset=offset))
        offset += -(-extent.nbytes // 64) * 64
    with HostPool(BlockLayout(tuple(apart), (offset,)), 2) as pool:
        with pytest.raises(LayoutMismatch, match="in one piece"):
            Form(LAYOUT, Placement.WHOLE_HOST).check_host(HostTier(pool))
        Form(LAYOUT, Placement.SPLIT).check_host(HostTier(pool))
