"""Reports of the commands, small and made up, for what shows them."""

from __future__ import annotations

from typing import Any


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean * 0.9, "high": mean * 1.1}


def quality() -> dict[str, Any]:
    """A sound report of `kvhold quality`."""
    formats = {
        name: {
            "kl": interval(kl),
            "delta_nll": interval(kl / 2),
            "agreement": {"mean": 0.97, "low": 0.96, "high": 0.98},
            "attention": [0.02, 0.03],
            "greedy_agreeing": [4, 8],
        }
        for name, kl in (("K16/V8 restored", 5e-4), ("K8/V8", 5e-3), ("K8/V16", 4e-3))
    }
    return {
        "conditions": {"cores": 2},
        "model": {"name": "a model", "revision": "r"},
        "settings": {"greedy": 8, "suffix": 10},
        "documents": 4,
        "predictions": 40,
        "reference_nll": interval(3.0),
        "formats": formats,
        "kl_ratio": interval(10.0),
        "attention_isolated": {"K16/V8": [0.02, 0.02]},
        "batches": 2,
        "batches_restored_equal": 2,
        "mutations": [
            {"what": "none (fetched again)", "bits_differ": False, "kl": 5e-4},
            {"what": "sign of one value", "bits_differ": True, "kl": 6e-4},
        ],
        "kl_from_simulation": 1e-7,
    }


def ttft() -> dict[str, Any]:
    """A report of `kvhold bench ttft`."""
    points = [
        {
            "length": length,
            "recompute": length / 1000,
            "restore": 0.1 + length / 10000,
            "fetch": length / 20000,
            "ratio": (length / 1000) / (0.1 + length / 10000),
            "spread": [0.5 * length / 100, 2.0 * length / 100],
        }
        for length in (64, 128, 512)
    ]
    return {
        "conditions": {"cores": 2},
        "model": {"name": "a model"},
        "rounds": 3,
        "bytes_per_token": 1000.0,
        "placements": {"L1 only": {"points": points, "break_even": 111.0}},
    }


def demo() -> dict[str, Any]:
    """A report of `kvhold demo` with a wrong answer in its last round."""
    phases = [
        {
            "name": name,
            "requests": 4,
            "restored": restored,
            "in_part": 1,
            "computed": 3 - restored,
            "first_ms": 100.0,
            "wrong": wrong,
        }
        for name, restored, wrong in (("never offloaded", 0, 0), ("the tiers", 3, 1))
    ]
    return {"model": {"name": "a model"}, "engine": "naive", "phases": phases}
