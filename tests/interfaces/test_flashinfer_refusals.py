"""FlashInfer's wrappers: what their constructors, plan and run refuse, and in which words."""

import numpy as np
import pytest
import torch
from flashinfer_cases import paged, small_inputs, small_plan

from ssta.interfaces import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper, convert_bsr_mask_layout

PLAN = dict(indptr=torch.tensor([0, 1, 3]), indices=torch.tensor([1, 0, 1]), M=8, N=8, R=4, C=4, num_qo_heads=2, num_kv_heads=1,
            head_dim=16)


@pytest.mark.parametrize("changes, error, message", [
    (dict(indptr=None), TypeError, "indptr must be an int32 or int64 tensor, got NoneType"),
    (dict(indptr=torch.tensor([0, 3])), ValueError, r"indptr must be \[ceil\(M / R\) \+ 1\] = \[3\]"),
    (dict(indptr=torch.tensor([0, 1, 4])), ValueError, "indptr must ascend from 0 to the 3 indices, got 0 to 4"),
    (dict(indptr=torch.tensor([0, 4, 3])), ValueError, "with a descent between"),
    (dict(indices=torch.tensor([1, 0, 2])), ValueError, r"indices must lie in \[0, N // C\) = \[0, 2\), got 0 to 2"),
    (dict(indices=torch.tensor([1, 0, 1.0])), TypeError, "indices must be an int32 or int64 tensor, got torch.float32"),
    (dict(N=9), ValueError, "N must be a multiple of C = 4, got 9"),
    (dict(R=0), ValueError, "R must be at least 1, got 0"),
    (dict(num_kv_heads=3), ValueError, "query heads must be a multiple of the 3 key/value heads, got 2"),
    (dict(head_dim=None), TypeError, "head_dim must be an int, got None"),
    (dict(mask=torch.ones(3, 4, 4)), TypeError, "mask must be a bool tensor, got torch.float32"),
    (dict(mask=torch.ones(3, 4, 5, dtype=torch.bool)), ValueError, r"mask must be \[nnz, R, C\] = \[3, 4, 4\], got shape \(3, 4, 5\)"),
    (dict(packed_mask=torch.zeros(5, dtype=torch.uint8)), ValueError, r"packed_mask must be \[ceil\(nnz \* R \* C / 8\)\] = \[6\]"),
    (dict(packed_mask=torch.zeros(6)), TypeError, "packed_mask must be a uint8 tensor"),
    (dict(block_mask=torch.ones(2, 2, 2), indptr=None, indices=None), TypeError, "block_mask must be a bool tensor"),
    (dict(block_mask=torch.ones(3, 2, 2, dtype=torch.bool), indptr=None, indices=None), ValueError,
     r"block_mask must be \[2 or 1, 2, 2\], got shape \(3, 2, 2\)"),
    (dict(block_mask=torch.ones(2, 2, 2, dtype=torch.bool)), ValueError, "indptr and indices must be None with block_mask"),
    (dict(block_mask=torch.ones(2, 2, 2, dtype=torch.bool, device="meta"), indptr=None, indices=None), ValueError,
     "block_mask must hold values, got a meta tensor"),
    (dict(indptr=torch.zeros(3, dtype=torch.int32, device="meta")), ValueError, "indptr must hold values, got a meta tensor"),
    (dict(indices=torch.zeros(3, dtype=torch.int32, device="meta")), ValueError, "indices must hold values, got a meta tensor"),
    (dict(pos_encoding_mode="ROPE_LLAMA"), ValueError, "pos_encoding_mode must be 'NONE'"),
    (dict(use_fp16_qk_reduction=True), ValueError, "use_fp16_qk_reduction must be False"),
    (dict(logits_soft_cap=-1.0), ValueError, "logits_soft_cap must be at least 0 and finite, got -1.0"),
    (dict(sm_scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
    (dict(q_data_type="float8_e8m0fnu"), TypeError, "q_data_type must be one of float16, bfloat16, float32, float64, float8_"),
    (dict(kv_data_type="bfloat16"), TypeError, "kv_data_type must be q_data_type torch.float16, got bfloat16"),
    (dict(o_data_type="int8"), TypeError, "o_data_type must be one of"),
    (dict(causal=1), TypeError, "causal must be a bool, got int"),
])
def test_plan_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        BlockSparseAttentionWrapper(torch.empty(1)).plan(**(PLAN | changes))


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=torch.zeros(8, 1, 16)), ValueError, r"q must have the planned shape \(8, 2, 16\), got \(8, 1, 16\)"),
    (dict(k=torch.zeros(8, 16)), ValueError, r"k must be \[8, 1, 16\], got shape \(8, 16\)"),
    (dict(v=torch.zeros(8, 1, 16, dtype=torch.float16)), TypeError, "v must have the planned dtype torch.float32, got torch.float16"),
    (dict(q=torch.zeros(8, 2, 16, device="meta")), ValueError, "q must be on cpu, got meta"),
    (dict(q=torch.zeros(8, 16, 2).mT), ValueError, "q must have stride 1 in its last dimension, got 2"),
    (dict(scale_q=torch.ones(2)), ValueError, "scale_q must be None where float8 inputs are not planned, got Tensor"),
    (dict(out=torch.zeros(8, 2, 16, dtype=torch.float16)), ValueError, r"out must be \(8, 2, 16\) in torch.float32 on cpu"),
    (dict(lse=torch.zeros(2, 8)), ValueError, r"lse must be \(8, 2\) in torch.float32 on cpu, got \(2, 8\)"),
    (dict(out=torch.zeros(8, 2, 16, requires_grad=True)), ValueError, "out must not require a gradient"),
    (dict(out=torch.zeros(8, 1, 16).expand(8, 2, 16)), ValueError, "out must hold every element in memory of its own"),
    (dict(lse=torch.zeros(1, 2).expand(8, 2)), ValueError, "lse must hold every element in memory of its own"),
    (dict(return_lse=1), TypeError, "return_lse must be a bool, got int"),
])
def test_run_refuses(changes, error, message):
    wrapper, (q, k, v) = small_plan(), small_inputs()
    with pytest.raises(error, match=message):
        wrapper.run(**(dict(q=q, k=k, v=v) | changes))


