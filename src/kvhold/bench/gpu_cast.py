"""K16/V8 through the fused cast, against the link: what a BF16 cache moves at."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from kvhold.bench.gpu_rig import (
    MIB,
    Bare,
    Settings,
    direct,
    gigabytes,
    page_layout,
    rounds,
    scattered,
)
from tiers._layout import PageLayout, PageOrder, ScaleScope
from transfer.cuda import DevicePool, PinnedPool, Way


def measure(short: bool, settings: Settings) -> dict[str, Any]:
    """Pack and unpack by scope and size: BF16-equivalent rate over the link's rate."""
    import torch  # noqa: PLC0415 - only where there is a GPU

    from tiers.kernels import PageCast  # noqa: PLC0415 - needs Triton

    rows = []
    plan = PageLayout(layers=32, page_size=16, kv_heads=8, head_dim=128, order=PageOrder.NHD)
    each = page_layout(32).nbytes
    pitched = replace(settings.pace, pitched=True)
    scopes = (ScaleScope.PAGE_HEAD, ScaleScope.TENSOR)
    for total in (256, 1024) if short else (12, 96, 256, 1024, 3072):
        blocks = total * MIB // each
        gpu = DevicePool(plan, 2 * blocks)
        for extent in gpu.layout.extents:
            gpu.cache(extent.name, extent.layer).normal_()
        torch.cuda.synchronize()
        bare = Bare(total * MIB)
        pages = scattered(gpu, blocks)
        for scope in scopes:
            encoded = plan.encoded(scope=scope)
            keys = PinnedPool(plan.slot(["key"]), blocks)
            values = PinnedPool(encoded.slot(["value", "value_scale"]), blocks)
            key, value = keys.lease(blocks).handle, values.lease(blocks).handle
            cast = PageCast(gpu, keys, values, layout=encoded)
            for outward in (True, False):
                work = cast.pack(pages, key, value) if outward else cast.unpack(key, value, pages)
                link = functools.partial(bare.seconds, total * MIB, outward=outward)
                with (
                    direct(settings, ways=(Way.STAGED,)) as staged,
                    direct(settings, ways=(Way.STAGED,), pace=pitched) as strided,
                    direct(settings, ways=(Way.MAPPED,)) as mapped,
                ):
                    devices = (staged, strided, mapped)
                    calls = [functools.partial(device.seconds, work) for device in devices]
                    contiguous, one, even, other = rounds(5 if short else 11, link, *calls)
                rows.append(
                    {
                        "MiB": total,
                        "scope": str(scope),
                        "direction": "out" if outward else "in",
                        "link": gigabytes(total * MIB, contiguous),
                        "staged": gigabytes(total * MIB, one),
                        "pitched": gigabytes(total * MIB, even),
                        "mapped": gigabytes(total * MIB, other),
                        "over_link": contiguous / one,
                        "pitched_over_link": contiguous / even,
                        "moved_share": work.nbytes / (total * MIB),
                    }
                )
            keys.close()
            values.close()
        bare.close()
        gpu.close()
    lines = [
        f"{r['MiB']:5} MiB {r['scope']:9} {r['direction']:3} BF16-equivalent {r['staged']:5.1f} "
        f"(mapped {r['mapped']:5.1f}), link {r['link']:5.1f}: {r['over_link']:.3f}, by strided "
        f"copies {r['pitched_over_link']:.3f}"
        for r in rows
    ]
    return {"rows": rows, "lines": lines}
