"""The rows of the backend table, by which laws of its steps are parametrised."""

import pytest
import torch

from ssta.kernels import Backend
from ssta.kernels.backend import choose
from ssta.kernels.device import capability
from ssta.kernels.routing import Where

GPU = torch.cuda.is_available()
# Where Triton's kernels run: in its interpreter without a GPU.
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
# Rows that are checked against plain torch's. What a row lacks the next one has, so that "hopper" is every row's best on such a GPU.
ROWS = [pytest.param("triton", id="triton"), pytest.param("hopper", id="hopper", marks=pytest.mark.gpu)]
rows = pytest.mark.parametrize("row", ROWS)


def backend_of(row: str, dtype: torch.dtype = torch.float16, dim: int = 64) -> Backend:
    """The steps of a row on ``DEVICE``, whatever attention itself can run there."""
    return choose(row, Where(DEVICE.type, capability(DEVICE) if GPU else None, not GPU, dtype, dim))
