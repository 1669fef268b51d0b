"""The Hopper kernel of the estimate's merge: on a CPU through the emulator, against float64, and on a GPU beside the portable one."""

import math

import pytest
import torch
from cases import INTERPRETED, ragged
from estimate_cases import estimate_case, no_worse
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from hopper_emulator import module, run

from ssta.kernels.backend import choose
from ssta.kernels.routing import Where

emulated = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so the kernel itself runs")


def problem(lengths, units, *, dim=64, heads=2, kv_heads=1, batch=1, device="cpu", extra=0):
    """What ``merge`` takes, by name: blocks of ``lengths`` tokens and ``extra`` tokens that are of none; some units are not estimated,
    for some blocks not one."""
    tokens, blocks = sum(lengths) + extra, len(lengths)

    def rows(*shape):
        return torch.randn(batch, *shape, dim, device=device).to(torch.bfloat16)

    q, out = (rows(tokens, heads).transpose(1, 2) for _ in range(2))
    bias = torch.randn(batch, heads, blocks, units, device=device) * 3 + 8
    bias[torch.rand_like(bias) < 0.2] = -torch.inf
    bias[:, 1, 1] = -torch.inf
    matrix = (0.2 * rows(heads * blocks, dim)).view(batch * kv_heads, -1, dim * dim)
    # As many as the rows of the longest block fill, or 64 of them.
    shares = torch.full((batch, heads, blocks, -(-max(lengths) // 64)), 7.0, device=device)
    return dict(out=out, lse=torch.randn(batch, heads, tokens, device=device) + 10, q=q, k_mean=rows(kv_heads, units),
                v_mean=rows(kv_heads, units), bias=bias, left=(bias > -torch.inf).sum(-1).int(), matrix=matrix,
                estimate_lse=torch.full((batch, heads, tokens), -torch.inf, device=device), offsets=ragged(lengths, device),
                scale=1.3 * dim**-0.5, shares=shares)


def expected(of, dtype=torch.float64, held=lambda x: x):
    """(out, lse, estimate_lse, share) in a dtype; ``held``: weights and results as the kernel holds them."""
    q, bias = of["q"].to(dtype), of["bias"].to(dtype) * math.log(2)
    k, v = (of[name].to(dtype).repeat_interleave(q.shape[1] // of["k_mean"].shape[1], 1) for name in ("k_mean", "v_mean"))
    out, lse, estimate_lse = (of[name].to(dtype).clone() for name in ("out", "lse", "estimate_lse"))
    share = torch.empty_like(bias[..., 0])
    matrices = of["matrix"].to(dtype).view(*bias.shape[:3], q.shape[3], q.shape[3])
    bounds = of["offsets"].tolist()
    for block in range(bias.shape[2]):
        rows = slice(bounds[block], bounds[block + 1])
        logits = of["scale"] * q[:, :, rows] @ k.mT + bias[:, :, block, None]
        nothing = logits.isneginf().all(-1)
        estimate_lse[:, :, rows] = logits.logsumexp(-1)
        # As the largest is 1, and with their own sum.
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        estimated = held(weights) @ v / weights.sum(-1, keepdim=True) + of["scale"] * q[:, :, rows] @ matrices[:, :, block]
        total = torch.logaddexp(lse[:, :, rows], estimate_lse[:, :, rows])
        of_exact = (lse[:, :, rows] - total).exp()
        merged = held(of_exact[..., None] * out[:, :, rows] + (1 - of_exact)[..., None] * estimated)
        out[:, :, rows] = torch.where(nothing[..., None], out[:, :, rows], merged)
        lse[:, :, rows] = total
        share[:, :, block] = of_exact.sum(-1) / max(rows.stop - rows.start, 1)
    return out, lse, estimate_lse, share


def by_block(x, bounds):
    """Root mean squares ``[N, B, H]`` of what is finite."""
    x = x.nan_to_num(0, 0, 0)
    return torch.stack([x[:, :, a:b].flatten(2).square().mean(-1).sqrt() for a, b in zip(bounds, bounds[1:]) if b > a])


def assert_as_exact(of, results):
    """In no block an error of more than twice that of plain torch with weights and out in bfloat16 and the rest in float32, and half a unit
    in the last place of out, or 16 roundings of float32; of a share they are those of the logarithms that it is the exponential of. And
    over all blocks out is no multiple of what it should be: roundings have no direction."""
    bounds, plain, right = of["offsets"].tolist(), expected(of, torch.float32, lambda x: x.bfloat16().float()), expected(of)
    logarithms = 16 * 2**-23 * max(1, float(right[2].nan_to_num(0, 0, 0).abs().max()))
    for name, got, truth, reference, rounding in zip(
            ("out", "lse", "estimate_lse", "shares"), results, right, plain, (2**-8, 16 * 2**-23, 16 * 2**-23, logarithms)):
        assert all(torch.equal(kind(got), kind(truth)) for kind in (torch.isnan, torch.isposinf, torch.isneginf)), name
        error, allowed, size = (by_block(x, bounds if name != "shares" else [*range(len(bounds))])
                                for x in (got.double() - truth, reference.double() - truth, truth))
        no_worse(name, error, allowed, rounding * torch.maximum(size, size.mean()))
    longer, plain_longer = (times_longer(x[0].double(), right[0]) for x in (results, plain))
    assert abs(longer) <= 2 * abs(plain_longer) + 2**-10, f"out is {longer:.2%} longer than it should be"


def times_longer(got, truth):
    """By how many times itself ``truth`` is exceeded, where it is finite."""
    got, truth = (x.where(truth.isfinite(), 0.0) for x in (got, truth))
    return float(((got - truth) * truth).sum() / truth.square().sum())


def assert_right(compute, of):
    """Returns (out, lse, estimate_lse, share), in copies."""
    found = of | {name: of[name].clone() for name in ("out", "lse", "estimate_lse", "shares")}
    compute(*found.values())
    results = found["out"], found["lse"], found["estimate_lse"], found["shares"].sum(-1)
    assert_as_exact(of, results)
    others, untouched = slice(int(of["offsets"][-1]), None), slice(*of["offsets"][1:3].tolist())
    assert all(torch.equal(found[name][:, :, others], of[name][:, :, others]) for name in ("out", "lse"))
    assert torch.equal(found["out"][:, 1, untouched], of["out"][:, 1, untouched]), "rows that leave nothing out keep their bits"
    return results


def compute_emulated(late):
    return lambda *arguments: run("estimate_merge", *arguments, late=late, function="hopper_merge")


late = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@emulated
@late
@pytest.mark.parametrize("units", [5, 130, 384])
def test_emulated_ragged_blocks(units, late):
    assert_right(compute_emulated(late), problem([70, 30, 0, 64, 200, 3], units, heads=4, kv_heads=2, batch=2, extra=11))


@emulated
@late
def test_emulated_at_head_dim_128(late):
    assert_right(compute_emulated(late), problem([100, 140], 300, dim=128))


@emulated
@late
def test_emulated_queries_that_are_not_finite(late):
    """In a block's last row, and in the first of the next, which is loaded with its last ones; one of whose weights none is left."""
    of = problem([100, 70, 64], 256)
    of["q"][0, 0, 99, 3], of["q"][0, 0, 100, 5], of["q"][0, 1, 180, 7] = torch.nan, torch.nan, -torch.inf
    of["k_mean"][..., 7] = of["k_mean"][..., 7].abs() + 0.1
    results = assert_right(compute_emulated(late), of)
    assert results[2][0, 1, 180] == -torch.inf


@emulated
def test_emulated_logits_of_many_hundreds():
    of = problem([100, 70, 9], 200)
    of["q"] = of["q"] * 200
    assert_right(compute_emulated(False), of)


@emulated
@late
def test_emulated_rows_that_overflow_walk_again(late, monkeypatch):
    """What they attend to most comes last, 300 doublings above what came first and above the exact part. Other rows keep their bits."""
    of = problem([100, 70, 130], 200, heads=2)
    of["bias"][0, 0, :, 150] = 8.0
    usual = assert_right(compute_emulated(late), of)
    q, k = of["q"].clone(), of["k_mean"].clone()
    q[0, :, [3, 90, 299], 5], k[0, :, 150, 5] = 40.0, 40.0
    others = torch.ones(300, dtype=torch.bool).index_fill(0, torch.tensor([3, 90, 299]), False)
    q[0, :, others, 5] = 0
    expected = assert_right(compute_emulated(late), of | dict(q=q * others[None, None, :, None], k_mean=k))
    got = assert_right(compute_emulated(late), of | dict(q=q, k_mean=k))
    assert all(torch.equal(a[:, :, others], b[:, :, others]) for a, b in zip(got[:3], expected[:3]))
    assert (got[2][0, 0, [3, 90, 299]] - usual[2][0, 0, [3, 90, 299]] > 200).all()
    monkeypatch.setattr(module("softmax"), "LARGEST_SUM", 0.0)
    assert_right(compute_emulated(late), of)


@emulated
def test_emulated_parts_of_very_different_weight():
    """Rows without an exact part, and rows beside whose exact part the estimate is nothing."""
    of = problem([100, 70], 200)
    of["lse"][:, :, ::3], of["lse"][:, :, 1::3] = -torch.inf, 400.0
    found = of | {name: of[name].clone() for name in ("out", "lse", "estimate_lse")}
    compute_emulated(False)(*found.values())
    assert_as_exact(of, (found["out"], found["lse"]))
    assert torch.equal(found["out"][:, :, 1::3], of["out"][:, :, 1::3])


@pytest.mark.parametrize("capability, dtype, dim, runs", [
    ((9, 0), torch.bfloat16, 128, True), ((9, 0), torch.bfloat16, 64, True), ((8, 0), torch.bfloat16, 128, False),
    (None, torch.bfloat16, 128, False), ((10, 0), torch.bfloat16, 128, False), ((9, 0), torch.float16, 128, False),
    ((9, 0), torch.float32, 128, False), ((9, 0), torch.bfloat16, 80, False)])
def test_where_it_runs(capability, dtype, dim, runs):
    assert (dict(choose("auto", Where("cuda", capability, False, dtype, dim)).names)["merge"] == "hopper") is runs


def compute(*arguments):
    from ssta.kernels.hopper.estimate_merge import hopper_merge

    hopper_merge(*arguments)


def portable(*arguments):
    from ssta.kernels.portable.estimate_rows import merge

    merge(*arguments)


# As a canvas of 6 x 8 x 8 tiles cut at its edges has them.
LENGTHS = [384, 384, 336, 384, 192, 168, 0, 384, 65, 320, 384, 384, 1, 288, 384]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("units, longest", [(360, 384), (360, 256), (45, 256), (1080, 384), (1080, 256)])
def test_on_a_gpu(units, longest, dim):
    """Against float64, as is the portable kernel; the same bits again."""
    lengths = [min(length, longest) for length in LENGTHS] * 3
    of = problem(lengths, units, dim=dim, heads=6, kv_heads=2, batch=2, device="cuda", extra=77)
    of["q"][0, 0, longest - 1, 3], of["q"][0, 0, longest, 5], of["q"][1, 2, 900, 7] = torch.nan, torch.inf, torch.nan
    # Overflow where the last units come.
    of["q"][0, 1, [7, 200, 700], 3], of["k_mean"][0, 0, units - 2, 3] = 40.0, 40.0
    results = assert_right(compute, of)
    assert_right(portable, of)
    assert all(torch.equal(a.nan_to_num(7e3), b.nan_to_num(7e3)) for a, b in zip(results, assert_right(compute, of)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "out"])
def test_on_a_gpu_what_tma_cannot_follow_is_copied(name):
    from ssta.kernels.hopper.estimate_merge import ROWS, hopper_merge
    from ssta.kernels.portable import estimate as steps

    case = estimate_case([384, 100, 300], 3, heads=4, dim=128, dtype=torch.bfloat16, device="cuda")
    blocks, estimates, results = case.some_blocks(), case.estimate(), []
    for odd in ("", name):
        (out, lse), _ = case.exact(blocks)
        q, out = (torch.empty(*x.shape[:3], 129, dtype=x.dtype, device="cuda")[..., :128].copy_(x) if odd == of else x
                  for of, x in (("q", case.q), ("out", out)))
        steps.merge(out, lse, q, case.k, case.v, *case.shape, blocks.counts, blocks.indices, estimates, case.scale, False,
                      kernel=hopper_merge, kernel_rows=ROWS)
        results.append((out, lse))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.gpu
def test_on_a_gpu_it_never_waits():
    of = problem([384, 100, 300], 200, dim=128, heads=4, device="cuda")

    def step():
        written = {name: of[name].clone() for name in ("out", "lse", "estimate_lse", "shares")}
        compute(*(of | written).values())
        return tuple(written.values())

    assert_never_waits_and_fits_a_cuda_graph(step)
