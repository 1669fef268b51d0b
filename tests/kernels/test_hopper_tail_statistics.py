"""The Hopper kernel of what is known of blocks' keys and values: on a CPU through the emulator, against float64, and on a GPU."""

from functools import partial

import pytest
import torch
from cases import INTERPRETED, ragged
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from hopper_emulator import module, run
from planned import planned

from ssta.kernels.portable import tail
from ssta.kernels.portable import tail_statistics as portable

emulated = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so the kernel itself runs")
late = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
DIM = 128


def problem(lengths, *, heads=2, batch=1, device="cpu", extra=0):
    """k, v ``[B, H, P, D]`` with means unlike zero, and offsets; the last tokens are of no block."""
    tokens = sum(lengths) + extra
    k, v = ((torch.randn(batch, tokens, heads, DIM, device=device) + shift).to(torch.bfloat16).transpose(1, 2) for shift in (3, -1))
    return k, v, ragged(lengths, device)


def expected(k, v, offsets):
    """(k_mean, v_mean, log_count, moments as they are kept, covariances) in float64."""
    found = []
    bounds = offsets.tolist()
    for first, last in zip(bounds, bounds[1:]):
        keys, values = k[:, :, first:last].double(), v[:, :, first:last].double()
        sound = (keys.isfinite() & values.isfinite()).all(-1).all(-1)
        keys, values = (x.masked_fill(~sound[..., None, None], 0) for x in (keys, values))
        count = max(last - first, 1)
        k_mean, v_mean = keys.sum(2) / count, values.sum(2) / count
        dk, dv = keys - k_mean[:, :, None], values - v_mean[:, :, None]
        known = torch.where(sound & (last > first), torch.tensor(count, device=k.device).double().log(), -torch.inf)
        spread = dk.mT @ dk / count
        kept = torch.cat([spread[..., row:row + portable.SLAB, row:].flatten(-2) for row in range(0, DIM, portable.SLAB)], -1)
        found.append((k_mean, v_mean, known, kept, (dk.mT @ dv / count).flatten(-2)))
    return [torch.stack(x, 2) for x in zip(*found)]


def compute(k, v, offsets, late=None):
    """The kernel's results; on a GPU where ``late`` is None."""
    batch, heads = k.shape[:2]
    blocks = len(offsets) - 1

    def new(*shape, dtype=torch.bfloat16):
        return torch.full((batch, heads, blocks, *shape), torch.nan, dtype=dtype, device=k.device)

    results = new(DIM), new(DIM), new(dtype=torch.float32), new(portable.packed_size(DIM)), new(DIM * DIM)
    if late is None:
        from ssta.kernels.hopper.tail_statistics import hopper_key_statistics

        planned(hopper_key_statistics)(k, v, offsets, *results, portable.SLAB)
    else:
        emulated = partial(run, "tail_statistics", late=late, function="hopper_key_statistics")
        planned(emulated)(k, v, offsets, *results, portable.SLAB)
    return results


def assert_right(results, of):
    for got, wanted in zip(results, of):
        torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-7)


@pytest.fixture(params=[1, 7], ids=["one processor", "seven processors"])
def processors(request, monkeypatch):
    monkeypatch.setattr(module("tail_statistics"), "multiprocessors", lambda device: request.param)


@emulated
@late
def test_emulated_ragged_blocks(late, processors):
    of = problem([70, 30, 0, 64, 200, 1], heads=2, batch=2, extra=11)
    assert_right(compute(*of, late=late), expected(*of))


@emulated
@late
def test_emulated_what_is_not_finite_is_not_estimated(late, processors):
    """In a block's last token, and in the first of the next, which is loaded with it."""
    k, v, offsets = problem([70, 40, 64, 128], heads=2)
    k[0, 0, 69, 3], v[0, 1, 70, 5], k[0, 1, 200, 7] = torch.nan, torch.inf, torch.nan
    results = compute(k, v, offsets, late=late)
    assert results[2].isneginf().nonzero().tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 3]]
    assert_right(results, expected(k, v, offsets))


LENGTHS = [384, 384, 336, 384, 192, 168, 0, 384, 65, 320, 384, 384, 1, 288, 384]


@pytest.mark.gpu
def test_on_a_gpu():
    """Against float64; the same bits again."""
    k, v, offsets = problem(LENGTHS * 4, heads=3, batch=2, device="cuda", extra=77)
    k[0, 0, 383, 3], v[1, 2, 900, 7] = torch.nan, torch.inf
    results = compute(k, v, offsets)
    assert_right(results, expected(k, v, offsets))
    assert all(torch.equal(a.nan_to_num(7e3), b.nan_to_num(7e3)) for a, b in zip(results, compute(k, v, offsets)))


@pytest.mark.gpu
def test_on_a_gpu_it_never_waits():
    of = problem(LENGTHS, heads=2, device="cuda")
    assert_never_waits_and_fits_a_cuda_graph(lambda: tuple(compute(*of)))


@pytest.mark.gpu
def test_on_a_gpu_the_tail_takes_it():
    """Also of keys that TMA cannot follow; without it the portable kernels give the same."""
    from ssta.kernels.hopper.tail_statistics import hopper_key_statistics

    k, v, offsets = problem([384, 384, 320] * 4, device="cuda")
    q, blocks = torch.randn_like(k), (offsets, 12, 384)
    odd = torch.empty(*k.shape[:3], 129, dtype=torch.bfloat16, device="cuda")[..., :128].copy_(k)
    usual, copied = (tail.estimate(q, keys, v, blocks, blocks, 0.05, 1, kernel=hopper_key_statistics) for keys in (k, odd))
    other = tail.estimate(q, k, v, blocks, blocks, 0.05, 1)
    assert torch.equal(usual.covariances, copied.covariances) and other.covariances is None
    for name in ("log_count", "half_variance", "mass", "k_mean", "v_mean"):
        torch.testing.assert_close(getattr(usual, name), getattr(other, name), rtol=2**-6, atol=2**-6)
