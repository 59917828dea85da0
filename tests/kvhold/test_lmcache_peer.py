"""The script that runs beside LMCache, in its environment where there is one."""

import ast
import itertools
import sys
from pathlib import Path

import pytest

from kvhold._peer import ENVIRONMENT, SCRIPT, Peer
from kvhold.crosscheck import cases, compare

PYTHON = (Path(__file__).parents[2] / ENVIRONMENT / "bin" / "python").absolute()


def test_the_script_imports_nothing_of_kvhold() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    modules = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules - set(sys.stdlib_module_names) == {"lmcache", "torch"}


@pytest.mark.skipif(not PYTHON.exists(), reason="`make crosscheck` has not built the environment")
def test_lmcache_agrees_in_every_case() -> None:
    found = compare(PYTHON)
    assert found["different"] == {}
    assert found["equal"] == found["cases"] == len(list(cases()))


@pytest.mark.skipif(not PYTHON.exists(), reason="`make crosscheck` has not built the environment")
def test_calls_are_timed() -> None:
    common = {"shape": [16, 8, 128], "key": "bfloat16", "value": "bfloat16"}
    axes = {"head_axis": -2, "page_axis": None}
    with Peer(PYTHON) as peer:
        for scope, keys in itertools.product((0, 1), (True, False)):
            case = {**common, **axes, "scope": scope, "keys": keys}
            assert peer.ask(do="prepare", threads=1, case=case) == {"ready": True}
            for call in ("encode", "decode"):
                assert peer.ask(do="time", call=call, repeats=2)["seconds"] > 0
