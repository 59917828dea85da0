"""Triton's interpreter stands in for its compiler where there is no GPU.

Triton decides when it is imported, so this is set before any test module is.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
