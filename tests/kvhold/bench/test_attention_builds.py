"""Modules in the background: FA3 comes first, is waited for with words, and is never missing in silence."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvhold.bench import attention_time
from kvhold.bench.attention_builds import Builds, Fa3

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class FakeSpec:
    """A module whose build is over when the test says so."""

    def __init__(self, folder: Path, name: str, log: list[str]) -> None:
        self.name = name
        self.go = threading.Event()
        self.error: Exception | None = None
        self.locked = False
        self._log = log
        self._paths = [folder / f"{name}-{number}.o" for number in range(3)]

    def get_object_paths(self) -> list[Path]:
        return self._paths

    def build(self, *, verbose: bool, need_lock: bool = False) -> None:
        self._log.append(f"{self.name} begins")
        self.locked = need_lock
        assert self.go.wait(30)
        self._log.append(f"{self.name} ends")
        if self.error is not None:
            raise self.error


@pytest.fixture
def spec(tmp_path: Path) -> FakeSpec:
    return FakeSpec(tmp_path, "fa3", [])


def fa3(
    spec: FakeSpec, said: list[str], load: Callable[[], object] = dict, patience: float = 30.0
) -> Fa3:
    return Fa3(spec, load, patience=patience, tell=said.append, every=0.001)


def test_a_build_that_is_waited_for_says_how_far_it_is(spec: FakeSpec) -> None:
    said: list[str] = []
    loaded: list[bool] = []

    def tell(line: str) -> None:
        said.append(line)
        spec.get_object_paths()[0].touch()
        if len(said) == 3:
            spec.go.set()

    module = Fa3(spec, lambda: loaded.append(True), patience=30, tell=tell, every=0.001)
    found = module.get()
    assert said[0].startswith("FA3: 0 of 3 objects after")
    assert said[1].startswith("FA3: 1 of 3 objects after")
    assert (found["state"], found["module"], loaded) == ("compared", "fa3", [True])
    assert found["build_s"] >= 0
    assert spec.locked  # as loading does: never two builds in one folder


def test_a_build_that_takes_too_long_is_missing_and_says_how_far_it_came(spec: FakeSpec) -> None:
    found = fa3(spec, [], patience=0.01).get()
    spec.go.set()
    assert found["state"] == "missing"
    assert "not built within 0 s: 0 of 3 objects" in found["reason"]


def test_a_build_that_fails_is_missing_with_its_reason(spec: FakeSpec) -> None:
    spec.error = RuntimeError("Ninja build failed.\nmany lines")
    spec.go.set()
    found = fa3(spec, []).get()
    assert found["reason"] == "does not build: Ninja build failed."


def test_a_timeout_inside_the_build_is_no_wait(spec: FakeSpec) -> None:
    spec.error = TimeoutError()
    spec.go.set()
    assert fa3(spec, []).get()["reason"] == "does not build: TimeoutError()"


def test_a_module_that_does_not_load_is_missing(spec: FakeSpec) -> None:
    def load() -> None:
        raise OSError("undefined symbol")

    spec.go.set()
    assert fa3(spec, [], load).get()["reason"] == "does not load: undefined symbol"


def test_the_others_are_built_behind_it(tmp_path: Path) -> None:
    log: list[str] = []
    first, other = (FakeSpec(tmp_path, name, log) for name in ("fa3", "ours"))
    module = fa3(first, [])
    other.go.set()
    builds = Builds([other], workers=2, fa3=module, tell=log.append)
    first.go.set()
    builds.wait()
    assert log[:4] == ["fa3 begins", "fa3 ends", "ours begins", "ours ends"]
    assert log[4].startswith("1 modules built")
    assert builds.fa3()["state"] == "compared"


def test_others_are_built_though_it_fails(tmp_path: Path) -> None:
    log: list[str] = []
    first, other = (FakeSpec(tmp_path, name, log) for name in ("fa3", "ours"))
    first.error = RuntimeError("no")
    first.go.set()
    other.go.set()
    builds = Builds([other], workers=1, fa3=fa3(first, []), tell=log.append)
    builds.wait()
    assert "ours ends" in log


def test_without_it_the_record_says_so() -> None:
    builds = Builds.of(None, workers=1, first=0, more=[], fa3=60, tell=lambda _line: None)
    builds.wait()
    assert builds.fa3()["state"] == "missing"


def test_what_is_built_is_what_the_wrapper_loads(tmp_path: Path) -> None:
    asked: list[tuple[str, tuple[Any, ...]]] = []

    def built(*given: Any) -> FakeSpec:
        asked.append(("built", given))
        return FakeSpec(tmp_path, "fa3", [])

    def loaded(*given: Any) -> None:
        asked.append(("loaded", given))

    root = SimpleNamespace(
        jit=SimpleNamespace(gen_batch_prefill_module=built),
        prefill=SimpleNamespace(get_batch_prefill_module=loaded),
    )
    library: Any = SimpleNamespace(root=root)
    attention_time.fa3_spec(library)
    attention_time.load_fa3(library)
    assert [what for what, _ in asked] == ["built", "loaded"]
    assert asked[0][1] == asked[1][1]
    assert asked[0][1][0] == "fa3"
