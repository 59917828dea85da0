"""What the driver's numbers mean for the buffers."""

import pytest

from transfer._cuda_api import CudaError, CudaMissing
from transfer._errors import TransferError


@pytest.mark.parametrize("code", [201, 214, 700, 702, 709, 710, 715, 716, 717, 718, 719, 721])
def test_errors_that_take_the_context(code: int) -> None:
    assert CudaError(code, "cuEventQuery").sticky
    assert not CudaError(code, "cuEventQuery").capture


@pytest.mark.parametrize("code", [1, 2, 600, 701, 714 + 6, 801])
def test_errors_that_leave_it(code: int) -> None:
    assert not CudaError(code, "cuMemAlloc").sticky


@pytest.mark.parametrize("code", range(900, 909))
def test_a_capture_is_no_loss(code: int) -> None:
    error = CudaError(code, "cuEventQuery")
    assert error.capture
    assert not error.sticky


def test_messages_name_the_call_and_the_number() -> None:
    assert str(CudaError(2, "cuMemAlloc", "out of memory")) == (
        "cuMemAlloc: CUDA error 2 (out of memory)"
    )
    assert str(CudaError(2, "cuMemAlloc")) == "cuMemAlloc: CUDA error 2"
    assert issubclass(CudaMissing, TransferError)
