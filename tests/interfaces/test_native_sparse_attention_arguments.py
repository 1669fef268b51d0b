"""What native sparse attention's functions refuse and accept: wrong arguments by name, sizes of zero, numpy's integers, dtypes of gates."""

import numpy as np
import pytest
import torch

from ssta.interfaces import parallel_nsa, selected_attention
from ssta.interfaces.nsa import native_sparse_attention


def inputs(batch=1, tokens=8, dtype=torch.float16):
    return (torch.randn(batch, tokens, heads, 16, dtype=dtype) for heads in (4, 2, 2))


def call(**changes):
    q, k, v = inputs()
    arguments = dict(q=q, k=k, v=v, block_indices=torch.zeros(1, 8, 2, 3, dtype=torch.int32), block_size=4)
    return parallel_nsa(**(arguments | changes))


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=[1]), TypeError, "q must be a tensor, got list"),
    (dict(k=torch.zeros(8, 2, 16).half()), ValueError, r"k must be \[batch, tokens, heads, head_dim\], got shape \(8, 2, 16\)"),
    (dict(k=torch.zeros(1, 8, 2, 16)), TypeError, "k must have q's dtype torch.float16, got torch.float32"),
    (dict(v=torch.zeros(1, 7, 2, 16, dtype=torch.float16)), ValueError, r"v must have k's shape \(1, 8, 2, 16\) but for the head_dim"),
    (dict(q=torch.zeros(1, 8, 3, 16, dtype=torch.float16)), ValueError, "q's heads must be a multiple of k's 2, got 3"),
    (dict(block_indices=[0]), TypeError, "block_indices must be a tensor"),
    (dict(block_indices=torch.zeros(1, 8, 2, 3)), TypeError, "block_indices must be int32 or int64, got torch.float32"),
    (dict(block_indices=torch.zeros(1, 8, 4, 3).int()), ValueError, r"block_indices must be \[B, T, H, S\] = \[1, 8, 2, any\]"),
    (dict(block_counts=torch.zeros(1, 8, 4, dtype=torch.int32)), ValueError, r"block_counts must be \[B, T, H\] = \[1, 8, 2\]"),
    (dict(block_counts=-1), ValueError, "block_counts must be at least 0, got -1"),
    (dict(block_size=0), ValueError, "block_size must be at least 1, got 0"),
    (dict(scale=0.0), ValueError, "scale must be positive and finite"),
    (dict(cu_seqlens=torch.zeros(1, dtype=torch.int32)), ValueError, "cu_seqlens must hold at least two entries, got 1"),
    (dict(g_cmp=torch.zeros(1, 8, 2)), ValueError, r"g_cmp must be \[B, T, HQ\] = \[1, 8, 4\]"),
    (dict(g_swa=torch.zeros(1, 8, 2)), ValueError, r"g_swa must be \[B, T, HQ\] = \[1, 8, 4\]"),
    (dict(g_slc=torch.zeros(1, 8, 2)), ValueError, r"g_slc must be \[B, T, HQ\] = \[1, 8, 4\]"),
    (dict(g_cmp=1), TypeError, "g_cmp must be a tensor, got int"),
    (dict(g_slc=torch.ones(1, 8, 4, dtype=torch.bool)), TypeError, "g_slc must be float16, bfloat16 or float32, got torch.bool"),
    (dict(g_swa=torch.ones(1, 8, 4).double()), TypeError, "g_swa must be float16, bfloat16 or float32, got torch.float64"),
    (dict(impl="hopper"), ValueError, "impl must be one of 'auto', 'torch', 'triton', got 'hopper'"),
])
def test_refuses_before_any_kernel_runs(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("changes", [dict(block_indices=None), dict(g_cmp=torch.zeros(1, 0, 4))])
def test_blocks_cannot_be_made_of_no_token(changes):
    q, k, v = inputs(tokens=0)
    with pytest.raises(ValueError, match=r"k must have at least 1 token, of which blocks are made, got shape \(1, 0, 2, 16\)"):
        call(**dict(q=q, k=k, v=v, block_indices=torch.zeros(1, 0, 2, 3, dtype=torch.int32)) | changes)


def test_factory_refuses():
    with pytest.raises(ValueError, match="heads must be a multiple of groups = 3, got 4"):
        native_sparse_attention(1, 4, 8, 16, True, groups=3)
    with pytest.raises(TypeError, match="is_causal must be a bool, got int"):
        native_sparse_attention(1, 4, 8, 16, 1)
    kernel = native_sparse_attention(1, 4, 8, 16, True, groups=2, selected_blocks=3)
    q, k, v = inputs(tokens=9)
    with pytest.raises(ValueError, match=r"Q must be the size that it was made for = \[1, 8, 4, 16\], got shape \(1, 9, 4, 16\)"):
        kernel(q, k, v, torch.zeros(1, 9, 2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"BlockIndices must be the size that it was made for = \[1, 9, 2, 2\], got shape \(1, 9, 2, 3\)"):
        native_sparse_attention(q, k, v, torch.zeros(1, 9, 2, 3, dtype=torch.int32), dim=16, groups=2, selected_blocks=2)


    with pytest.raises(ValueError, match="dim must be the head dimension of Q, 16, got 17"):
        native_sparse_attention(q, k, v, torch.zeros(1, 9, 2, 3, dtype=torch.int32), dim=17, groups=2, selected_blocks=3)


def test_return_lse_must_be_a_bool():
    q, k, v = inputs()
    for wrong in (None, 1):
        with pytest.raises(TypeError, match="return_lse must be a bool"):
            selected_attention(q, k, v, torch.zeros(1, 8, 2, 3, dtype=torch.int32), return_lse=wrong)


def test_gates_do_not_widen_the_result():
    q, k, v = inputs(dtype=torch.float32)
    indices = torch.zeros(1, 8, 2, 3, dtype=torch.int32)
    assert parallel_nsa(q, k, v, g_slc=torch.ones(1, 8, 4), block_indices=indices, block_size=4).dtype == torch.float32
    wide = [x.double() for x in (q, k, v)]
    assert parallel_nsa(*wide, g_slc=torch.ones(1, 8, 4).double(), block_indices=indices, block_size=4).dtype == torch.float64


@pytest.mark.parametrize("gated", [False, True])
def test_no_batch_element(gated):
    q, k, v = inputs(batch=0)
    gates = dict(g_cmp=torch.ones(0, 8, 4), g_slc=torch.ones(0, 8, 4), g_swa=torch.ones(0, 8, 4), window_size=3) if gated else {}
    assert parallel_nsa(q, k, v, block_size=2, **gates).shape == q.shape


def test_numpy_integers_are_integers():
    q, k, v = inputs()
    arguments = dict(block_indices=torch.zeros(1, 8, 2, 3, dtype=torch.int32))
    expected = parallel_nsa(q, k, v, block_size=4, window_size=2, block_counts=2, **arguments)
    found = parallel_nsa(q, k, v, block_size=np.int64(4), window_size=np.int32(2), block_counts=np.int64(2), **arguments)
    assert torch.equal(found, expected)


def test_offsets_of_64_bits_do_not_wrap():
    q, k, v = inputs()
    indices = torch.zeros(1, 8, 2, 1, dtype=torch.int32)
    first, second = (selected_attention(q, k, v, indices, block_size=4, cu_seqlens=torch.tensor([0, 3, end])) for end in (8, 2**32 + 8))
    assert torch.equal(first, second)


def test_empty_inputs():
    q, k, v = inputs(batch=2, tokens=6)
    nothing = selected_attention(q, k, v, torch.zeros(2, 6, 2, 0, dtype=torch.int32))
    assert nothing.shape == q.shape and (nothing == 0).all()
    none = q[:, :0]
    assert selected_attention(none, k[:, :0], v[:, :0], torch.zeros(2, 0, 2, 3, dtype=torch.int32)).shape == none.shape
