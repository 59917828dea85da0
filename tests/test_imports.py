"""Importing a package starts nothing, says nothing and pulls in nothing heavy (case 82).

Each import runs in a process of its own, since this one has imported everything already.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent.parent / "src"

PROBE = """
import asyncio, json, logging, sys, threading

records = []
class Recorder(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
logging.getLogger().addHandler(Recorder(level=0))
logging.getLogger().setLevel(0)
root_handlers = list(logging.getLogger().handlers)

loops = []
make_loop = asyncio.new_event_loop
asyncio.new_event_loop = lambda: loops.append(1) or make_loop()

def threads():
    # Tasks of the kernel rather than Python's own list: a native library's threads count too.
    from pathlib import Path
    return len(list(Path("/proc/self/task").iterdir()))

before = threads()
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps({
    "threads": threads() - before,
    "python_threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    "records": records,
    "handlers": logging.getLogger().handlers != root_handlers,
    "loops": len(loops),
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "cuda_started": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
}))
"""
HEAVY = {"torch", "cuda", "triton", "flashinfer", "transformers", "matplotlib", "cupy", "numba"}


def exists(module: str) -> bool:
    """Tell whether a module of ours has been written."""
    path = SOURCE.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def probe(*modules: str) -> dict[str, Any]:
    """Import modules in a fresh process and return what that did, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, *modules],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *noise, report = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(report)
    result["printed"] = [*noise, *done.stderr.splitlines()]
    return result


def assert_quiet(report: dict[str, Any]) -> None:
    """Check that an import started and said nothing."""
    assert report["python_threads"] == []
    assert report["records"] == []
    assert not report["handlers"]
    assert report["loops"] == 0
    assert not report["cuda_started"]
    assert report["printed"] == []


@pytest.mark.parametrize(
    "module", ["transfer", "transfer.testing", "tiers", "tiers.testing", "kvhold", "kvhold.cli"]
)
def test_import_is_light_and_quiet(module: str) -> None:
    if not exists(module):
        pytest.skip(f"{module} is not part of this version")
    # numpy's linear algebra has threads of its own: only what comes on top of it is ours.
    report = probe("numpy", module)
    baseline = probe("numpy")
    assert_quiet(report)
    assert report["threads"] == baseline["threads"]
    assert HEAVY.isdisjoint(report["modules"])


def test_attention_is_quiet() -> None:
    report = probe("attention")
    assert_quiet(report)
    # torch itself takes CUDA's bindings along where they are installed.
    ours = set(report["modules"]) - set(probe("torch")["modules"])
    assert {"cuda", "flashinfer", "triton"}.isdisjoint(ours)


def test_the_probe_sees_what_it_forbids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    samples = {
        "python_threads": (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(2,), daemon=True).start()"
        ),
        "records": "import logging\nlogging.getLogger('a').debug('b')",
        "handlers": "import logging\nlogging.getLogger().addHandler(logging.NullHandler())",
        "loops": "import asyncio\nasyncio.new_event_loop().close()",
        "printed": "print('hello')",
    }
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for field, text in samples.items():
        (tmp_path / f"noisy_{field}.py").write_text(text, encoding="utf-8")
        with subtests.test(field):
            report = probe(f"noisy_{field}")
            assert report[field]
            with pytest.raises(AssertionError):
                assert_quiet(report)
