"""Where Triton's kernels run in tests: on a GPU, or else number by number in its interpreter."""

from __future__ import annotations

import pytest
import torch

from understudy.ops import fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(fused.triton is None, reason="needs Triton")

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or fused.triton is None,
    reason="needs a CUDA device and Triton",
)