VARIABLE = dict(block_mask_map=torch.ones(1, 2, 2, dtype=torch.bool), block_row_sz=torch.tensor([[3, 5]]),
                block_col_sz=torch.tensor([[4, 4]]), num_qo_heads=2, num_kv_heads=1, head_dim=16)


@pytest.mark.parametrize("changes, error, message", [
    (dict(block_mask_map=torch.ones(1, 2, 2, dtype=torch.int32)), TypeError, "block_mask_map must be a bool tensor, got torch.int32"),
    (dict(block_mask_map=torch.ones(2, 8, 1, 16)), ValueError, "q, k and v do not say what attends to what"),
    (dict(block_mask_map=torch.ones(2, 2, 2, dtype=torch.bool)), ValueError, r"block_mask_map must be \[1, MB, NB\], got"),
    (dict(block_row_sz=torch.tensor([[3, 5, 1]])), ValueError, r"block_row_sz must be \[1, 2\], got shape \(1, 3\)"),
    (dict(block_row_sz=torch.tensor([[-1, 5]])), ValueError, "block_row_sz must not be negative, got -1"),
    (dict(block_col_sz=torch.zeros(1, 2, dtype=torch.int32)), ValueError, "block_col_sz must have the same sum for every head, at least 1"),
    (dict(block_col_sz=torch.ones(1, 2)), TypeError, "block_col_sz must be an int32 or int64 tensor, got torch.float32"),
    (dict(block_mask_map=torch.ones(1, 2, 2, dtype=torch.bool, device="meta")), ValueError, "block_mask_map must hold values"),
    (dict(block_row_sz=torch.ones(1, 2, dtype=torch.int32, device="meta")), ValueError, "block_row_sz must hold values"),
])
def test_variable_plan_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        VariableBlockSparseAttentionWrapper(torch.empty(1)).plan(**(VARIABLE | changes))


