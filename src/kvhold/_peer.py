"""LMCache in an environment of its own, and the process that answers for it.

Its dependencies do not fit kvhold's (it wants an older numpy), so it is never imported here: a script
runs under its own interpreter and talks in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from kvhold._errors import UserError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

ENVIRONMENT: Final = Path(".venv-crosscheck")
LMCACHE: Final = "lmcache==0.5.6"
NEEDS: Final = (
    "torch==2.13.0",
    "numpy==2.2.6",
    "aiofiles",
    "aiohttp",
    "cachetools",
    "cryptography",
    "numba",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "requests",
    "sortedcontainers",
)
"""What LMCache's codec and file adapter import on a machine without a GPU; the rest of its needs is left out."""
SCRIPT: Final = Path(__file__).with_name("_lmcache_peer.py")


def build(environment: Path = ENVIRONMENT) -> Path:
    """Make the environment unless it is there; gives its interpreter.

    Raises:
        UserError: a step failed; pip has said why.
    """
    python = environment / "bin" / "python"
    stamp = environment / ".stamp"
    wanted = "\n".join((LMCACHE, *NEEDS))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python.absolute()
    is_new, done = not environment.exists(), False
    try:
        _run(sys.executable, "-m", "venv", str(environment))
        install = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check")
        _run(*install, *NEEDS)
        _run(*install, "--no-deps", LMCACHE)
        stamp.write_text(wanted, encoding="utf-8")
        done = True
    finally:
        if is_new and not done:
            shutil.rmtree(environment, ignore_errors=True)
    return python.absolute()


def _run(*command: str) -> None:
    """Run a step; what it prints goes to standard error, as all progress does."""
    status = subprocess.run(command, check=False, stdout=sys.stderr.fileno()).returncode  # noqa: S603 - our own interpreters
    if status:
        raise UserError(
            f"no environment for {LMCACHE}: {' '.join(command[1:4])} ended with {status}"
        )


@final
class Peer:
    """A process of the other environment that answers commands, one at a time."""

    def __init__(self, python: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreters
            # Isolated: the script's own folder would hide modules of the standard library.
            [str(python), "-I", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            RuntimeError: the process ended instead.
        """
        assert self._process.stdin is not None  # noqa: S101 - opened as a pipe
        assert self._process.stdout is not None  # noqa: S101 - opened as a pipe
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # the library logs to the same place
                answer: dict[str, Any] = json.loads(line)
                return answer
        status = self._process.wait()
        self._log.seek(0)
        raise RuntimeError(
            f"the other side ended with status {status}:\n{self._log.read()[-2000:]}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()
        self._log.close()
