"""What every command does with an error: one clear line, and the exit code that belongs to it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvhold._errors import UserError
from kvhold._output import brief, reason, refuse
from kvhold.interrupts import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def one_line() -> Iterator[None]:
    """Turn what users can put right into one clear line, and signals into their exit code."""
    from tiers import PutFailed, TierBusy, TierError  # noqa: PLC0415 - not every command needs them

    # What the library warns of, the commands say themselves, once.
    logging.getLogger("kvhold").addHandler(logging.NullHandler())
    try:
        yield
    except UserError as error:
        refuse(str(error))
    except TierBusy as error:
        refuse(f"another process has the folder: {error}")
    except PutFailed as error:
        why = brief(next(iter(error.pages.values())))
        refuse(f"{len(error.pages)} pages could not be stored: {why}")
    except TierError as error:
        refuse(str(error))
    except OSError as error:
        refuse(reason(error))
    except BaseExceptionGroup as group:
        known, rest = group.split((OSError, TierError, UserError))
        if known is None or rest is not None:
            raise
        first = _first(known)
        refuse(reason(first) if isinstance(first, OSError) else str(first))
    except KeyboardInterrupt as error:
        interrupt = error if isinstance(error, Interrupted) else Interrupted()
        refuse(str(interrupt), code=interrupt.code)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception of a group."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
