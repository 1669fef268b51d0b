"""SeerAttention's prefill and pooling functions: against float64 by loops over the definition."""

from functools import partial

import pytest
import torch
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from token_oracle import assert_as_exact_as_torch, dense, everywhere

from ssta.interfaces import (
    attn_pooling,
    attn_pooling_qkv_varlen,
    block_1d_gqa_sparse_attn_varlen_func,
    block_1d_gqa_sparse_attn_varlen_sim_func,
    block_2d_sparse_attn_varlen_func,
)

LENGTHS = [7, 0, 14, 3]


def packed(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def inputs(tokens, heads, kv_heads, dim, device, dtype=torch.float16, v_dim=None):
    make = partial(torch.randn, device=device, dtype=dtype)
    return make(tokens, heads, dim), make(tokens, kv_heads, dim), make(tokens, kv_heads, v_dim or dim)


def visible_keys(mask, lengths, block_size, heads, tokens, rows_of=1):
    """bool [Hq, T, T]: token i sees key j of its sequence where mask[b, h, i // rows_of, j // block_size] and j <= i."""
    visible = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    start, group = 0, heads // mask.shape[1]
    for b, length in enumerate(lengths):
        for h in range(heads):
            for i in range(length):
                for j in range(i + 1):
                    visible[h, start + i, start + j] = mask[b, h // group, i // rows_of, j // block_size]
        start += length
    return visible


@everywhere
@pytest.mark.parametrize("heads, kv_heads, block_size", [(4, 2, 8), (3, 3, 5)])
@pytest.mark.slow
def test_one_row_a_token(device, impl, heads, kv_heads, block_size):
    # More tokens than the sequences take: the last ones belong to none.
    tokens, longest = sum(LENGTHS) + 3, max(LENGTHS)
    q, k, v = inputs(tokens, heads, kv_heads, 16, device, v_dim=32)
    mask = torch.rand(len(LENGTHS), kv_heads, longest, -(-longest // block_size)) < 0.5
    mask[:, :, 2] = False
    cu = packed(LENGTHS, device)
    attend = partial(block_1d_gqa_sparse_attn_varlen_func, cu_seqlens_k=cu, cu_seqlens_q=cu, max_seqlen=longest, sm_scale=0.3,
                     block_mask=mask.to(device), block_size=block_size, impl=impl)
    visible = visible_keys(mask, LENGTHS, block_size, heads, tokens)
    assert_as_exact_as_torch(attend, q, k, v, visible.to(device), 0.3)


@everywhere
@pytest.mark.parametrize("mask_heads", [2, 4])
def test_mask_of_blocks_by_blocks(device, impl, mask_heads):
    tokens, longest, block_size = sum(LENGTHS) + 3, max(LENGTHS), 8
    q, k, v = inputs(tokens, 4, 2, 16, device)
    number = -(-longest // block_size)
    mask = torch.rand(len(LENGTHS), mask_heads, number, number) < 0.6
    mask[2, :, 1] = False
    cu = packed(LENGTHS, device)
    attend = partial(block_2d_sparse_attn_varlen_func, cu_seqlens_k=cu, cu_seqlens_q=cu, max_seqlen=longest, sm_scale=0.3,
                     block_mask=mask.to(device), block_size=block_size, impl=impl)
    visible = visible_keys(mask, LENGTHS, block_size, 4, tokens, rows_of=block_size)
    assert_as_exact_as_torch(attend, q, k, v, visible.to(device), 0.3)


@everywhere
@pytest.mark.slow
def test_upstream_argument_order(device, impl):
    """All positional, as in SeerAttention's README; everything selected is causal attention of each sequence."""
    cu, longest, scale = packed(LENGTHS, device), max(LENGTHS), 16 ** -0.5
    q, k, v = inputs(sum(LENGTHS), 4, 4, 16, device)
    number = -(-longest // 8)
    per_token = torch.ones(4, 4, longest, number, dtype=torch.bool, device=device)
    per_block = torch.ones(4, 4, number, number, dtype=torch.bool, device=device)
    outs = [block_1d_gqa_sparse_attn_varlen_func(q, k, v, cu, cu, longest, scale, per_token, 8, impl=impl),
            block_1d_gqa_sparse_attn_varlen_sim_func(q, k, v, cu, cu, longest, scale, per_token, 8, impl=impl),
            block_2d_sparse_attn_varlen_func(q, k, v, cu, cu, longest, scale, per_block, 8, impl=impl)]
    start = 0
    for length in LENGTHS:
        some = slice(start, start + length)
        exact = torch.nn.functional.scaled_dot_product_attention(*(x[some].transpose(0, 1).double() for x in (q, k, v)), is_causal=True)
        for out in outs:
            torch.testing.assert_close(out[some].transpose(0, 1).double(), exact, atol=2e-3, rtol=0)
        start += length


@everywhere
def test_one_sequence_alone_is_the_same(device, impl):
    tokens, longest = sum(LENGTHS), max(LENGTHS)
    q, k, v = inputs(tokens, 4, 2, 16, device)
    mask = torch.rand(4, 2, longest, 2, device=device) < 0.5
    cu = packed(LENGTHS, device)
    together = block_1d_gqa_sparse_attn_varlen_func(q, k, v, cu, cu, longest, 0.25, mask, 8, impl=impl)
    alone, some = packed([14], device), slice(7, 21)
    by_itself = block_1d_gqa_sparse_attn_varlen_func(q[some], k[some], v[some], alone, alone, longest, 0.25, mask[2:3], 8, impl=impl)
    torch.testing.assert_close(together[some], by_itself, atol=1e-3, rtol=1e-3)


@everywhere
@pytest.mark.parametrize("heads, kv_heads, block_size", [(4, 2, 8), (2, 2, 5), (2, 1, 32)])
def test_pooling(device, impl, heads, kv_heads, block_size):
    tokens, longest, scale = sum(LENGTHS) + 3, max(LENGTHS), 0.3
    q, k, _ = inputs(tokens, heads, kv_heads, 16, device)
    by_block, by_token = attn_pooling(q, k, packed(LENGTHS, device), longest, scale, block_size, impl=impl)
    number = -(-longest // block_size)
    assert by_block.shape == (len(LENGTHS), heads, number, number) and by_block.dtype == q.dtype
    assert [x.shape for x in by_token] == [(1, heads, length, -(-length // block_size)) for length in LENGTHS]
    start = 0
    for b, length in enumerate(LENGTHS):
        visible = torch.ones(length, length, dtype=torch.bool, device=device).tril().expand(heads, -1, -1)
        queries, keys = q[start:start + length].double(), k[start:start + length].double()
        # Attention whose values are the identity gives the probabilities.
        eye = torch.eye(length, dtype=torch.float64, device=device)[:, None].expand(-1, kv_heads, -1)
        probabilities = dense(queries, keys, eye, visible, scale)[0].transpose(0, 1)
        exact = torch.zeros(heads, number, number, dtype=torch.float64, device=device)
        for n in range(-(-length // block_size)):
            peak = probabilities[:, :, n * block_size:(n + 1) * block_size].amax(-1)
            torch.testing.assert_close(by_token[b][0, :, :, n].double(), peak, atol=1e-3, rtol=2e-3)
            for m in range(-(-length // block_size)):
                exact[:, m, n] = peak[:, m * block_size:(m + 1) * block_size].amax(1)
        exact /= exact.sum(-1, keepdim=True) + 1e-6
        torch.testing.assert_close(by_block[b].double(), exact, atol=1e-3, rtol=2e-3)
        start += length


@everywhere
def test_pooling_with_attention(device, impl):
    """Dense causal attention within each sequence, and the pooling by tokens as one tensor."""
    tokens, longest, scale = sum(LENGTHS) + 3, max(LENGTHS), 0.3
    q, k, v = inputs(tokens, 4, 2, 16, device)
    cu = packed(LENGTHS, device)
    bounds = cu.tolist()
    sequence = torch.searchsorted(cu[1:], torch.arange(tokens, dtype=cu.dtype, device=device), right=True)
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    visible &= (sequence[:, None] == sequence) & (torch.arange(tokens, device=device) < bounds[-1])
    attend = partial(attn_pooling_qkv_varlen, cu_seqlens=cu, max_seqlen=longest, sm_scale=scale, block_size=8, impl=impl)
    assert_as_exact_as_torch(lambda *x: attend(*x)[0], q, k, v, visible.expand(4, -1, -1), scale)
    pooled = attend(q, k, v)[1]
    assert pooled.shape == (len(LENGTHS), 4, longest, -(-longest // 8)) and pooled.dtype == q.dtype
    for part, whole in zip(attn_pooling(q, k, cu, longest, scale, 8, impl=impl)[1], pooled):
        _, _, length, number = part.shape
        assert torch.equal(whole[:, :length, :number], part[0])
        assert (whole[:, length:] == 0).all() and (whole[:, :, number:] == 0).all()


@everywhere
@pytest.mark.slow
def test_same_bits_twice(device, impl):
    cu, longest = packed(LENGTHS, device), max(LENGTHS)
    q, k, v = (x.requires_grad_() for x in inputs(sum(LENGTHS), 4, 2, 16, device))
    mask = torch.rand(4, 2, longest, 2, device=device) < 0.5

    def step():
        out = block_1d_gqa_sparse_attn_varlen_func(q, k, v, cu, cu, longest, 0.25, mask, 8, impl=impl)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    for a, b in zip(step(), step()):
        assert torch.equal(a, b)


def test_gate_targets_of_the_readme():
    """What SeerAttention's README does with the pooled probabilities: max over a group of heads, then rows that sum to one."""
    q, k, _ = inputs(40, 4, 2, 16, "cpu", torch.float32)
    _, by_token = attn_pooling(q, k, packed([24, 16], "cpu"), 24, 0.25, 8)
    for gate, length in zip(by_token, (24, 16)):
        pooled = torch.nn.functional.max_pool3d(gate, kernel_size=[2, 1, 1], stride=[2, 1, 1])
        assert pooled.shape == (1, 2, length, length // 8)
        pooled /= pooled.sum(-1, keepdim=True) + 1e-6
        torch.testing.assert_close(pooled.sum(-1), torch.ones(1, 2, length))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("heads, kv_heads, dim, block_size", [(8, 2, 128, 64), (4, 4, 64, 128), (16, 1, 128, 32), (3, 1, 80, 16)])
def test_gpu_sizes(heads, kv_heads, dim, block_size, dtype):
    lengths = [200, 77]
    q, k, v = inputs(277, heads, kv_heads, dim, "cuda", dtype)
    number, cu, scale = -(-200 // block_size), packed(lengths, "cuda"), dim ** -0.5
    mask = torch.rand(2, kv_heads, 200, number) < 0.5
    attend = partial(block_1d_gqa_sparse_attn_varlen_func, cu_seqlens_k=cu, cu_seqlens_q=cu, max_seqlen=200, sm_scale=scale,
                     block_mask=mask.cuda(), block_size=block_size)
    assert_as_exact_as_torch(attend, q, k, v, visible_keys(mask, lengths, block_size, heads, 277).cuda(), scale)
    mask = torch.rand(2, heads, number, number) < 0.5
    attend = partial(block_2d_sparse_attn_varlen_func, cu_seqlens_k=cu, cu_seqlens_q=cu, max_seqlen=200, sm_scale=scale,
                     block_mask=mask.cuda(), block_size=block_size)
    assert_as_exact_as_torch(attend, q, k, v, visible_keys(mask, lengths, block_size, heads, 277, block_size).cuda(), scale)
    for mine, plain in zip(attn_pooling(q, k, cu, 200, scale, block_size), attn_pooling(q, k, cu, 200, scale, block_size, impl="torch")):
        for a, b in zip(mine, plain):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=2e-2)


@pytest.mark.gpu
def test_gpu_never_waits_and_fits_a_cuda_graph():
    cu = packed([300, 200], "cuda")
    q, k, v = (x.requires_grad_() for x in inputs(500, 16, 2, 128, "cuda", torch.bfloat16))
    per_token = torch.rand(2, 2, 300, 5, device="cuda") < 0.5
    per_block = torch.rand(2, 2, 5, 5, device="cuda") < 0.5

    def step():
        out = block_1d_gqa_sparse_attn_varlen_func(q, k, v, cu, cu, 300, 0.1, per_token)
        out = out + block_2d_sparse_attn_varlen_func(q, k, v, cu, cu, 300, 0.1, per_block)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    assert_never_waits_and_fits_a_cuda_graph(step)


def call(function=block_1d_gqa_sparse_attn_varlen_func, **changes):
    q, k, v = inputs(12, 4, 2, 16, "cpu")
    cu = packed([7, 5], "cpu")
    mask = torch.ones(2, 2, *((7, 2) if function is not block_2d_sparse_attn_varlen_func else (2, 2)), dtype=torch.bool)
    arguments = dict(q=q, k=k, v=v, cu_seqlens_k=cu, cu_seqlens_q=cu, max_seqlen=7, sm_scale=0.25, block_mask=mask, block_size=4)
    return function(**(arguments | changes))


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=torch.zeros(1, 12, 4, 16)), ValueError, r"q must be \[tokens, heads, head_dim\], got shape \(1, 12, 4, 16\)"),
    (dict(k=torch.zeros(11, 2, 16).half(), v=torch.zeros(11, 2, 16).half()), ValueError, "k must have q's 12 tokens, got 11"),
    (dict(cu_seqlens_q=[0, 7]), TypeError, "cu_seqlens_q must be a tensor, got list"),
    (dict(cu_seqlens_k=torch.zeros(2).int()), ValueError, r"cu_seqlens_k must be \[B \+ 1\] = \[3\], got shape \(2,\)"),
    (dict(cu_seqlens_q=torch.zeros(1).int()), ValueError, "cu_seqlens_q must hold at least two entries, got 1"),
    (dict(max_seqlen=7.0), TypeError, "max_seqlen must be an int, got 7.0"),
    (dict(block_size=0), ValueError, "block_size must be at least 1, got 0"),
    (dict(block_mask=torch.ones(2, 2, 7, 2)), TypeError, "block_mask must be bool, got torch.float32"),
    (dict(block_mask=torch.ones(2, 4, 7, 2) > 0), ValueError, r"block_mask must be \[B, Hkv, max_seqlen, blocks\] = \[2, 2, 7, 2\]"),
    (dict(sm_scale=-1.0), ValueError, "scale must be positive and finite, got -1.0"),
    (dict(impl="cuda"), ValueError, "impl must be one of"),
    (dict(function=block_2d_sparse_attn_varlen_func, block_mask=torch.ones(2, 3, 2, 2) > 0), ValueError, "block_mask must have 2 or 4"),
    (dict(function=block_2d_sparse_attn_varlen_func, block_mask=torch.ones(2, 2, 7, 2) > 0), ValueError, "block_mask must be"),
])
def test_refuses_before_any_kernel_runs(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@everywhere
@pytest.mark.parametrize("cu", [[0, 3, 50], [0, 3, 2**32 + 12], [-5, 3, 12]])
def test_sequences_are_cut_at_the_tensors(device, impl, cu):
    """The two forms agree on offsets of another batch, and with those that end where the tensors do."""
    q, k, v = inputs(12, 4, 2, 16, device)
    results = []
    for offsets in (cu, [0, 3, 12]):
        offsets = torch.tensor(offsets, device=device)
        rows = torch.ones(2, 2, 9, 3, dtype=torch.bool, device=device)
        results.append(block_1d_gqa_sparse_attn_varlen_func(q, k, v, offsets, offsets, 9, 0.25, rows, 4, impl=impl))
        blocks = torch.ones(2, 2, 3, 3, dtype=torch.bool, device=device)
        results.append(block_2d_sparse_attn_varlen_func(q, k, v, offsets, offsets, 9, 0.25, blocks, 4, impl=impl))
    for result in results[1:]:
        assert (result - results[0]).abs().max() < 2e-3


def test_pooling_of_float64_is_as_exact():
    q, k = torch.randn(10, 2, 8).double(), torch.randn(10, 1, 8).double()
    by_block, (by_token,) = attn_pooling(q, k, torch.tensor([0, 10]), 10, 0.3, 4)
    peaks = torch.nn.functional.pad(by_token[0], (0, 0, 0, 2)).unflatten(1, (3, 4)).amax(2)
    assert (by_block[0] - peaks / (peaks.sum(-1, keepdim=True) + 1e-6)).abs().max() < 1e-14


def test_pooling_refuses():
    q, k, _ = inputs(12, 4, 2, 16, "cpu")
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest sequence's 7 tokens, got 6"):
        attn_pooling(q, k, packed([7, 5], "cpu"), 6, 0.25)
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend within the 12 tokens of q and k, got \[0, 7, 13\]"):
        attn_pooling(q, k, packed([7, 6], "cpu"), 7, 0.25)
