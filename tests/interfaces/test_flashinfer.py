"""FlashInfer's wrappers: against dense float64 under a token mask built by loops, and called as FlashInfer's own tests call them."""

import math

import pytest
import torch
from cases import spread
from flashinfer_cases import small_inputs, small_plan
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from interface_oracle import assert_exact, dense

from ssta.kernels.interfaces import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

# (device, dtype, backend)
INTERPRETED = [] if torch.cuda.is_available() else [pytest.param("cpu", torch.float16, "triton", id="interpreter")]
EVERYWHERE = [pytest.param("cpu", torch.float64, "auto", id="cpu"), *INTERPRETED,
              pytest.param("cuda", torch.float16, "auto", id="gpu-fp16", marks=pytest.mark.gpu),
              pytest.param("cuda", torch.bfloat16, "auto", id="gpu-bf16", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize("device, dtype, backend", EVERYWHERE)


def random_bsr(rows, columns, device, empty_row=1):
    kept = torch.rand(rows, columns) < 0.4
    kept[empty_row % rows] = False
    indptr = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    indices = torch.cat([row.nonzero().flatten()[torch.randperm(int(row.sum()))] for row in kept] or [torch.zeros(0)]).int()
    return indptr.to(device), indices.to(device)


def bsr_tokens(indptr, indices, M, N, R, C):
    """bool [1, 1, M, N] by the definition, one block after the other."""
    seen = torch.zeros(M, N, dtype=torch.bool)
    indptr, indices = indptr.tolist(), indices.tolist()
    for i in range(len(indptr) - 1):
        for column in indices[indptr[i]:indptr[i + 1]]:
            seen[i * R:(i + 1) * R, column * C:(column + 1) * C] = True
    return seen[None, None]


def assert_attends(got, q, k, v, seen, layout, **options):
    """(out, lse to the base 2) of a wrapper against dense attention; ``layout`` turns the caller's tensors into [B, H, S, D]."""
    def expected(dtype):
        out, lse = dense(*(layout(x.to(dtype)) for x in (q, k, v)), seen.to(q.device), **options)
        return out, lse / math.log(2)

    out, lse = got
    assert_exact([layout(out), layout(lse[..., None])[..., 0]], expected(q.dtype), expected(torch.float64))


def heads_last(x):
    return x.transpose(0, 1)[None]


def heads_first(x):
    return x[None]


# R, C, M, N
SIZES = [(1, 1, 5, 12), (4, 4, 18, 24), (16, 1, 40, 20), (3, 16, 8, 64), (16, 16, 32, 48)]


@everywhere
@pytest.mark.parametrize("sizes, heads, scale", spread(SIZES, [(2, 2), (4, 1)], [None, 0.3]))
def test_block_sparse_against_float64(device, dtype, backend, sizes, heads, scale):
    R, C, M, N = sizes
    indptr, indices = random_bsr(-(-M // R), N // C, device)
    q = torch.randn(M, heads[0], 32, device=device, dtype=dtype)
    k, v = torch.randn(2, N, heads[1], 32, device=device, dtype=dtype).unbind()
    wrapper = BlockSparseAttentionWrapper(torch.empty(16, dtype=torch.uint8, device=device), backend=backend)
    wrapper.plan(indptr, indices, M, N, R, C, *heads, 32, sm_scale=scale, q_data_type=dtype, o_data_type=dtype)
    assert_attends(wrapper.run(q, k, v, return_lse=True), q, k, v, bsr_tokens(indptr, indices, M, N, R, C), heads_last, scale=scale)


@everywhere
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
def test_variable_blocks_against_float64(device, dtype, backend, scale, heads):
    rows, columns = torch.tensor([[3, 20, 1, 16], [10, 10, 0, 20]]), torch.tensor([[5, 1, 24, 6, 0], [9, 3, 2, 2, 20]])
    mask = torch.rand(heads[1], 4, 5) < 0.5
    mask[0, 1] = False
    mask[1, 0] = True
    rows, columns, mask = rows.to(device), columns.to(device), mask.to(device)
    q = torch.randn(heads[0], 40, 32, device=device, dtype=dtype)
    k, v = torch.randn(2, heads[1], 36, 32, device=device, dtype=dtype).unbind()
    by_head = [mask[h].repeat_interleave(rows[h], 0).repeat_interleave(columns[h], 1) for h in range(heads[1])]
    seen = torch.stack(by_head).repeat_interleave(heads[0] // heads[1], 0)[None]
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(16, device=device), backend=backend)
    wrapper.plan(mask, rows, columns, *heads, 32, sm_scale=scale, q_data_type=dtype)
    assert_attends(wrapper.run(q, k, v, return_lse=True), q, k, v, seen, heads_first, scale=scale)


@everywhere
@pytest.mark.parametrize("of", ["query heads", "key heads"])
def test_a_block_mask_for_every_head(device, dtype, backend, of):
    mask = torch.rand(4 if of == "query heads" else 2, 3, 4, device=device) < 0.5
    q = torch.randn(24, 4, 32, device=device, dtype=dtype)
    k, v = torch.randn(2, 32, 2, 32, device=device, dtype=dtype).unbind()
    wrapper = BlockSparseAttentionWrapper(torch.empty(16, device=device), backend=backend)
    wrapper.plan(None, None, 24, 32, 8, 8, 4, 2, 32, block_mask=mask, q_data_type=dtype, o_data_type=dtype)
    seen = mask.repeat_interleave(8, 1).repeat_interleave(8, 2).repeat_interleave(4 // len(mask), 0)
    assert_attends(wrapper.run(q, k, v, return_lse=True), q, k, v, seen[None], heads_last)


@pytest.mark.gpu
@pytest.mark.parametrize("R, C", [(1, 1), (16, 4), (64, 64), (128, 128)])
@pytest.mark.parametrize("heads, dim", [((16, 16), 128), ((16, 4), 128), ((4, 1), 256)])
def test_gpu_sizes_of_upstreams_tests(R, C, heads, dim):
    M, N = 256, 512
    indptr, indices = random_bsr(M // R, N // C, "cuda")
    q = torch.randn(M, heads[0], dim, dtype=torch.float16, device="cuda")
    k, v = torch.randn(2, N, heads[1], dim, dtype=torch.float16, device="cuda").unbind()
    wrapper = BlockSparseAttentionWrapper(torch.zeros(128 * 1024 * 1024, dtype=torch.uint8, device="cuda"))
    wrapper.plan(indptr, indices, M, N, R, C, *heads, dim)
    assert_attends(wrapper.run(q, k, v, return_lse=True), q, k, v, bsr_tokens(indptr, indices, M, N, R, C), heads_last)


def test_as_flashinfers_tests_call_them():
    """Positional plan, default half precision, a buffer for the result; and the variable one with keywords."""
    M, N, R, C = 64, 64, 16, 4
    indptr, indices = random_bsr(M // R, N // C, "cpu")
    q = torch.randn(M, 4, 128, dtype=torch.float16)
    k, v = torch.randn(2, N, 4, 128, dtype=torch.float16).unbind()
    wrapper = BlockSparseAttentionWrapper(torch.zeros(128, dtype=torch.uint8))
    wrapper.plan(indptr, indices, M, N, R, C, 4, 4, 128)
    o = wrapper.run(q, k, v)
    o_ref, _ = dense(*(heads_last(x.double()) for x in (q, k, v)), bsr_tokens(indptr, indices, M, N, R, C))
    torch.testing.assert_close(heads_last(o).double(), o_ref, atol=1e-2, rtol=1e-3)
    o_buffer = torch.empty_like(o)
    assert wrapper.run(q, k, v, out=o_buffer) is o_buffer
    assert torch.equal(o, o_buffer)

    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(128), backend="auto")
    sizes = torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.tensor([[3, 1, 2]], dtype=torch.int32)
    block_mask_map = torch.tensor([[[0, 0, 1], [1, 0, 1], [0, 1, 1]]], dtype=torch.bool)
    wrapper.plan(block_mask_map=block_mask_map, block_row_sz=sizes[0], block_col_sz=sizes[1], num_qo_heads=1, num_kv_heads=1, head_dim=128,
                 q_data_type=torch.float16)
    q, k, v = torch.randn(3, 1, 6, 128, dtype=torch.float16).unbind()
    o = wrapper.run(q, k, v)
    elements = block_mask_map[0].repeat_interleave(sizes[0][0], 0).repeat_interleave(sizes[1][0], 1)
    o_ref, _ = dense(*(x[None].double() for x in (q, k, v)), elements[None, None])
    torch.testing.assert_close(o[None].double(), o_ref, atol=1e-2, rtol=1e-2)


def test_one_plan_serves_many_runs_and_a_new_one_replaces_it():
    wrapper, (q, k, v) = small_plan(), small_inputs()
    first = wrapper.run(q, k, v)
    assert torch.equal(wrapper.run(q, k, v), first)
    wrapper.plan(torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), 8, 8, 4, 4, 2, 1, 16, q_data_type="float32", o_data_type="float32")
    whole, _ = dense(*(heads_last(x) for x in (q, k, v)), torch.ones(1, 1, 8, 8, dtype=torch.bool))
    torch.testing.assert_close(heads_last(wrapper.run(q, k, v)), whole)


def test_results_and_buffers():
    wrapper, (q, k, v) = small_plan(o_data_type="bfloat16"), small_inputs()
    out, lse = torch.empty(8, 2, 16, dtype=torch.bfloat16), torch.empty(8, 2)
    got = wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse and lse.isfinite().all()
    again = wrapper.run(q.requires_grad_(), k, v, return_lse=True)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse) and not again[0].requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(wrapper.run(q, k, v), out), "the planned dtype is computed in"


def test_nothing_listed():
    wrapper = BlockSparseAttentionWrapper(torch.empty(1))
    wrapper.plan(torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 8, 8, 4, 4, 2, 1, 16, q_data_type="float32",
                 o_data_type="float32")
    out, lse = wrapper.run(*small_inputs(), return_lse=True)
    assert not out.any() and (lse == float("-inf")).all()
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(1))
    wrapper.plan(torch.zeros(1, 2, 2, dtype=torch.bool), torch.tensor([[3, 5]]), torch.tensor([[4, 4]]), 2, 1, 16, q_data_type="float32")
    q, k, v = small_inputs()
    assert not wrapper.run(*(x.transpose(0, 1) for x in (q, k, v))).any()


@pytest.mark.gpu
def test_gpu_runs_never_wait_and_fit_a_cuda_graph():
    indptr, indices = random_bsr(16, 16, "cuda")
    q = torch.randn(256, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 256, 2, 128, device="cuda", dtype=torch.bfloat16).unbind()
    wrapper = BlockSparseAttentionWrapper(torch.empty(1, device="cuda"))
    wrapper.plan(indptr, indices, 256, 256, 16, 16, 8, 2, 128, q_data_type="bfloat16", o_data_type="bfloat16")
    assert_never_waits_and_fits_a_cuda_graph(lambda: (wrapper.run(q, k, v),))


def test_compiles_without_a_break():
    wrapper, (q, k, v) = small_plan(), small_inputs()

    def attend(q, k, v):
        return wrapper.run(q * 2, k, v, return_lse=True)

    for a, b in zip(torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v)):
        torch.testing.assert_close(a, b)


