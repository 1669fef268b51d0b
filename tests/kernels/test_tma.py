"""TMA descriptors: dtypes that no kernel takes are refused, and one that a launch knows is of the same memory, shape and tiles."""

import pytest
import torch

triton = pytest.importorskip("triton")

from ssta.kernels.lowering import tma  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"float16 or bfloat16 tensor here, got {dtype}"):
        tma.tma_descriptor(torch.zeros(1, 1, 64, 64).to(dtype), 64)
