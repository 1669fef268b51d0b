"""cuDNN frontend's block-sparse attention in plain torch: the documented contract of release 1.32.0, checked, and what it computes.

docs/fe-oss-apis/bsa.md and cudnn/block_sparse_attention/api.py. What the contract leaves open is NaN here: whatever an argument that
nobody should read decides shows in a result.
"""

import math
import sys
import types

import torch

# Tokens of its blocks.
BLOCKS = (64, 128)


def install(monkeypatch, blocks=BLOCKS, version="1.32.0", spoil=lambda *results: results):
    """``import cudnn.block_sparse_attention`` gives the stand-in; ``spoil`` makes its results wrong."""
    from ssta.kernels.cudnn import package

    def forward(*args, **options):
        out, lse = spoil(*_forward(blocks, *args, **options))
        return dict(o_tensor=out, lse_tensor=lse)

    def backward(*args, **options):
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), _backward(blocks, *args, **options)))

    module = types.ModuleType("cudnn.block_sparse_attention")
    module.block_sparse_attention_forward, module.block_sparse_attention_backward = forward, backward
    monkeypatch.setitem(sys.modules, "cudnn", types.ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, "SLOTS", blocks)
    monkeypatch.setattr(package, "installed", lambda name: version)


def _check(blocks, q, k, v, index, sizes, nums, block, *others):
    """What api.py refuses, what its kernels refuse (rows of 16 bytes; addresses of 128, which a GPU's memory has and a CPU's need not), and
    what the document calls the caller's contract."""
    batch, heads, tokens, dim = q.shape
    kv_batch, kv_heads, kv_tokens, _ = k.shape
    assert block in blocks and (kv_batch, v.shape) == (batch, k.shape) and heads % kv_heads == 0 and k.shape[3] == dim
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    for x in (q, k, v, *others):
        assert x.stride(-1) == 1 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    # For blocks of 64 sm_90 wants whole blocks of queries.
    rows, items = tokens // block, -(-kv_tokens // block)
    assert tokens % block == 0 and tokens and kv_tokens
    assert index.dtype == nums.dtype == sizes.dtype == torch.int32 and index.shape[-1] >= 1
    assert index.shape[:3] == nums.shape == (batch, heads, rows) and sizes.shape == (items,), "one size of a block for all"
    assert index.is_contiguous() and nums.is_contiguous() and sizes.is_contiguous()
    assert ((nums >= 0) & (nums <= index.shape[-1])).all()


def _seen(q, k, index, sizes, nums, block):
    """For each (batch, head, query block) its rows and the keys that it sees."""
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for row, count in enumerate(nums[b, h].tolist()):
                ids = index[b, h, row, :count].long()
                assert len(ids.unique()) == count and ((ids >= 0) & (ids < len(sizes))).all()
                assert ((sizes[ids] >= 1) & (sizes[ids] <= block)).all(), "a listed block holds tokens"
                keys = (ids[:, None] * block + torch.arange(block))[torch.arange(block) < sizes[ids][:, None]]
                assert (keys < k.shape[2]).all()
                yield b, h, h // (q.shape[1] // k.shape[1]), slice(row * block, (row + 1) * block), keys


def _forward(blocks, q, k, v, q2k_block_index, block_sparse_num=None, block_sizes=None, q2k_block_nums=None, *, sparse_block_size=None,
             allow_empty_block_nums=False, softmax_scale=None, pack_gqa=None, layout="bhsd"):
    _check(blocks, q, k, v, q2k_block_index, block_sizes, q2k_block_nums, sparse_block_size)
    assert allow_empty_block_nums or (q2k_block_nums > 0).all()
    assert pack_gqa is False and softmax_scale > 0 and layout == "bhsd" and block_sparse_num is None
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:3])
    for b, h, kv_h, rows, keys in _seen(q, k, q2k_block_index, block_sizes, q2k_block_nums, sparse_block_size):
        scores = q[b, h, rows].float() @ k[b, kv_h, keys].float().mT * softmax_scale
        lse[b, h, rows] = scores.logsumexp(-1) if len(keys) else -math.inf
        out[b, h, rows] = (scores.softmax(-1) @ v[b, kv_h, keys].float()).to(q.dtype)
    return out, lse


def _backward(blocks, dout, q, k, v, out, lse, q2k_block_index, block_sparse_num=None, block_sizes=None, q2k_block_nums=None, *,
              softmax_scale=None, sparse_block_size=None, layout="bhsd"):
    """With sum(dout * out) as the kernels compute it, of what they are given."""
    _check(blocks, q, k, v, q2k_block_index, block_sizes, q2k_block_nums, sparse_block_size, out, dout)
    assert q.shape[1] == k.shape[1] and softmax_scale > 0 and layout == "bhsd" and block_sparse_num is None
    assert dout.shape == out.shape == q.shape and dout.dtype == out.dtype == q.dtype
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and lse.is_contiguous()
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for b, h, _, rows, keys in _seen(q, k, q2k_block_index, block_sizes, q2k_block_nums, sparse_block_size):
        if not len(keys):
            continue
        q_, k_, v_, o_, do_ = (x.float() for x in (q[b, h, rows], k[b, h, keys], v[b, h, keys], out[b, h, rows], dout[b, h, rows]))
        weights = (q_ @ k_.mT * softmax_scale - lse[b, h, rows, None]).exp()
        dscores = weights * (do_ @ v_.mT - (do_ * o_).sum(-1, keepdim=True)) * softmax_scale
        dq[b, h, rows] = dscores @ k_
        dk[b, h, keys] += dscores.mT @ q_
        dv[b, h, keys] += weights.mT @ do_
    # Keys that no list has, and those behind a block's last, are nobody's.
    return tuple(x.to(q.dtype) for x in (dq, dk, dv))
