"""The program around the attention measurement: results that continue, modules that are built."""

from pathlib import Path

import torch

from attention.flashinfer import HEAD_DIMS
from kvhold.bench.attention import Results
from kvhold.bench.attention_builds import keys


def test_results_continue_where_the_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    first = Results(path)
    first.add("cells", {"cell": "a", "verdict": "right"})
    first.write()
    second = Results(path)
    second.add("cells", {"cell": "b", "verdict": "refused"})
    second.write()
    assert [line["cell"] for line in Results(path).data["cells"]] == ["a", "b"]


def test_every_module_of_the_sweep_is_built_once_and_those_of_128_first() -> None:
    found = keys()
    assert len(set(found)) == len(found)
    assert all(key.head_dim == 128 for key in found[:9])
    assert not any(key.head_dim == 128 for key in found[9:])
    assert [(key.cores, key.by_token) for key in found[:2]] == [(False, False), (True, False)]
    assert {key.head_dim for key in found} == set(HEAD_DIMS)
    assert {key.key for key in found} == {torch.bfloat16, torch.float16}
    assert not any(key.cores and key.by_token for key in found)
