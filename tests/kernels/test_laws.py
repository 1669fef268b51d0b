"""block_sparse_attention: every implementation against float64, and the laws that hold whatever the pattern."""

from functools import partial

import pytest
import torch
from cases import EVERYWHERE, everywhere, inputs, patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_as_exact_as_torch, attention_by, attention_with_gradients

from ssta.kernels import BlockLists, PatternFacts, block_sparse_attention, choose_route
from ssta.kernels.eager.blocks import torch_backward, torch_forward


@everywhere
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", patterns("cpu"))
def test_against_float64(device, impl, causal, name):
    blocks, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 32, device, impl=impl)
    attend = partial(block_sparse_attention, blocks=blocks, causal=causal, return_lse=True, impl=impl)
    assert_as_exact_as_torch(attend, q, k, v, blocks, causal=causal)


@everywhere
@pytest.mark.parametrize("name", ["short last block", "per key head", "ragged"])
def test_gradients_with_non_deterministic_dq(device, impl, name):
    blocks, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 32, device, impl=impl)
    attend = partial(block_sparse_attention, blocks=blocks, return_lse=True, deterministic=False, impl=impl)
    assert_as_exact_as_torch(attend, q, k, v, blocks)


@pytest.mark.parametrize("device", [pytest.param(of.values[0], marks=of.marks, id=of.id) for of in EVERYWHERE if of.values[1] == "triton"])
@pytest.mark.parametrize("name", ["uniform", "ragged", "per key head"])
def test_gpus_without_tma(device, name):
    """The kernels as Ampere and Ada run them: addresses instead of descriptors, in 100 KB of shared memory."""
    from ssta.kernels.device import DeviceLimits
    from ssta.kernels.portable.backward import triton_backward
    from ssta.kernels.portable.forward import triton_forward

    limits = DeviceLimits(99 * 1024, tma=False)
    as_exact_as_torch(name, False, device, partial(triton_forward, limits=limits), partial(triton_backward, limits=limits))


def as_exact_as_torch(name, causal, device, forward, backward):
    blocks, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 32, device)
    assert_as_exact_as_torch(attention_by(forward, backward, blocks, 32**-0.5, causal), q, k, v, blocks, causal=causal)


