"""MagiAttention's interface: against dense float64 for every row of its tuning table, and what its options do."""

import pytest
import torch
from cases import spread
from interface_oracle import EVERYWHERE, assert_exact, dense, with_gradients

from ssta.interfaces.magi import SparseArgs, block_sparse_attn

# (q_block_size, k_block_size, query tokens, key tokens)
SIZES = [(1, 64, 9, 256), (8, 64, 40, 256), (16, 64, 50, 200), (64, 64, 192, 256), (128, 128, 256, 300), (384, 384, 500, 768),
         (128, 1, 256, 90), (16, 8, 40, 100), (1, 1, 5, 40)]


def inputs(q_len, kv_len, heads, kv_heads, device, dtype):
    dim = 64 if device == "cuda" else 32  # Hopper's kernel starts at 64
    q = torch.randn(q_len, heads, dim, device=device, dtype=dtype)
    return q, *torch.randn(2, kv_len, kv_heads, dim, device=device, dtype=dtype).unbind()


def visible_tokens(indices, q_block, k_block, q_len, kv_len, heads):
    """bool [1, Hq, Sq, Skv] by the definition: a loop over the lists."""
    kv_heads, nq, _ = indices.shape
    seen = torch.zeros(1, heads, q_len, kv_len, dtype=torch.bool)
    for head in range(heads):
        for i in range(nq):
            for block in indices[head // (heads // kv_heads), i].tolist():
                if block >= 0:
                    seen[0, head, i * q_block:(i + 1) * q_block, block * k_block:(block + 1) * k_block] = True
    return seen.to(indices.device)


def as_dense(attend):
    """[S, H, D] in and out around attention of [1, H, S, D]."""
    def call(q, k, v):
        out, lse = attend(*(x.transpose(0, 1)[None] for x in (q, k, v)))
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return call


@pytest.mark.parametrize("device, dtype", EVERYWHERE)
@pytest.mark.parametrize("sizes, heads, pack", spread(SIZES, [(2, 2), (4, 2), (8, 1)], [None, True, False]))
def test_against_float64(device, dtype, sizes, heads, pack):
    q_block, k_block, q_len, kv_len = sizes
    q, k, v = inputs(q_len, kv_len, *heads, device, dtype)
    nq, nk = -(-q_len // q_block), -(-kv_len // k_block)
    indices = torch.rand(heads[1], nq, nk, device=device).topk(max(1, nk // 3), sorted=False).indices.int()
    indices[-1, -1] = -1  # a list without a block
    seen = visible_tokens(indices, q_block, k_block, q_len, kv_len, heads[0])
    weights = torch.randn_like(q), torch.randn(q.shape[:2], device=device)

    def attend(*x):
        out, lse = block_sparse_attn(*x, q_block, k_block, indices, sparse_args=SparseArgs(pack_gqa=pack))
        assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        return out, lse

    plain = as_dense(lambda *x: dense(*x, seen))
    assert_exact(*(with_gradients(f, [x.to(t) for x in (q, k, v)], weights) for f, t in (
        (attend, dtype), (plain, dtype), (plain, torch.float64))))


def test_packing_is_what_the_kernel_sees(monkeypatch):
    """Eight heads of one token become eight rows of one block."""
    from ssta.interfaces import magi

    seen = {}

    def spy(q, k, v, blocks, **options):
        seen.update(shape=tuple(q.shape), block=blocks.q_offsets)
        return real(q, k, v, blocks, **options)

    real = magi.block_attention
    monkeypatch.setattr(magi, "block_attention", spy)
    q, k, v = inputs(6, 128, 16, 2, "cpu", torch.float32)
    indices = torch.zeros(2, 6, 1, dtype=torch.int32)
    block_sparse_attn(q, k, v, 1, 64, indices)
    assert seen == dict(shape=(1, 2, 48, 32), block=8)
    block_sparse_attn(q, k, v, 1, 64, indices, sparse_args=SparseArgs(pack_gqa=False))
    assert seen == dict(shape=(1, 16, 6, 32), block=1)
    block_sparse_attn(q, k, v, 128, 64, indices[:, :1])
    assert seen == dict(shape=(1, 16, 6, 32), block=128), "long blocks fill a program by themselves"


@pytest.mark.parametrize("options, error, message", [
    (dict(swap_ab=True), ValueError, "swap_ab must be False or None"),
    (dict(swap_ab=1), TypeError, "swap_ab must be a bool or None, got int"),
    (dict(tile_shape=(128, 64)), ValueError, "tile_shape must be None"),
    (dict(sparse_load=True), ValueError, "sparse_load must be False or None: key blocks of 64 are loaded as tiles"),
])
def test_options_that_are_refused(options, error, message):
    q, k, v = inputs(8, 64, 2, 1, "cpu", torch.float32)
    with pytest.raises(error, match=message):
        block_sparse_attn(q, k, v, 8, 64, torch.zeros(1, 1, 1, dtype=torch.int32), sparse_args=SparseArgs(**options))


def test_sparse_load_is_how_short_blocks_are_read():
    q, k, v = inputs(8, 64, 2, 1, "cpu", torch.float32)
    indices = torch.zeros(1, 1, 1, dtype=torch.int32)
    block_sparse_attn(q, k, v, 8, 1, indices, sparse_args=SparseArgs(sparse_load=True, swap_ab=False))
    with pytest.raises(ValueError, match="sparse_load must be True or None: key blocks of 1 are gathered one by one, got False"):
        block_sparse_attn(q, k, v, 8, 1, indices, sparse_args=SparseArgs(sparse_load=False))


def test_ids_of_64_bits_that_name_no_block_are_absent():
    q = torch.randn(4, 1, 4)
    for number in (2**32, torch.iinfo(torch.int64).min):
        out, lse = block_sparse_attn(q, q, q, 4, 4, torch.tensor([[[number]]]))
        assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=torch.zeros(1, 8, 2, 32)), ValueError, r"q must be \[tokens, heads, head_dim\], got shape \(1, 8, 2, 32\)"),
    (dict(q=torch.zeros(8, 3, 32)), ValueError, "query heads must be a multiple of the 2 key/value heads, got 3"),
    (dict(q=torch.zeros(8, 0, 32)), ValueError, "query heads must be at least 1, got 0"),
    (dict(k=[1]), TypeError, "k must be a tensor, got list"),
    (dict(k=torch.zeros(64, 2, 32, dtype=torch.int32)), TypeError, "k must be float16, bfloat16, float32 or float64"),
    (dict(q_block_size=0), ValueError, "q_block_size must be at least 1, got 0"),
    (dict(k_block_size=2.0), TypeError, "k_block_size must be an int, got 2.0"),
    (dict(topk_indices=torch.zeros(2, 1, 1)), TypeError, "topk_indices must be int32 or int64, got torch.float32"),
    (dict(topk_indices=torch.zeros(4, 1, 1, dtype=torch.int32)), ValueError, r"\[key/value heads, query blocks, topk\] = \[2, 1, any\]"),
    (dict(topk_indices=torch.zeros(2, 1, 1, dtype=torch.int32, device="meta")), ValueError, "topk_indices must be on cpu"),
    (dict(sparse_args=dict(pack_gqa=True)), TypeError, "sparse_args must be SparseArgs, got dict"),
])
def test_refuses(changes, error, message):
    q, k, v = inputs(8, 64, 4, 2, "cpu", torch.float32)
    arguments = dict(q=q, k=k, v=v, q_block_size=8, k_block_size=64, topk_indices=torch.zeros(2, 1, 1, dtype=torch.int32))
    with pytest.raises(error, match=message):
        block_sparse_attn(**(arguments | changes))


def test_compiles_without_a_break():
    q, k, v = (x.requires_grad_() for x in inputs(24, 64, 4, 2, "cpu", torch.float32))
    indices = torch.rand(2, 3, 8).topk(3).indices

    def attend(q, k, v):
        return block_sparse_attn(q, k, v, 8, 8, indices)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for f, g in ((compiled, attend),):
        for a, b in zip(f(q, k, v), g(q, k, v)):
            torch.testing.assert_close(a, b)
        for a, b in zip(*(torch.autograd.grad(h(q, k, v)[0].sum(), (q, k, v)) for h in (f, g))):
            torch.testing.assert_close(a, b)
