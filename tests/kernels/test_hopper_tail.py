"""The Hopper kernel of the tail's weights: on a CPU through the emulator, against float64, and on a GPU also against the portable pair."""

import pytest
import torch
from cases import INTERPRETED, ragged
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from hopper_emulator import module, run

from ssta.kernels import tail

CAP = 1.0
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
    """In a block's last row, and in the first of the next, which is loaded with its last ones; one to which all units are -inf."""
    q, k_mean, *rest = problem([100, 70, 64], 256)
    q[0, 0, 99, 3], q[0, 0, 100, 5], q[0, 1, 30, 7], q[0, 1, 169, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
    k_mean[..., 7] = k_mean[..., 7].abs() + 0.1
    lse, _ = assert_right(compute_emulated(late), q, k_mean, *rest)
    assert lse[0, 1, 30] == -torch.inf


@emulated
def test_emulated_logits_of_many_hundreds():
    q, *rest = problem([100, 70], 200)
    assert_right(compute_emulated(False), q * 200, *rest)


@emulated
def test_emulated_runs_are_the_same_bits():
    """However blocks are divided among warpgroups."""
    results = []
    for programs in (1, 2, 3):
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module("tail_weights"), "programs_per_head", lambda *args, programs=programs: programs)
            results.append(assert_right(compute_emulated(False), *problem([70, 64, 200, 3, 129], 130)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0]))


@emulated
@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("blocks", [1, 45, 360])
@pytest.mark.parametrize("heads", [1, 12, 16, 24, 40])
def test_programs_end_together(heads, blocks, processors):
    """Rounds of the multiprocessors times blocks of a warpgroup are at most a fifth, and one block a round, more than blocks take."""
    programs = module("tail_weights").programs_per_head(heads, blocks, processors)
    rounds = -(-heads * programs // processors)
    assert 1 <= programs <= -(-blocks // 2)
    assert rounds * -(-blocks // (2 * programs)) <= 1.2 * heads * blocks / (2 * processors) + rounds


def test_where_it_runs():
    assert tail.hopper_weighs((9, 0), torch.bfloat16, 128, 384) and tail.hopper_weighs((9, 0), torch.float16, 64, 1)
    for other in (((8, 0), torch.bfloat16, 128, 384), (None, torch.bfloat16, 128, 384), ((10, 0), torch.bfloat16, 128, 384),
                  ((9, 0), torch.float32, 128, 384), ((9, 0), torch.bfloat16, 80, 384), ((9, 0), torch.bfloat16, 128, 385)):
        assert not tail.hopper_weighs(*other)


def compute(*arguments):
    from ssta.kernels.hopper.tail_weights import hopper_tail_weights

    hopper_tail_weights(*arguments)


def portable(q, k_mean, bias, half_variance, offsets, scale, cap, lse, weights):
    from ssta.kernels.portable.tail_rows import mean_weights, tail_lse

    longest = int(offsets.diff().max())
    tail_lse(q, k_mean, bias, offsets, longest, scale, lse)
    mean_weights(q, k_mean, bias, half_variance, offsets, longest, lse, scale, cap, weights)


gpu_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
gpu_dims = pytest.mark.parametrize("dim", [64, 128])
# As a canvas of 6 x 8 x 8 tiles cut at its edges has them.
LENGTHS = [384, 384, 336, 384, 192, 168, 0, 384, 65, 320, 384, 384, 1, 288, 384]


@pytest.mark.gpu
@damped
@gpu_dims
@gpu_dtypes
@pytest.mark.parametrize("units", [360, 240, 45])
def test_on_a_gpu(units, dtype, dim, damped):
    """Against float64, and against the portable kernels."""
    q, k_mean, bias, half_variance, offsets = problem(LENGTHS * 3, units, dim=dim, heads=6, kv_heads=2, batch=2, dtype=dtype, device="cuda",
                                                      extra=77)
    bias[0, 1] = bias[1, 2, 3] = bias[1, 5, 7, 1:] = -torch.inf
    half_variance = half_variance if damped else None
    q[0, 0, 383, 3], q[0, 0, 384, 5], q[1, 2, 900, 7], q[1, 5, 1169, 0] = torch.nan, torch.inf, -torch.inf, torch.nan
    results = assert_right(compute, q, k_mean, bias, half_variance, offsets)
    others = outputs(q, bias, half_variance)
    portable(q, k_mean, bias, half_variance, offsets, 1.3 * dim**-0.5, CAP, *others)
    for result, other, rtol in zip(results, others, (1e-5, 2**-7 if damped else 1e-3)):
        torch.testing.assert_close(result, other, rtol=rtol, atol=1e-5, equal_nan=True)
    again = outputs(q, bias, half_variance)
    compute(q, k_mean, bias, half_variance, offsets, 1.3 * dim**-0.5, CAP, *again)
    assert all(torch.equal(a.nan_to_num(7e3), b.nan_to_num(7e3)) for a, b in zip(results, again))


@pytest.mark.gpu
def test_on_a_gpu_the_size_of_a_video():
    """All multiprocessors at work, many blocks to each warpgroup."""
    assert_right(compute, *problem(LENGTHS[:5] * 24, 360, dim=128, heads=16, kv_heads=16, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_on_a_gpu_the_tail_takes_it(monkeypatch):
    """Where TMA can read q; elsewhere the portable kernels give the same."""
    q, k_mean, bias, half_variance, offsets = problem([384, 100, 300], 200, dim=128, heads=4, device="cuda", dtype=torch.bfloat16)
    odd = torch.empty(*q.shape[:3], 129, dtype=q.dtype, device="cuda")[..., :128].copy_(q)
    calls, results = [], []
    from ssta.kernels.hopper import tail_weights

    monkeypatch.setattr(tail_weights, "hopper_tail_weights",
                        lambda *args, usual=tail_weights.hopper_tail_weights: (calls.append(args), usual(*args)))
    for queries in (q, odd):
        results.append(outputs(q, bias, half_variance))
        tail._weigh(queries, k_mean, bias, half_variance, offsets, 384, 0.1, *results[-1])
    assert len(calls) == 1
    for result, other in zip(*results):
        torch.testing.assert_close(result, other, rtol=2**-7, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_it_never_waits():
    q, k_mean, bias, half_variance, offsets = problem([384, 100, 300], 200, dim=128, heads=4, device="cuda", dtype=torch.bfloat16)

    def step():
        lse, weights = torch.empty(q.shape[:3], device="cuda"), torch.empty_like(bias)
        compute(q, k_mean, bias, half_variance, offsets, 0.1, CAP, lse, weights)
        return lse, weights

    assert_never_waits_and_fits_a_cuda_graph(step)
