"""What a lane works with."""

from typing import Any

import numpy as np
import pytest

from transfer._cuda_job import Job, Pace, Scratch
from transfer._cuda_watch import CudaFence
from transfer._errors import SubmitError
from transfer._staging import Pipeline


def test_tables_that_do_not_fit_are_refused() -> None:
    class Three(Pipeline):
        fixed_words = 1
        block_words = 2

        def fill(self, out: np.ndarray[Any, Any], first: int, count: int, *, staged: bool) -> None:
            out[:3] = (first, count, staged)

    memory = np.zeros(4, dtype=np.int64)
    with pytest.raises(SubmitError, match="3 words of tables for a scratch of 2"):
        Scratch.at(memory.ctypes.data, 0, 2).fill(Three(), 5, 1, staged=True)
    assert Scratch.at(memory.ctypes.data, 0, 3).fill(Three(), 5, 1, staged=True) == 24
    assert memory.tolist() == [5, 1, 1, 0]


@pytest.mark.parametrize(
    "wrong", [{"movers": 0}, {"movers": 3}, {"ahead": 0}, {"ahead": -1}, {"ramp": 0}]
)
def test_a_pace_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 or 2 movers"):
        Pace(**wrong)  # type: ignore[arg-type]


def test_a_job_begins_with_nothing_posted() -> None:
    fence = CudaFence()
    job = Job(fence, ())
    assert job.fence is fence
    assert (job.touched, job.whole, job.inline) == (False, False, True)
    assert next(job.steps, None) is None
