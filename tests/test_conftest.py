"""The fixtures themselves: backends, the detector of blocking calls, seeds."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sniffio
from blockbuster import BlockingError

SOURCE = Path(__file__).parent.parent / "src"
pytest_plugins = ["pytester"]


def sleeper(package: str) -> Callable[[], None]:
    """Make a function that blocks, as if it were written in a package of the library."""
    namespace: dict[str, Callable[[], None]] = {}
    text = "import time\ndef block():\n    time.sleep(0)"
    exec(compile(text, str(SOURCE / package / "sample.py"), "exec"), namespace)  # noqa: S102
    return namespace["block"]


@pytest.mark.anyio
@pytest.mark.parametrize("package", ["transfer", "tiers", "attention"])
@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": use}) for use in (False, True)], ids=str
)
async def test_library_that_blocks_the_loop_is_caught(package: str) -> None:
    with pytest.raises(BlockingError):
        sleeper(package)()


@pytest.mark.anyio
@pytest.mark.may_block
async def test_marked_test_may_block() -> None:
    sleeper("transfer")()


@pytest.mark.anyio
async def test_program_and_test_may_block() -> None:
    sleeper("kvhold")()
    time.sleep(0)  # noqa: ASYNC251 - that it passes is the point


@pytest.mark.anyio
async def test_each_backend_is_what_its_name_says(request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    assert name in {"asyncio", "uvloop", "trio"}
    if name == "trio":
        assert sniffio.current_async_library() == "trio"
    else:
        assert type(asyncio.get_running_loop()).__module__.startswith(name)


def test_seed_is_stable_and_can_be_given(pytester: pytest.Pytester) -> None:
    conftest = Path(__file__).parent / "conftest.py"
    pytester.makeconftest(conftest.read_text(encoding="utf-8"))
    pytester.makepyfile("def test_a(seed):\n    print('seed is', seed)\n    assert not seed")
    outcome = pytester.runpytest_subprocess("--seed", "7")
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines(["*test_a' --seed 7"])
    pytester.runpytest_subprocess("--seed", "0").assert_outcomes(passed=1)
    first, second = (pytester.runpytest_subprocess().stdout.str() for _ in range(2))
    assert [line for line in first.splitlines() if "--seed" in line] == [
        line for line in second.splitlines() if "--seed" in line
    ]
