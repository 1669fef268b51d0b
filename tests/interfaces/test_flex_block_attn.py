"""flex-block-attn's interface: against dense float64, in every ratio of blocks, and called as its users call it."""

import numpy as np
import pytest
import torch
from cases import spread
from interface_oracle import EVERYWHERE, assert_exact, dense, with_gradients

from ssta.interfaces import create_sparse_mask, flex_block_attn_func


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
    dim = 64 if device == "cuda" else 16
    q = torch.randn(2, query_heads, nq * q_block, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, nk * kv_block, dim, device=device, dtype=dtype).unbind()
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
    block_size, selected_blocks = 64, [(i, j) for i in range(6) for j in range(6) if abs(i - j) < 2]
    block_mask = create_sparse_mask(query, block_size, selected_blocks)
    output = flex_block_attn_func(query, key, value, block_size, block_size, block_mask)
    output.backward(torch.ones_like(output))
    exact, _ = dense(query.double(), key.double(), value.double(), tokens_of(block_mask, 64, 64)[None, None])
    torch.testing.assert_close(output.double(), exact, atol=1e-5, rtol=1e-5)
    assert all(x.grad.isfinite().all() for x in (query, key, value))


def test_sparse_mask_is_what_was_selected():
    query = torch.zeros(1, 1, 330, 8)
    pairs = [(0, 0), (2, 4), (4, 1), (2, 4)]
    mask = create_sparse_mask(query, 64, pairs)
    assert mask.shape == (5, 5) and mask.dtype == torch.bool
    assert [tuple(x) for x in mask.nonzero().tolist()] == sorted(set(pairs))
    assert not create_sparse_mask(query, 64, []).any()
    assert torch.equal(create_sparse_mask(query, 64, mask.nonzero()), mask)
    assert torch.equal(create_sparse_mask(query, 64, [*map(tuple, mask.nonzero())]), mask)
    assert torch.equal(create_sparse_mask(query, np.int64(64), mask.nonzero().numpy()), mask)


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


@pytest.mark.parametrize("arguments, error, message", [
    ((torch.zeros(4, 8), 2, []), ValueError, "Q must be a tensor"),
    ((torch.zeros(1, 1, 4, 8), 0, []), ValueError, "block_size must be at least 1, got 0"),
    ((torch.zeros(1, 1, 4, 8), 2, [(0, 1), (1, 2)]), ValueError, r"selected_blocks must lie in 2 x 2 blocks, got \(1, 2\)"),
    ((torch.zeros(1, 1, 4, 8), 2, None), TypeError, "selected_blocks must be pairs .*, got NoneType"),
    ((torch.zeros(1, 1, 4, 8), 2, "01"), TypeError, "selected_blocks must be pairs .*, got str"),
    ((torch.zeros(1, 1, 4, 8), 2, [0, 1]), TypeError, r"selected_blocks\[0\] must be a pair .*, got 0"),
    ((torch.zeros(1, 1, 4, 8), 2, ["01"]), TypeError, r"selected_blocks\[0\] must be a pair"),
    ((torch.zeros(1, 1, 4, 8), 2, [(0, 1), (0, 1, 1)]), ValueError, r"selected_blocks\[1\] must be a pair .*, got 3 entries"),
    ((torch.zeros(1, 1, 4, 8), 2, [(0, 1.0)]), TypeError, r"selected_blocks\[0\]\[1\] must be an int, got 1.0"),
    ((torch.zeros(1, 1, 4, 8), 2, [(0, -1)]), ValueError, r"selected_blocks\[0\]\[1\] must be at least 0, got -1"),
    ((torch.zeros(1, 1, 4, 8), 2, torch.zeros(2, 3, dtype=torch.int64)), ValueError, r"selected_blocks must be \[n, 2\] as a tensor"),
    ((torch.zeros(1, 1, 4, 8), 2, torch.zeros(2, 2)), TypeError, "selected_blocks must be pairs of ints, got a tensor of torch.float32"),
])
def test_sparse_mask_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        create_sparse_mask(*arguments)


def test_a_shared_mask_with_the_axis_of_heads_twice():
    """As HunyuanVideo 1.5 and xDiT make it of masks that all heads share."""
    q = torch.randn(2, 3, 128, 32)
    mask = torch.rand(2, 1, 2, 2) < 0.5
    assert torch.equal(flex_block_attn_func(q, q, q, 64, 64, mask[:, None]), flex_block_attn_func(q, q, q, 64, 64, mask))
    with pytest.raises(ValueError, match="block_mask"):
        flex_block_attn_func(q, q, q, 64, 64, mask.expand(2, 3, 2, 2)[:, None])