SIZES = [("triton", dim) for dim in (32, 64, 80, 96, 128, 256)] + [("hopper", 64), ("hopper", 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("impl, dim", SIZES)
@pytest.mark.parametrize("block", [16, 48, 64, 128, 192, 384])
def test_gpu_sizes(block, impl, dim, dtype):
    blocks = BlockLists.from_mask(torch.rand(1, 2, 5, 4, device="cuda") < 0.6, block, block)
    q, k, v = inputs(1, 4, 2, 5 * block - 7, 4 * block - 3, dim, "cuda", dtype)
    attend = partial(block_sparse_attention, blocks=blocks, return_lse=True, impl=impl)
    assert_as_exact_as_torch(attend, q, k, v, blocks, block=64)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block", [64, 100, 384])
def test_gpu_causal_sizes(block, dim):
    """More keys than queries and the other way round, so that the diagonal cuts blocks anywhere and whole rows see nothing."""
    for q_len, kv_len in ((5 * block - 7, 6 * block - 3), (6 * block - 3, 5 * block - 7)):
        mask = torch.rand(1, 2, -(-q_len // block), -(-kv_len // block), device="cuda") < 0.8
        blocks = BlockLists.from_mask(mask, block, block)
        q, k, v = inputs(1, 4, 2, q_len, kv_len, dim, "cuda", torch.bfloat16)
        attend = partial(block_sparse_attention, blocks=blocks, return_lse=True, causal=True, impl="hopper")
        assert_as_exact_as_torch(attend, q, k, v, blocks, causal=True, block=64)


@pytest.mark.gpu
def test_gpu_more_tiles_than_programs():
    """Programs that take many tiles each, with lists from empty to full: what one tile leaves behind must not reach the next."""
    heads, tokens = 24, 384 * 20 + 50
    share = torch.rand(heads, 21, 1, device="cuda") * (torch.rand(heads, 21, 1, device="cuda") < 0.8)
    blocks = BlockLists.from_mask(torch.rand(heads, 21, 21, device="cuda") < share, 384, 384)
    q, k, v = inputs(1, heads, 4, tokens, tokens, 64, "cuda", torch.bfloat16)
    out, lse = block_sparse_attention(q, k, v, blocks, return_lse=True, impl="hopper")
    exact, exact_lse = block_sparse_attention(q, k, v, blocks, return_lse=True, impl="triton")
    torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_gpu_beyond_32_bit_offsets(impl):
    """q has 2.2 thousand million elements, so the last heads lie past what an int32 can address."""
    heads, tokens, dim, block = 17, 1 << 20, 128, 128
    q = torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    number = tokens // block
    blocks = BlockLists.from_topk(torch.arange(number - 1, -1, -1, device="cuda")[:, None], block, block, num_kv_blocks=number)
    out = block_sparse_attention(q, q, q, blocks, impl=impl)
    last = q[:, -1:, -block:].contiguous()
    first = q[:, -1:, :block].contiguous()
    whole = BlockLists.from_mask(torch.ones(1, 1, dtype=torch.bool, device="cuda"), block, block)
    torch.testing.assert_close(out[:, -1:, -block:], block_sparse_attention(last, first, first, whole, impl=impl), rtol=0, atol=0)


@everywhere
def test_everything_selected_is_dense_attention(device, impl):
    q, k, v = inputs(1, 2, 1, 70, 50, 32, device, impl=impl)
    blocks = BlockLists.from_mask(torch.ones(5, 4, dtype=torch.bool, device=device), 16, 16)
    dense = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    assert (block_sparse_attention(q, k, v, blocks, impl=impl).double() - dense).abs().max() < 2e-3


@everywhere
@given(seed=st.integers(0, 2**31))
@settings(max_examples=5)
@pytest.mark.slow
def test_order_and_spare_entries_of_a_list_change_nothing(device, impl, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = inputs(1, 2, 2, 40, 96, 16, device, impl=impl)
    mask = torch.rand(1, 2, 3, 6, generator=generator) < 0.5
    blocks = BlockLists.from_mask(mask.to(device), 16, 16)
    order = torch.rand(1, 2, 3, 6, generator=generator).to(device)
    used = torch.arange(6, device=device) < blocks.counts[..., None]
    shuffled = blocks.indices.gather(-1, order.masked_fill(~used, 2.0).argsort(-1))
    garbage = torch.where(used, shuffled, torch.iinfo(torch.int32).max)
    other = BlockLists(blocks.counts, garbage, 16, 16, num_kv_blocks=6)
    for a, b in zip(*(_run(q, k, v, lists, impl) for lists in (blocks, other))):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def _run(q, k, v, blocks, impl, **options):
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=generator).to(q)
    dlse = torch.randn(q.shape[:3], generator=generator).to(q.device)
    attend = partial(block_sparse_attention, blocks=blocks, return_lse=True, impl=impl, **options)
    return attention_with_gradients(attend, q, k, v, dout, dlse)


@everywhere
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_attended_to_changes_nothing(device, impl, causal, poison):
    """NaN or inf in key block 2, in the invalid tail of block 0 and in query row 5 reaches just the rows that see it."""
    q, k, v = inputs(1, 2, 1, 64, 64, 16, device, impl=impl)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool, device=device)
    blocks = BlockLists.from_mask(mask, 16, 16, kv_lengths=torch.tensor([11, 16, 16, 16], dtype=torch.int32, device=device))
    clean = block_sparse_attention(q, k, v, blocks, causal=causal, impl=impl)
    q2, k2, v2 = q.clone(), k.clone(), v.clone()
    k2[:, :, 11:16] = v2[:, :, 11:16] = poison
    k2[:, :, 40] = v2[:, :, 40] = poison
    q2[:, :, 5] = poison
    dirty = block_sparse_attention(q2, k2, v2, blocks, causal=causal, impl=impl)
    sees_it = torch.zeros(64, dtype=torch.bool, device=device)
    sees_it[5] = sees_it[48:] = True
    if not causal:
        sees_it[16:32] = True
    assert torch.equal(dirty[:, :, ~sees_it], clean[:, :, ~sees_it])
    assert not dirty[:, :, sees_it].isfinite().all(-1).any(), "a row that sees a NaN must show it"


@everywhere
def test_one_batch_element_alone_is_the_same_in_a_batch(device, impl):
    q, k, v = inputs(3, 2, 1, 40, 48, 16, device, impl=impl)
    mask = torch.rand(3, 2, 3, 3, device=device) < 0.6
    together = _run(q, k, v, BlockLists.from_mask(mask, 16, 16), impl)[:2]
    for i in range(3):
        alone = _run(q[i:i + 1], k[i:i + 1], v[i:i + 1], BlockLists.from_mask(mask[i:i + 1], 16, 16), impl)[:2]
        for a, b in zip(together, alone):
            torch.testing.assert_close(a[i:i + 1], b, rtol=0, atol=1e-5)


@everywhere
@pytest.mark.slow
def test_same_bits_twice(device, impl):
    q, k, v = inputs(2, 4, 2, 100, 120, 32, device, impl=impl)
    blocks = BlockLists.from_mask(torch.rand(2, 4, 7, 8, device=device) < 0.5, 16, 16)
    for a, b in zip(*(_run(q, k, v, blocks, impl) for _ in range(2))):
        assert torch.equal(a, b)


@everywhere
def test_empty_lists_and_empty_sequences(device, impl):
    q, k, v = inputs(1, 2, 2, 32, 32, 16, device, impl=impl)
    nothing = BlockLists.from_mask(torch.zeros(2, 2, dtype=torch.bool, device=device), 16, 16)
    out, lse, *gradients = _run(q, k, v, nothing, impl)
    assert not out.any() and (lse == float("-inf")).all() and not any(g.any() for g in gradients)
    no_counts = torch.zeros(1, 1, 2, dtype=torch.int32, device=device)
    no_keys = BlockLists(no_counts, no_counts.new_zeros(1, 1, 2, 0), 16, 16, num_kv_blocks=0)
    out, lse, *gradients = _run(q, k[:, :, :0], v[:, :, :0], no_keys, impl)
    assert not out.any() and (lse == float("-inf")).all() and not gradients[0].any() and gradients[1].shape == k[:, :, :0].shape


@everywhere
def test_callers_tensors_and_strides(device, impl):
    """A view into a fused qkv projection, expanded keys, an expanded incoming gradient: no copy asked for, nothing written to."""
    qkv = torch.randn(1, 40, 3, 2, 64 if impl == "hopper" else 16, device=device, dtype=torch.float16)
    before = qkv.clone()
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv.unbind(2))
    blocks = BlockLists.from_mask(torch.rand(3, 3, device=device) < 0.7, 16, 16)
    out = block_sparse_attention(q, k, v, blocks, impl=impl)
    assert out.stride() == torch.empty_like(q).stride()
    out.sum().backward()
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    block_sparse_attention(*plain, blocks, impl=impl).backward(torch.ones(q.shape, device=device, dtype=q.dtype))
    for a, b in zip((q, k, v), plain):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-3)
    assert torch.equal(qkv, before)


@everywhere
@pytest.mark.parametrize("name", patterns("cpu"))
@pytest.mark.slow
def test_a_result_in_the_place_of_q_is_the_same(device, impl, name):
    """Bit for bit, also beside rows that no block covers; k and v are left alone."""
    blocks, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 32, device, impl=impl)
    k_before, v_before = k.clone(), v.clone()
    expected = block_sparse_attention(q, k, v, blocks, impl=impl)
    route = choose_route(impl, q.device, q.dtype, q.shape[3], PatternFacts.of(blocks), heads=heads, kv_heads=kv_heads)
    out, _ = route.run(q, k, v, blocks, q.shape[3] ** -0.5, in_place=True)
    assert torch.equal(out, expected) and torch.equal(k, k_before) and torch.equal(v, v_before)
    assert out.stride() == q.stride()
    if impl in ("triton", "hopper") and blocks.max_kv_length >= 16:
        assert out.data_ptr() == q.data_ptr()


