"""Where Triton or a torch for CUDA is missing, the use fails with what is missing."""

import sys

import pytest
import torch
from tests.transfer.gpu_kit import FakeDriver

from transfer._cuda_api import CudaMissing
from transfer._cuda_kernels import TritonKernels


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CudaMissing, match="without CUDA, need a torch built for CUDA 13"):
        TritonKernels(FakeDriver(manual=True))


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "transfer.kernels", raising=False)
    with pytest.raises(CudaMissing, match=r"found no usable Triton .*need triton 3.6"):
        TritonKernels(FakeDriver(manual=True))
