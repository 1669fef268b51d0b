"""FlashInfer's wrappers: what their constructors, plan and run refuse, and in which words."""

import pytest
import torch
from flashinfer_cases import small_inputs, small_plan

from ssta.kernels.interfaces import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

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
    (dict(num_kv_heads=3), ValueError, "num_qo_heads must be a multiple of the 3 key/value heads, got 2"),
    (dict(head_dim=None), TypeError, "head_dim must be an int, got None"),
    (dict(mask=torch.ones(3, 4, 4)), ValueError, "mask must be None, because blocks are attended to as wholes, got a tensor"),
    (dict(packed_mask=torch.zeros(6)), ValueError, "packed_mask must be None"),
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
    (dict(logits_soft_cap=30.0), ValueError, "logits_soft_cap must be None, because scores are as they are, got 30.0"),
    (dict(sm_scale=0.0), ValueError, "scale must be positive and finite, got 0.0"),
    (dict(q_data_type="float8_e8m0fnu"), TypeError, "q_data_type must be one of float16, bfloat16, float32, float64 on cpu"),
    (dict(kv_data_type="bfloat16"), TypeError, "kv_data_type must be q_data_type torch.float16, got bfloat16"),
    (dict(o_data_type="int8"), TypeError, "o_data_type must be one of"),
    (dict(causal=True), ValueError, "causal must be False, because listed blocks have no order, got True"),
])
def test_plan_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        BlockSparseAttentionWrapper(torch.empty(1)).plan(**(PLAN | changes))


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=torch.zeros(8, 1, 16)), ValueError, r"q must be as planned = \[8, 2, 16\], got shape \(8, 1, 16\)"),
    (dict(k=torch.zeros(8, 16)), ValueError, r"k must be as planned = \[8, 1, 16\], got shape \(8, 16\)"),
    (dict(v=torch.zeros(8, 1, 16, dtype=torch.float16)), TypeError, "v must have the planned dtype torch.float32, got torch.float16"),
    (dict(q=torch.zeros(8, 2, 16, device="meta")), ValueError, "q must be on cpu, got meta"),
    (dict(q=torch.zeros(8, 16, 2).mT), ValueError, "q must have stride 1 in its last dimension, got 2"),
    (dict(scale_q=torch.ones(2)), ValueError, "scale_q must be None, because inputs have at least 16 bits, got a tensor"),
    (dict(out=torch.zeros(8, 2, 16, dtype=torch.float16)), TypeError, "out must be float32, got torch.float16"),
    (dict(lse=torch.zeros(2, 8)), ValueError, r"lse must be the result's shape = \[8, 2\], got shape \(2, 8\)"),
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
    (dict(causal=True), ValueError, "causal must be False"),
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


@pytest.mark.parametrize("make, error, message", [
    (lambda: BlockSparseAttentionWrapper(None), TypeError, "float_workspace_buffer must be a tensor, got NoneType"),
    (lambda: BlockSparseAttentionWrapper(torch.empty(1), "fa4"), ValueError, "backend must be one of 'auto', 'fa2'"),
    (lambda: BlockSparseAttentionWrapper(torch.empty(1)).run(*small_inputs()), RuntimeError, r"plan\(\) must be called before run\(\)"),
])
def test_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()