@everywhere
@pytest.mark.parametrize("name", patterns("cpu"))
@pytest.mark.slow
def test_a_gradient_in_the_place_of_the_results_is_the_same(device, impl, name):
    """Bit for bit, also beside rows that no block covers."""
    blocks, heads, kv_heads, q_len, kv_len = patterns(device)[name]
    q, k, v = inputs(2, heads, kv_heads, q_len, kv_len, 32, device, impl=impl)
    route = choose_route(impl, q.device, q.dtype, q.shape[3], PatternFacts.of(blocks), heads=heads, kv_heads=kv_heads)
    out, lse = route.run(q, k, v, blocks, 0.2)
    dout = torch.randn_like(q)
    expected = route.run_backward(dout, None, q, k, v, out, lse, blocks, 0.2, False, True)
    dq, *found = route.run_backward(dout, None, q, k, v, out, lse, blocks, 0.2, False, True, in_place=True)
    assert all(map(torch.equal, (dq, *found), expected))
    covered = not isinstance(blocks.q_offsets, torch.Tensor) and blocks.q_lengths is None
    if route.backward == "hopper" or route.backward == "triton" and covered:
        assert dq.data_ptr() == dout.data_ptr()


def test_torch_gradients_by_differences():
    """float64 all the way: against finite differences, which share nothing with the formulas."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 10, 12, 4, dtype=torch.float64))
    blocks = BlockLists.from_mask(torch.tensor([[True, False, True], [False, True, False]]), 5, 4)
    for impl in ("torch", "reference"):
        for causal in (False, True):
            attend = partial(block_sparse_attention, blocks=blocks, causal=causal, return_lse=True, impl=impl)
            assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("name", patterns("cpu"))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_torch_where_lists_cannot_be_read(name, causal):
    """As on a GPU, where steps are padded."""
    as_exact_as_torch(name, causal, "cpu", partial(torch_forward, padded=True), partial(torch_backward, padded=True))


def test_torch_is_really_sparse():
    """One row of blocks among many keys has far fewer scores than dense attention, and few of them at a time."""
    from ssta.kernels.eager.steps import CACHED_ELEMENTS, steps

    q, k, v = inputs(1, 1, 1, 4096, 4096, 16, dtype=torch.float32)
    blocks = BlockLists.from_topk(torch.arange(64)[:, None], 64, 64, num_kv_blocks=64)
    sizes = [step.q_rows.numel() * step.k_rows.shape[-1] for step in steps(q, k, blocks, False)]
    assert sum(sizes) == 64 * 64 * 64, "the score elements of 64 selected pairs of 64 x 64"
    assert max(sizes) <= CACHED_ELEMENTS
