"""One loop by default: what differs between loops is tested without a GPU."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run async tests on uvloop."""
    return ("asyncio", {"use_uvloop": True})
