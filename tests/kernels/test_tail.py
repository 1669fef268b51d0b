"""The tail's kernels against its specification in float64: in Triton's interpreter without a GPU, and on one."""

import pytest
import torch
from tail_cases import bfloat16_products, same_estimates, tail_case  # noqa: F401

pytestmark = pytest.mark.usefixtures("bfloat16_products")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Largest error of out and of lse: sums of rounded weights times rounded means, and out itself rounded; of values of about 1. Triton's
# interpreter rounds to bfloat16 towards zero.
TOLERANCE = {torch.bfloat16: (2**-6, 2**-6) if DEVICE == "cuda" else (2**-5, 2**-5), torch.float16: (2**-8, 2**-7), torch.float32: (2**-8, 2**-7)}


def check(case, monkeypatch, blocks=None, with_mass=True):
    """Both calls against the specification; returns (results, inputs, estimates)."""
    estimates = case.estimate(with_mass)
    expected = case.specified_estimates(monkeypatch, estimates.order, with_mass)
    same_estimates(case, estimates, expected)
    blocks = case.some_blocks() if blocks is None else blocks
    (out, lse), exact = case.exact(blocks)
    before = out.clone(), lse.clone()
    results = case.add(out, lse, blocks, estimates)
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1]), "the caller's stay as they are"
    for got, wanted, tolerance in zip(results, case.specified(*exact, blocks, expected), (*TOLERANCE[out.dtype], 2**-6)):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance, equal_nan=True)
    assert results[0].dtype == out.dtype and results[0].stride() == out.stride()
    assert torch.equal(results[0][:, :, case.slots:], out[:, :, case.slots:]), "rows of other blocks"
    assert torch.equal(results[1][:, :, case.slots:], lse[:, :, case.slots:])
    return results, (out, lse, blocks), estimates


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_blocks(dtype, linear, parts, monkeypatch):
    case = tail_case([40, 17, 0, 33, 2, 70, 21], 5, dtype=dtype, parts=parts, linear=linear, device=DEVICE)
    check(case, monkeypatch)


@pytest.mark.parametrize("dim", [32, 64, 80])
@pytest.mark.parametrize("parts", [1, 2])
def test_head_dims(dim, parts, monkeypatch):
    check(tail_case([66, 50, 10], 3, dim=dim, parts=parts, device=DEVICE), monkeypatch)


@pytest.mark.parametrize("parts", [1, 2])
def test_batch_and_grouped_heads(parts, monkeypatch):
    check(tail_case([20, 35, 9, 12], 3, heads=4, kv_heads=2, batch=2, parts=parts, device=DEVICE), monkeypatch)


def test_means_need_no_mass(monkeypatch):
    _, _, estimates = check(tail_case([20, 35, 9], 3, linear=False, device=DEVICE), monkeypatch, with_mass=False)
    assert estimates.mass is None and estimates.useful() is None
