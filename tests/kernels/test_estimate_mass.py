"""The mass that a block sees in each unit is the mean, over its queries, of the softmax over units."""

import pytest
import torch
from oracles import FACTOR

from ssta.kernels.block_forms import per_query_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, HEADS, KV_HEADS, DIM, UNITS, SAMPLE, CAP = (16, 5, 0, 12, 9), 4, 2, 24, 10, 16, 1.0
SCALE = DIM**-0.5


def masses(q, k_mean, log_count, h):
    """[B, H, N, U] in the inputs' dtype; a query that is not finite sees nothing."""
    bias = per_query_head(log_count, HEADS, 2)[:, :, None] + h.clamp(max=CAP)
    sound = q.isfinite().all(-1, keepdim=True)
    logits = SCALE * q.masked_fill(~sound, 0) @ per_query_head(k_mean, HEADS, 2).mT
    seen = (logits[:, :, None] + bias[:, :, :, None]).softmax(-1) * sound[:, :, None]
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return torch.stack([seen[:, :, i, start:start + length].sum(2) / max(length, 1)
                        for i, (start, length) in enumerate(zip(starts, LENGTHS))], 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_mass_is_the_mean_softmax_of_a_blocks_queries(dtype):
    from ssta.kernels.portable.estimate_rows import sampled_mass

    q = 2 * torch.randn(2, HEADS, sum(LENGTHS), DIM, device=DEVICE).to(dtype)
    q[1, 2, 3, 4] = float("inf")
    k_mean = torch.randn(2, KV_HEADS, UNITS, DIM, device=DEVICE).to(dtype)
    log_count = (1 + torch.rand(2, KV_HEADS, UNITS, device=DEVICE)).log()
    log_count[0, 1, 6] = float("-inf")
    # Half of them above the cap.
    h = 2 * CAP * torch.rand(2, HEADS, len(LENGTHS), UNITS, device=DEVICE)
    offsets = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).int()
    mass, rounded = (torch.empty_like(h, dtype=torch.bfloat16) for _ in range(2))
    error, scores = torch.empty_like(h[..., 0]), torch.empty_like(h[..., ::2])
    sampled_mass(q, k_mean, log_count, h, offsets, SCALE, SAMPLE, CAP, mass, rounded, error, scores)

    exact = masses(*(x.double() for x in (q, k_mean, log_count, h)))
    plain = masses(q, k_mean, log_count.to(dtype), h.to(dtype)).double()
    # bfloat16 keeps eight bits, and the interpreter rounds towards zero. Block by block, so that one wrong block or head shows.
    rounding = torch.finfo(torch.bfloat16).eps * exact
    allowed = FACTOR * (plain - exact).abs().amax(-1, keepdim=True) + rounding + 16 * torch.finfo(torch.float32).eps
    assert ((mass.double() - exact).abs() <= allowed).all()
    torch.testing.assert_close(rounded.double(), h.double(), rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    # Of the masses before they are rounded.
    wanted, least = (exact * h).sum(-1), FACTOR * ((plain - exact).abs() * h).sum(-1)
    assert ((error.double() - wanted).abs() <= least + 1e-5 * wanted + 16 * torch.finfo(torch.float32).eps).all()
    tokens = per_query_head(log_count.exp().unflatten(-1, (-1, 2)).sum(-1), HEADS, 2)[:, :, None]
    torch.testing.assert_close(scores, (mass.float() * rounded.float()).unflatten(-1, (-1, 2)).sum(-1) / tokens)
