"""What every command does with an error: one clear line, and the exit code that belongs to it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvhold._output import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERRUPTED = 130


@contextmanager
def one_line() -> Iterator[None]:
    """Turn what users can put right into one clear line, and Ctrl-C into its exit code."""
    from kvhold.model import ModelError  # noqa: PLC0415 - seconds of import
    from tiers import TierBusy, TierError  # noqa: PLC0415 - as above

    try:
        yield
    except ModelError as error:
        refuse(str(error))
    except TierBusy as error:
        refuse(f"another process has the folder: {error}")
    except TierError as error:
        refuse(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        refuse(f"{where}{error.strerror or error}")
    except BaseExceptionGroup as group:
        known, rest = group.split((OSError, TierError))
        if known is None or rest is not None:
            raise
        refuse(str(_first(known)))
    except KeyboardInterrupt:
        refuse("interrupted; nothing is left behind", code=INTERRUPTED)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception of a group."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
