"""The Hopper kernel of the estimate's products: on a CPU through the emulator, against float64, and on a GPU."""

from functools import partial

import pytest
import torch
from cases import INTERPRETED
from hopper_emulator import run

from ssta.kernels.block_forms import per_query_head

emulated = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so the kernel itself runs")
late = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


def problem(heads, kv_heads, rows, units, dim, device="cpu"):
    """The arguments but for the result, the result in float64, and its dtype, of both functions: mixtures have rows whose ends hold NaN."""
    mixture = torch.full((2, heads, rows, -(-units // 8) * 8), torch.nan, dtype=torch.bfloat16, device=device)[..., :units]
    mixture.copy_(torch.rand(2, heads, rows, units, device=device) / units)
    keys, queries = (torch.randn(2, number, *size, dim * dim, device=device).to(torch.bfloat16)
                     for number, size in ((kv_heads, (units,)), (heads, (rows,))))
    wide = per_query_head(keys, heads).double()
    return {"hopper_matrices": ((mixture, keys), mixture.double() @ wide, torch.bfloat16),
            "hopper_half_variances": ((queries, keys), queries.double() @ wide.mT, torch.float32)}


def check(call, given, truth, dtype):
    found = torch.full_like(truth, torch.nan, dtype=dtype)
    call(*given, found)
    # Rounded once, from sums in float32, which the matrix unit rounds after every 16 products.
    allowed = torch.finfo(dtype).eps + given[0].shape[3] / 16 * torch.finfo(torch.float32).eps
    assert (found.double() - truth).abs().max() <= allowed * truth.abs().max()


@late
@emulated
@pytest.mark.parametrize("function", ["hopper_matrices", "hopper_half_variances"])
def test_products_of_heads_that_share_keys(function, late):
    check(partial(run, "estimate_product", late=late, function=function), *problem(2, 1, 70, 67, 16)[function])


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "units"), [(960, 960), (75, 875), (60, 245), (1, 1), (129, 64)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("function", ["hopper_matrices", "hopper_half_variances"])
def test_on_a_gpu(function, rows, units, dim):
    import ssta.kernels.hopper.estimate_product as kernel

    check(getattr(kernel, function), *problem(4, 2, rows, units, dim, "cuda")[function])