@pytest.mark.parametrize("call, message", [
    (lambda: paged(4, "HND", kv_cache_page_size=None), "kv_layout must be 'NHD' without pages of a cache, got 'HND'"),
    (lambda: paged(4, "HND", C=2), "C must be 1 with kv_cache_page_size"),
    (lambda: paged(4, "HND", indices=torch.full((30,), -1)), "indices must be non-negative, got -1"),
    (lambda: paged(4, "HND", indices=torch.full((30,), 24)), "got 24 to 24, which is out of bounds"),
    (lambda: run_paged(lambda k, v: (k, v[:-2])), "v must hold the planned 24 KV entries, got 5 pages of 4"),
    (lambda: run_paged(lambda k, v: (torch.cat([k, k]), v)), "v must have k's 14 pages, got 7"),
    (lambda: run_paged(lambda k, v: (k[:, :, :-1], v[:, :, :-1])), "k must have the planned 4 entries per page, got 3"),
    (lambda: run_paged(lambda k, v: (k[:, :1], v)), r"k must have 2 heads and head_dim 64, got shape \(7, 4, 1, 64\)"),
])
def test_pages_that_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def run_paged(change):
    wrapper, q, k, v, _ = paged(4, "HND")
    return wrapper.run(q, *change(k, v))


@pytest.mark.parametrize("changes, error, message", [
    (dict(M=torch.zeros(2, 16, 2, 8)), ValueError, r"v must have k's shape \(2, 8, 2, 8\), got \(2, 16, 2, 8\)"),
    (dict(N=torch.ones(2, 3)), TypeError, "the block mask must be a bool tensor, got torch.float32"),
    (dict(N=torch.ones(2, 2, 3, dtype=torch.bool)), ValueError, r"the block mask must be \[2, 2\] with the batch"),
    (dict(N=torch.ones(3, 2, 2, dtype=torch.bool)), ValueError, "the block mask must have batch 1 or 2 and heads 1, 2 or 4"),
    (dict(block_size=None), TypeError, "block_size must be an int, got None"),
    (dict(num_qo_heads=2), ValueError, r"q must be .* = \[any, any, 2, 8\], got shape \(2, 8, 4, 8\)"),
    (dict(block_mask=torch.ones(1)), ValueError, "kv_cache_page_size must be None where q, k, v and a block mask"),
])
def test_the_loose_form_refuses(changes, error, message):
    q, k = torch.zeros(2, 8, 4, 8), torch.zeros(2, 8, 2, 8)
    arguments = dict(indptr=q, indices=k, M=k, N=torch.ones(2, 2, dtype=torch.bool), num_qo_heads=4, num_kv_heads=2, head_dim=8,
                     block_size=4)
    with pytest.raises(error, match=message):
        BlockSparseAttentionWrapper(torch.empty(1)).plan(**(arguments | changes))


@pytest.mark.parametrize("make, error, message", [
    (lambda: BlockSparseAttentionWrapper(None), TypeError, "float_workspace_buffer must be a tensor, got NoneType"),
    (lambda: BlockSparseAttentionWrapper(torch.empty(1), "fa4"), ValueError, "backend must be one of 'auto', 'fa2'"),
    (lambda: BlockSparseAttentionWrapper(torch.empty(1), np.array(["auto", "fa2"])), ValueError, "backend must be one of .*, got arr"),
    (lambda: BlockSparseAttentionWrapper(torch.empty(1), kv_layout=np.array(["NHD"] * 2)), ValueError, "kv_layout must be .*, got array"),
    (lambda: BlockSparseAttentionWrapper(torch.empty(1), kv_layout="NH"), ValueError, "kv_layout must be 'NHD' or 'HND', got 'NH'"),
    (lambda: VariableBlockSparseAttentionWrapper(torch.empty(1), kv_layout="HND").plan(None, None, None, 1, 1, 8), ValueError,
     "kv_layout must be 'NHD' without pages of a cache, got 'HND'"),
    (lambda: BlockSparseAttentionWrapper(torch.empty(1)).run(*small_inputs()), RuntimeError, r"plan\(\) must be called before run\(\)"),
    (lambda: convert_bsr_mask_layout(torch.zeros(2, 2), torch.tensor([0])), ValueError, r"mask must be a tensor \[nnz, R, C\]"),
    (lambda: convert_bsr_mask_layout(torch.zeros(2, 2, 2), torch.tensor([0.0])), TypeError, "indptr must be an int32 or int64 tensor"),
])
def test_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_hopper_has_no_soft_cap():
    wrapper = BlockSparseAttentionWrapper(torch.empty(1), backend="hopper")
    wrapper.plan(**PLAN, logits_soft_cap=1.0)
    with pytest.raises(ValueError, match="backend must be 'auto', 'triton' or 'torch' with a soft cap.*, got 'hopper'"):
        wrapper.run(*small_inputs(torch.float16))
