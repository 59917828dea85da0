"""``kvhold`` and ``python -m kvhold``: the command line, from its first step on."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from kvhold.interrupts import ended, leave_at_once


def main() -> None:
    """Run the command line: every way out of it is an exit code and at most one line."""
    leave_at_once()
    from kvhold.cli import app  # noqa: PLC0415 - a signal may come while this is imported

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may have no ✓
    try:
        app()
    except SystemExit as end:
        ended(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except OSError as error:  # of printing itself: commands have caught their own
        _give_up_output()
        with contextlib.suppress(OSError):
            os.write(2, f"kvhold: cannot print: {error.strerror or error}\n".encode())
        sys.exit(2)


def _give_up_output() -> None:
    """Let nothing try again to write what could not be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


if __name__ == "__main__":
    main()
