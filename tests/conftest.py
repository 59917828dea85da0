"""Fixtures of every suite: the async backends, the blocking-call detector and seeds."""

import os
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import settings

LIBRARY = ("transfer", "tiers", "attention")
SOURCE = Path(__file__).parent.parent / "src"

# Where the library may wait on the loop's thread: the end of a worker whose queue is empty, when
# a device is closed. Everything else that blocks there is a bug.
MAY_BLOCK = (
    ("/transfer/_workers.py", ("close", "join")),
    ("/transfer/host.py", ("close",)),
    ("/transfer/files.py", ("close",)),
    ("/transfer/cuda.py", ("start", "close")),
)

SEED = pytest.StashKey[int]()

# No deadline: two cores are shared by everything that runs, and time proves nothing here.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--seed`: every test that takes the `seed` fixture runs with that one."""
    parser.addoption("--seed", type=int, default=None, help="replay a printed seed")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ],
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run each async test on asyncio, uvloop and trio."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return this test's seed: its name's checksum, so that runs agree, or `--seed`."""
    given: int | None = request.config.getoption("--seed")
    chosen = zlib.crc32(request.node.nodeid.encode()) if given is None else given
    request.node.stash[SEED] = chosen
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the seed of a failed test, as the command that replays it."""
    report = yield
    if report.failed and SEED in item.stash:
        value = item.stash[SEED]
        report.sections.append(("seed", f"pytest '{item.nodeid}' --seed {value}"))
    return report


def make_detector() -> BlockBuster:
    """Make the detector of calls by which the library blocks an asyncio loop's thread."""
    scanned = []
    for name in LIBRARY:
        package = ModuleType(name)  # stands for the package, which need not be imported for this
        package.__path__ = [str(SOURCE / name)]
        scanned.append(package)
    detector = BlockBuster(scanned)
    for function in detector.functions.values():
        function.can_block_functions.extend(MAY_BLOCK)
    return detector


@contextmanager
def blocking_calls_raise() -> Iterator[None]:
    """Make blocking calls of the library raise `blockbuster.BlockingError` on a running loop."""
    detector = make_detector()
    detector.activate()
    try:
        yield
    finally:
        detector.deactivate()


@pytest.fixture(autouse=True)
def _detect_blocking(request: pytest.FixtureRequest) -> Iterator[None]:
    is_async = "anyio_backend" in request.fixturenames
    if not is_async or request.node.get_closest_marker("may_block"):
        yield
        return
    if request.getfixturevalue("anyio_backend")[0] != "asyncio":
        yield
        return
    with blocking_calls_raise():
        yield
