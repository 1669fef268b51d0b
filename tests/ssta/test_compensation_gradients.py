"""Gradients of the estimate of unselected tiles: those of its formulas with h, the damping, the mixture and the halves held still."""

import dataclasses

import pytest
import torch

from ssta import SSTAConfig, TokenLayout, tile_layout
from ssta.compensation import compensate, estimate_tiles
from ssta.kernels import BlockLists
from ssta.layout import TiledQKV

# Partial tiles along every axis, and text behind them.
LAYOUT = tile_layout(TokenLayout.video_text((2, 3, 4), 2), (2, 2, 3))
SLOTS, TILES = LAYOUT.num_slots, LAYOUT.num_video_tiles
VIDEO = int(LAYOUT.offsets[TILES])
SCALE = 0.6


def case(parts, heads=2, kv_heads=1, dim=2):
    """(the exact part's out and lse, q, k, v), blocks, estimates; tile 0 selects every tile, and the exact part is anything."""
    config = SSTAConfig(tile_thw=LAYOUT.tile_thw, compensation="linear", compensation_parts=parts)
    out, q, k, v = (torch.randn(1, n, SLOTS, dim, dtype=torch.float64) for n in (heads, heads, kv_heads, kv_heads))
    lse = torch.randn(1, heads, SLOTS, dtype=torch.float64)
    mask = torch.rand(heads, LAYOUT.num_tiles, LAYOUT.num_tiles) < 0.4
    mask[:, :, TILES:] = mask[:, TILES:] = mask[:, 0] = True
    mask[:, 1, :TILES] = False
    blocks = BlockLists.from_mask(mask, LAYOUT.offsets, LAYOUT.offsets, max_q_length=12, max_kv_length=12)
    return (out, lse, q, k, v), blocks, estimate_tiles(TiledQKV(LAYOUT, q, k, v), config, SCALE)


def units(estimates, head):
    """The tokens of each unit of a key/value head."""
    for tile in range(TILES):
        start, end = LAYOUT.offsets[tile], LAYOUT.offsets[tile + 1]
        length = int(end - start)
        order = torch.arange(length) if estimates.order is None else estimates.order[0, head, tile, :length]
        for part in range(estimates.parts):
            yield start + order[length * part // estimates.parts:length * (part + 1) // estimates.parts]


def by_loops(inputs, blocks, estimates):
    """(out, lse), head by head and row by row."""
    out, lse, q, k, v = inputs
    outs, lses = out.clone(), lse.clone()
    kept = blocks.to_mask()
    for head in range(q.shape[1]):
        kv_head = head * k.shape[1] // q.shape[1]
        tokens = list(units(estimates, kv_head))
        keys, values = k[0, kv_head], v[0, kv_head]
        key_means, value_means = (torch.stack([x[t].mean(0) for t in tokens]) for x in (keys, values))
        covariances = torch.stack([(keys[t] - keys[t].mean(0)).T @ (values[t] - values[t].mean(0)) / len(t) for t in tokens])
        for tile in range(TILES):
            rows = slice(int(LAYOUT.offsets[tile]), int(LAYOUT.offsets[tile + 1]))
            left_out = ~kept[0, head, tile, :TILES].repeat_interleave(estimates.parts)
            if not left_out.any():
                continue
            bias = torch.tensor([float(len(t)) for t in tokens], dtype=torch.float64).log()
            bias = bias + estimates.half_variance[0, head, tile].clamp(max=1)
            logits = (SCALE * q[0, head, rows] @ key_means.T + bias)[:, left_out]
            tail_lse = logits.logsumexp(1)
            weights = logits.softmax(1)
            damping = (1 / estimates.half_variance[0, head, tile]).clamp(max=1).sqrt()[left_out]
            mass = estimates.mass[0, head, tile, left_out]
            mixture = mass / mass.sum() * damping
            matrix = torch.einsum("u, uij -> ij", mixture, covariances[left_out])
            tail = weights @ value_means[left_out] + SCALE * q[0, head, rows] @ matrix
            total = torch.logaddexp(lse[0, head, rows], tail_lse)
            lses[0, head, rows] = total
            outs[0, head, rows] = ((lse[0, head, rows] - total).exp()[:, None] * out[0, head, rows]
                                   + (tail_lse - total).exp()[:, None] * tail)
    return outs, lses


cases = pytest.mark.parametrize("parts, heads, kv_heads", [(1, 2, 2), (1, 2, 1), (2, 2, 2)])


@cases
def test_gradients_are_those_of_the_formulas(parts, heads, kv_heads):
    """Against central differences of the formulas in loops, along directions that move all five inputs."""
    inputs, blocks, estimates = case(parts, heads, kv_heads)
    inputs = [x.requires_grad_() for x in inputs]
    out, lse, _ = compensate(*inputs, LAYOUT, blocks, estimates, SCALE)
    with torch.no_grad():
        expected = by_loops(inputs, blocks, estimates)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    for _ in range(4):
        directions = [torch.randn_like(x) for x in inputs]

        def moved(step, directions=directions):
            out, lse = by_loops([x.detach() + step * d for x, d in zip(inputs, directions)], blocks, estimates)
            return (out * dout).sum() + (lse * dlse).sum()

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        torch.testing.assert_close(sum((g * d).sum() for g, d in zip(gradients, directions)), slope, rtol=1e-7, atol=1e-7)


@cases
def test_rows_that_leave_nothing_out_pass_gradients_on(parts, heads, kv_heads):
    inputs, blocks, estimates = case(parts, heads, kv_heads)
    inputs = [x.requires_grad_() for x in inputs]
    out, lse, share = compensate(*inputs, LAYOUT, blocks, estimates, SCALE)
    assert not share.requires_grad
    untouched = torch.zeros(SLOTS, dtype=torch.bool)
    untouched[:int(LAYOUT.offsets[1])] = untouched[VIDEO:] = True
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    d_exact, d_exact_lse, dq, dk, dv = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    assert torch.equal(d_exact[:, :, untouched], dout[:, :, untouched])
    assert torch.equal(d_exact_lse[:, :, untouched], dlse[:, :, untouched])
    assert (dq[:, :, untouched] == 0).all() and (dk[:, :, VIDEO:] == 0).all() and (dv[:, :, VIDEO:] == 0).all()
    assert (d_exact[:, :, ~untouched] != dout[:, :, ~untouched]).all()


def test_what_is_estimated_of_nothing_gets_no_gradient():
    """A tile that holds NaN is in no estimate, and a head for which estimates are useless has none."""
    (out, lse, q, k, v), blocks, _ = case(2)
    start, end = int(LAYOUT.offsets[2]), int(LAYOUT.offsets[3])
    k[0, 0, start] = float("nan")
    config = SSTAConfig(tile_thw=LAYOUT.tile_thw, compensation="linear", compensation_parts=2)
    estimates = estimate_tiles(TiledQKV(LAYOUT, q, k, v), config, SCALE)
    estimates = dataclasses.replace(estimates, useful=torch.tensor([[True, False]]))
    inputs = [x.requires_grad_() for x in (out, lse, q, k, v)]
    out, lse, _ = compensate(*inputs, LAYOUT, blocks, estimates, SCALE)
    _, _, dq, dk, dv = torch.autograd.grad(out.sum() + lse.sum(), inputs)
    assert (dq[:, 1] == 0).all() and (dq[:, 0] != 0).any()
    for x in (dq, dk, dv):
        assert x.isfinite().all()
    assert (dk[:, :, start:end] == 0).all() and (dv[:, :, start:end] == 0).all() and (dk != 0).any() and (dv != 0).any()
