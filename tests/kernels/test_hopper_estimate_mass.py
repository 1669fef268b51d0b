"""The Hopper kernel of the mass that blocks see in units: on a CPU through the emulator, against float64, and on a GPU."""

from functools import partial

import pytest
import torch
from cases import INTERPRETED, ragged
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from hopper_emulator import run

from ssta.kernels.block_forms import per_query_head
from ssta.kernels.eager.estimate import _Cut
from ssta.kernels.estimate import sampled_queries

emulated = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so the kernel itself runs")
late = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
SCALE = 0.1


def problem(lengths, units, dim, *, heads=2, kv_heads=1, batch=1, device="cpu"):
    """Arguments of the kernel: some units hold nothing, and some queries what is not finite."""
    q = torch.randn(batch, sum(lengths) + 5, heads, dim, device=device).to(torch.bfloat16).transpose(1, 2)
    q[0, 0, 3, 1], q[0, -1, :sum(lengths[:1])] = torch.inf, torch.nan
    k_mean = torch.randn(batch, kv_heads, units, dim, device=device).to(torch.bfloat16)
    log_count = torch.full((batch, kv_heads, units), 4.0, device=device)
    log_count[..., 1::9], log_count[..., 0] = -torch.inf, 3.0
    half_variance = 3 * torch.rand(batch, heads, len(lengths), units, device=device)
    return q, k_mean, log_count, half_variance, ragged(lengths, device), max(lengths)


def expected(q, k_mean, log_count, half_variance, offsets, longest):
    """(mass, error) in float64."""
    rows = _Cut((offsets, len(offsets) - 1, longest), q.shape[2])
    sampled, counted = rows.sample()
    queries = rows.cut(q.double()).gather(3, sampled[..., None].expand(*q.shape[:2], -1, -1, q.shape[3]))
    trusted = queries.isfinite().all(-1) & counted
    queries = queries.masked_fill(~trusted[..., None], 0)
    k_mean, log_count = (per_query_head(x.double(), q.shape[1]) for x in (k_mean, log_count))
    bias = log_count[:, :, None] + half_variance.double().clamp(max=1.0)
    weights = (SCALE * queries @ k_mean.mT[:, :, None] + bias[..., None, :]).softmax(-1) * trusted[..., None]
    mass = weights.sum(3) / counted.sum(1).clamp(min=1)[:, None]
    return mass, (mass * half_variance.double()).sum(-1)


def check(call, q, k_mean, log_count, half_variance, offsets, longest, sums=1):
    """``half_variance`` comes in so many parts."""
    truth = expected(q, k_mean, log_count, half_variance, offsets, longest)
    mass, rounded = (torch.full(half_variance.shape, torch.nan, dtype=torch.bfloat16, device=q.device) for _ in range(2))
    error = torch.full(mass.shape[:3], torch.nan, device=q.device)
    parts = torch.cat([half_variance / sums] * sums, -1)
    call(q, k_mean, log_count, parts, offsets, SCALE, sampled_queries(longest), 1.0, mass, rounded, error)
    assert torch.equal(rounded, half_variance.to(torch.bfloat16))
    assert ((mass.double() - truth[0]).abs() <= 2**-8 * truth[0] + 1e-6).all()
    torch.testing.assert_close(error.double(), truth[1], rtol=1e-4, atol=1e-6)
    return mass, error


@late
@emulated
@pytest.mark.parametrize(("lengths", "units", "sums"), [([40, 7, 0, 33, 64], 70, 1), ([130, 150, 20], 65, 4)],
                         ids=["32 of a block", "64, in parts"])
def test_masses(late, lengths, units, sums):
    check(partial(run, "estimate_mass", late=late, function="hopper_mass"), *problem(lengths, units, 16), sums)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("longest", "sums"), [(128, 4), (384, 1)])
def test_on_a_gpu(dim, longest, sums):
    from ssta.kernels.hopper.estimate_mass import hopper_mass

    of = problem([longest, 40, 7, 0, longest - 1] * 9, 967, dim, heads=4, kv_heads=2, batch=2, device="cuda")
    first, again = (check(hopper_mass, *of, sums) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.gpu
def test_on_a_gpu_it_never_waits():
    from ssta.kernels.hopper.estimate_mass import hopper_mass

    of = problem([128, 40] * 3, 67, 128, device="cuda")
    mass, rounded, error = of[3].bfloat16(), of[3].bfloat16(), torch.empty(1, 2, 6, device="cuda")
    call = hopper_mass
    assert_never_waits_and_fits_a_cuda_graph(lambda: call(*of[:5], SCALE, 32, 1.0, mass, rounded, error) and (mass, error))
