"""flex-block-attn's interface: against dense float64, in every ratio of blocks, and called as its users call it."""

import pytest
import torch
from cases import spread
from interface_oracle import EVERYWHERE, assert_exact, dense, with_gradients

from ssta.kernels.interfaces import flex_block_attn_func


def tokens_of(mask, q_block, kv_block):
    return mask.repeat_interleave(q_block, -2).repeat_interleave(kv_block, -1)


@pytest.mark.parametrize("device, dtype", EVERYWHERE)
@pytest.mark.parametrize("form, blocks, heads", spread(
    ["2-D", "4-D", "4-D shared", "4-D per key head", "3-D"], [(16, 64), (48, 64), (64, 64), (128, 64), (32, 192), (384, 384)],
    [(1, 1), (4, 2)]))
def test_against_float64(device, dtype, form, blocks, heads):
    (q_block, kv_block), (query_heads, kv_heads) = blocks, heads
    nq, nk = max(192 // q_block, 2), max(192 // kv_block, 2)
    shape = {"2-D": (), "4-D": (2, query_heads), "4-D shared": (1, 1), "4-D per key head": (2, kv_heads), "3-D": (query_heads,)}[form]
    mask = torch.rand(*shape, nq, nk, device=device) < 0.5
    mask[..., 1, :] = False  # an empty row of blocks gives zeros, whatever the ratio
    q = torch.randn(2, query_heads, nq * q_block, 64, device=device, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, nk * kv_block, 64, device=device, dtype=dtype).unbind()
    every = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    every = every.repeat_interleave(query_heads // every.shape[1], 1) if every.shape[1] > 1 else every
    visible = tokens_of(every, q_block, kv_block)
    weights = torch.randn_like(q), torch.zeros(q.shape[:3], device=device)

    def attend(*inputs):
        out = flex_block_attn_func(*inputs, q_block, kv_block, mask)
        assert out.dtype == dtype
        return out, dense(*inputs, visible)[1].detach()  # upstream returns no lse

    assert_exact(*(with_gradients(f, [x.to(t) for x in (q, k, v)], weights) for f, t in (
        (attend, dtype), (lambda *x: dense(*x, visible), dtype), (lambda *x: dense(*x, visible), torch.float64))))


def test_as_the_readme_calls_it():
    query, key, value = (torch.randn(1, 2, 384, 32, requires_grad=True) for _ in range(3))
    block_mask = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2
    output = flex_block_attn_func(query, key, value, 64, 64, block_mask)
    output.backward(torch.ones_like(output))
    exact, _ = dense(query.double(), key.double(), value.double(), tokens_of(block_mask, 64, 64)[None, None])
    torch.testing.assert_close(output.double(), exact, atol=1e-5, rtol=1e-5)
    assert all(x.grad.isfinite().all() for x in (query, key, value))


@pytest.mark.parametrize("changes, error, message", [
    (dict(block_mask=torch.ones(2, 2)), TypeError, "block_mask must be a bool tensor, got torch.float32"),
    (dict(block_mask=torch.ones(2, dtype=torch.bool)), ValueError, r"block_mask must be \[Nq, Nk\]"),
    (dict(block_mask=torch.ones(3, 2, dtype=torch.bool)), ValueError, "blocks must have 2 q blocks of 64 for 128 tokens, got 3"),
    (dict(block_mask=torch.ones(2, 3, dtype=torch.bool)), ValueError, "blocks must have 2 kv blocks of 64 for 128 tokens, got 3"),
    (dict(q_block_size=0), ValueError, "q_block_size must be at least 1, got 0"),
    (dict(q=torch.zeros(1, 128, 8)), ValueError, r"q must be \[batch, heads, tokens, head_dim\]"),
])
def test_refuses(changes, error, message):
    x = torch.zeros(1, 1, 128, 8)
    arguments = dict(q=x, k=x, v=x, q_block_size=64, kv_block_size=64, block_mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(error, match=message):
        flex_block_attn_func(**(arguments | changes))


def test_a_shared_mask_with_the_axis_of_heads_twice():
    """As HunyuanVideo 1.5 and xDiT make it of masks that all heads share."""
    q = torch.randn(2, 3, 128, 32)
    mask = torch.rand(2, 1, 2, 2) < 0.5
    assert torch.equal(flex_block_attn_func(q, q, q, 64, 64, mask[:, None]), flex_block_attn_func(q, q, q, 64, 64, mask))
    with pytest.raises(ValueError, match="block_mask"):
        flex_block_attn_func(q, q, q, 64, 64, mask.expand(2, 3, 2, 2)[:, None])
