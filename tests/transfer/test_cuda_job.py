"""What a lane works with."""

import numpy as np
import pytest

from transfer._cuda_job import Job, Scratch
from transfer._cuda_watch import CudaFence
from transfer._errors import SubmitError


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SubmitError, match="3 words of tables for a scratch of 2"):
        Scratch(0, 0, 2).fill(np.zeros(3, dtype=np.int64))


def test_a_job_begins_with_nothing_posted() -> None:
    fence = CudaFence()
    job = Job(fence, ())
    assert job.fence is fence
    assert (job.touched, job.whole, job.inline) == (False, False, True)
    assert next(job.steps, None) is None
