"""The Hopper kernel of the tail's weights: on a CPU through the emulator, against float64, and on a GPU also against the portable pair."""

import pytest
import torch
from cases import INTERPRETED, ragged
from hopper_emulator import module, run

from ssta.kernels.device import capability

CAP = 1.0
on_gpu = pytest.mark.gpu
emulated = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so the kernel itself runs")
DTYPES = [torch.float16, torch.bfloat16]


def problem(lengths, units, *, dim=64, heads=2, kv_heads=1, batch=1, dtype=torch.float16, device="cpu", extra=0):
    """(q, k_mean, bias, half_variance, offsets): blocks of ``lengths`` tokens and ``extra`` tokens that are of none; some units are not
    estimated, for some blocks not one."""
    tokens, blocks = sum(lengths) + extra, len(lengths)
    q = torch.randn(batch, tokens, heads, dim, device=device).to(dtype).transpose(1, 2)
    k_mean = torch.randn(batch, kv_heads, units, dim, device=device).to(dtype)
    bias = torch.randn(batch, heads, blocks, units, device=device) * 3 + 8
    bias[torch.rand_like(bias) < 0.2] = -torch.inf
    half_variance = torch.rand(batch, heads, blocks, units, device=device) * 3
    return q, k_mean, bias, half_variance, ragged(lengths, device)


def expected(q, k_mean, bias, half_variance, offsets, scale):
    """(lse, weights) in float64; NaN in rows of no block."""
    q, k_mean = q.double(), k_mean.double().repeat_interleave(q.shape[1] // k_mean.shape[1], 1)
    lse = torch.full(q.shape[:3], torch.nan, dtype=torch.float64, device=q.device)
    weights = torch.zeros(bias.shape, dtype=torch.float64, device=q.device)
    bounds = offsets.tolist()
    for block in range(bias.shape[2]):
        rows = slice(bounds[block], bounds[block + 1])
        logits = scale * q[:, :, rows] @ k_mean.mT + bias[:, :, block, None].double() * torch.tensor(2.0).double().log().item()
        lse[:, :, rows] = logits.logsumexp(-1)
        of_row = (logits - lse[:, :, rows, None]).exp()
        of_row[~lse[:, :, rows].isfinite()] = 0
        weights[:, :, block] = of_row.sum(-2) / max(bounds[block + 1] - bounds[block], 1)
    if half_variance is not None:
        weights *= (CAP / half_variance.double().clamp_min(1e-6)).clamp_max(1).sqrt()
    return lse, weights


def outputs(q, bias, half_variance):
    """lse and weights, full of what must be written over; those of a mixture have rows of multiples of 8."""
    units = bias.shape[-1]
    lse = torch.full(q.shape[:3], 7.0, device=q.device)
    if half_variance is None:
        return lse, torch.full_like(bias, 7.0)
    return lse, bias.new_full((*bias.shape[:3], -(-units // 8) * 8), 7.0, dtype=torch.bfloat16)[..., :units]


def assert_right(compute, q, k_mean, bias, half_variance, offsets):
    scale = 1.3 * q.shape[-1] ** -0.5
    lse, weights = outputs(q, bias, half_variance)
    compute(q, k_mean, bias, half_variance, offsets, scale, CAP, lse, weights)
    right_lse, right_weights = expected(q, k_mean, bias, half_variance, offsets, scale)
    owned = int(offsets[bias.shape[2]])
    assert (lse[:, :, owned:] == 7).all(), "rows of other blocks"
    torch.testing.assert_close(lse[:, :, :owned].double(), right_lse[:, :, :owned], rtol=1e-5, atol=1e-4, equal_nan=True)
    # Rounded to bfloat16, or sums of float32.
    torch.testing.assert_close(weights.double(), right_weights, rtol=2**-8 if half_variance is not None else 1e-3, atol=1e-6)
    return lse, weights


def compute_emulated(late):
    return lambda *arguments: run("tail_weights", *arguments, late=late)


@pytest.fixture(params=[1, 7], ids=["one processor", "seven processors"])
def processors(request, monkeypatch):
    monkeypatch.setattr(module("tail_weights"), "multiprocessors", lambda device: request.param)


late = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
damped = pytest.mark.parametrize("damped", [True, False], ids=["mixture", "mass"])


@emulated
@late
@damped
@pytest.mark.parametrize("units", [5, 130, 384])
def test_emulated_ragged_blocks(units, damped, late, processors):
    q, k_mean, bias, half_variance, offsets = problem([70, 0, 64, 200, 3, 129, 64, 65], units, heads=4, kv_heads=2, batch=2, extra=11)
    bias[0, 1] = bias[1, 2, 3] = -torch.inf
    assert_right(compute_emulated(late), q, k_mean, bias, half_variance if damped else None, offsets)


@emulated
@late
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_emulated_dtypes_at_head_dim_128(dtype, late):
    assert_right(compute_emulated(late), *problem([100, 300], 300, dim=128, dtype=dtype))


@emulated
@late
def test_emulated_queries_that_are_not_finite(late):
    q, *rest = problem([100, 70, 64], 200)
    spoil(q)
    assert_right(compute_emulated(late), q, *rest)


def spoil(q):
    """NaN and infinities in a block's last row, and in the first of the next, which is loaded with its last ones."""
    q[0, 0, 99, 3], q[0, 0, 100, 5], q[0, 1, 30, 7], q[0, 1, 169, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
