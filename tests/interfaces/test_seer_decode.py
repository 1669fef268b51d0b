"""SeerAttention's decode functions: against float64 by loops, by mask and by indices, padded on the right and on the left."""

from functools import partial

import pytest
import torch
from gpu_laws import assert_never_waits_and_fits_a_cuda_graph
from token_oracle import assert_close, dense, everywhere

from ssta.interfaces import (
    block_sparse_flash_decode_gqa_indice,
    block_sparse_flash_decode_gqa_mask,
    block_sparse_flash_decode_leftpad_gqa_indice,
    block_sparse_flash_decode_leftpad_gqa_mask,
)

CAPACITY = 45
LENGTHS = [45, 17, 0, 30, 1]
BATCH = len(LENGTHS)


def inputs(heads, kv_heads, dim, device, v_dim=None, dtype=torch.float16, batch=BATCH, capacity=CAPACITY):
    make = partial(torch.randn, device=device, dtype=dtype)
    return make(batch, heads, dim), make(batch, capacity, kv_heads, dim), make(batch, capacity, kv_heads, v_dim or dim)


def seen_keys(mask, block_size, left, lengths=LENGTHS, capacity=CAPACITY):
    """bool [B, Hkv, Smax] by the definition."""
    seen = torch.zeros(*mask.shape[:2], capacity, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for key in range(capacity - length, capacity) if left else range(length):
            seen[b, :, key] = mask[b, :, key // block_size]
    return seen


def as_indices(mask, slots):
    """int32 [B, Hkv, slots] in a random order with -1 between."""
    indices = torch.full((*mask.shape[:2], slots), -1, dtype=torch.int32)
    for b in range(mask.shape[0]):
        for h in range(mask.shape[1]):
            ids = mask[b, h].nonzero()[:, 0].int()
            indices[b, h, torch.randperm(slots)[:len(ids)]] = ids
    return indices


def check(out, q, k, v, seen, scale):
    group = q.shape[1] // k.shape[2]
    for b in range(q.shape[0]):
        visible = seen[b].repeat_interleave(group, 0)[:, None].to(q.device)
        truth, plain = (dense(*x, visible, scale)[0] for x in ([y.double() for y in (q[b:b + 1], k[b], v[b])], (q[b:b + 1], k[b], v[b])))
        assert out[b].isfinite().all()
        assert_close(f"sequence {b}", out[b:b + 1], plain, truth)


@everywhere
@pytest.mark.parametrize("left", [False, True], ids=["right-padded", "left-padded"])
@pytest.mark.parametrize("heads, kv_heads, dim, v_dim, block_size", [(4, 2, 16, 16, 8), (6, 1, 40, 16, 5), (2, 2, 16, 32, 32)])
def test_against_float64(device, impl, left, heads, kv_heads, dim, v_dim, block_size):
    q, k, v = inputs(heads, kv_heads, dim, device, v_dim)
    number = -(-CAPACITY // block_size)
    mask = torch.rand(len(LENGTHS), kv_heads, number) < 0.6
    lengths, indices = torch.tensor(LENGTHS, dtype=torch.int32, device=device), as_indices(mask, number + 2).to(device)
    seen, mask = seen_keys(mask, block_size, left), mask.to(device)
    if left:
        outs = [block_sparse_flash_decode_leftpad_gqa_mask(q, k, v, lengths, mask, block_size, 0.3, impl=impl),
                block_sparse_flash_decode_leftpad_gqa_indice(q, k, v, lengths, indices, block_size, 0.3, impl=impl)]
    else:
        outs = [block_sparse_flash_decode_gqa_mask(q, k, v, lengths, CAPACITY, mask, block_size, 0.3, impl=impl),
                block_sparse_flash_decode_gqa_indice(q, k, v, lengths, CAPACITY, number + 2, indices, block_size, 0.3, impl=impl)]
    for out in outs:
        check(out, q, k, v, seen, 0.3)
        assert (out[2] == 0).all(), "an empty sequence"


@everywhere
def test_first_block_unmasked(device, impl):
    q, k, v = inputs(4, 2, 16, device)
    mask = torch.rand(len(LENGTHS), 2, 6) < 0.3
    lengths = torch.tensor(LENGTHS, device=device)
    out = block_sparse_flash_decode_leftpad_gqa_mask(q[:, None], k, v, lengths, mask.to(device), 8, first_block_unmasked=True, impl=impl)
    for b, length in enumerate(LENGTHS):
        if length:
            mask[b, :, (CAPACITY - length) // 8] = True
    check(out, q, k, v, seen_keys(mask, 8, True), 0.25)


@everywhere
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_and_what_is_not_selected_change_nothing(device, impl, poison):
    q, k, v = inputs(4, 2, 16, device)
    mask = torch.rand(len(LENGTHS), 2, 6) < 0.5
    lengths = torch.tensor(LENGTHS, device=device)
    clean = block_sparse_flash_decode_gqa_mask(q, k, v, lengths, CAPACITY, mask.to(device), 8, impl=impl)
    unseen = ~seen_keys(mask, 8, False).transpose(1, 2).to(device)
    k[unseen], v[unseen] = poison, poison
    assert torch.equal(block_sparse_flash_decode_gqa_mask(q, k, v, lengths, CAPACITY, mask.to(device), 8, impl=impl), clean)


@everywhere
@pytest.mark.parametrize("layout", ["slice of a longer cache", "heads first", "key and value differ"])
def test_cache_layouts(device, impl, layout):
    q, k, v = inputs(4, 2, 16, device)
    mask = torch.rand(len(LENGTHS), 2, 6) < 0.6
    lengths = torch.tensor(LENGTHS, device=device)
    plain = block_sparse_flash_decode_gqa_mask(q, k, v, lengths, CAPACITY, mask.to(device), 8, impl=impl)
    longer = torch.full((2, len(LENGTHS), CAPACITY + 9, 2, 16), float("nan"), dtype=k.dtype, device=device)
    longer[:, :, :CAPACITY] = torch.stack([k, v])
    if layout == "slice of a longer cache":
        k, v = longer[:, :, :CAPACITY]
    elif layout == "heads first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    else:
        v = longer[1, :, :CAPACITY]
    assert torch.equal(block_sparse_flash_decode_gqa_mask(q, k, v, lengths, CAPACITY, mask.to(device), 8, impl=impl), plain)


@everywhere
def test_everything_selected_is_dense_attention(device, impl):
    """Long enough for several programs to share a list."""
    q, k, v = inputs(2, 1, 16, device, batch=1, capacity=1000)
    lengths = torch.tensor([997], device=device)
    indices = torch.arange(63, dtype=torch.int32, device=device).flip(0).expand(1, 1, 63)
    out = block_sparse_flash_decode_gqa_indice(q, k, v, lengths, 1000, 63, indices, 16, impl=impl)
    check(out, q, k, v, seen_keys(torch.ones(1, 1, 63, dtype=torch.bool), 16, False, [997], 1000), 0.25)


def test_autocast_and_no_gradient():
    q, k, v = (x.float().requires_grad_() for x in inputs(4, 2, 16, "cpu"))
    mask, lengths = torch.ones(len(LENGTHS), 2, 6, dtype=torch.bool), torch.tensor(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        out = block_sparse_flash_decode_gqa_mask(q, k, v, lengths, CAPACITY, mask, 8)
    assert out.dtype == torch.bfloat16 and not out.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("heads, kv_heads, dim, block_size", [(32, 8, 128, 32), (16, 1, 128, 64), (64, 4, 64, 16), (8, 8, 256, 128)])
def test_gpu_sizes(heads, kv_heads, dim, block_size, dtype):
    lengths = [2000, 1, 777]
    q, k, v = inputs(heads, kv_heads, dim, "cuda", None, dtype, 3, 2048)
    number = -(-2048 // block_size)
    mask = torch.rand(3, kv_heads, number) < 0.2
    indices = as_indices(mask, number).cuda()
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    seen = seen_keys(mask, block_size, False, lengths, 2048)
    for out in (block_sparse_flash_decode_gqa_mask(q, k, v, cache_seqlens, 2048, mask.cuda(), block_size),
                block_sparse_flash_decode_gqa_indice(q, k, v, cache_seqlens, 2048, number, indices, block_size)):
        check(out, q, k, v, seen, dim ** -0.5)
    out = block_sparse_flash_decode_leftpad_gqa_mask(q, k, v, cache_seqlens, mask.cuda(), block_size)
    check(out, q, k, v, seen_keys(mask, block_size, True, lengths, 2048), dim ** -0.5)


@pytest.mark.gpu
def test_gpu_never_waits_and_fits_a_cuda_graph():
    q, k, v = inputs(32, 8, 128, "cuda", None, torch.bfloat16, 4, 2048)
    lengths = torch.tensor([2048, 1, 900, 0], dtype=torch.int32, device="cuda")
    mask = torch.rand(4, 8, 64, device="cuda") < 0.2

    def step():
        return (block_sparse_flash_decode_gqa_mask(q, k, v, lengths, 2048, mask, 32),)

    assert_never_waits_and_fits_a_cuda_graph(step)


def call(**changes):
    q, k, v = inputs(4, 2, 16, "cpu")
    arguments = dict(q=q, k_cache=k, v_cache=v, cache_seqlens=torch.tensor(LENGTHS), max_cache_seqlen=CAPACITY, max_selected_blocks=3,
                     block_indices=torch.zeros(5, 2, 3, dtype=torch.int32), block_size=8)
    return block_sparse_flash_decode_gqa_indice(**(arguments | changes))


@pytest.mark.parametrize("changes, error, message", [
    (dict(q=torch.zeros(5, 2, 4, 16)), ValueError, r"q must be \[batch, heads, head_dim\] or \[batch, 1, heads, head_dim\]"),
    (dict(q=torch.zeros(3, 4, 16).half()), ValueError, "k_cache must have q's batch 3, got 5"),
    (dict(k_cache=torch.zeros(5, 45, 2, 16)), TypeError, "k_cache must have q's dtype torch.float16, got torch.float32"),
    (dict(v_cache=torch.zeros(5, 44, 2, 16).half()), ValueError, "v_cache must have k_cache's shape"),
    (dict(cache_seqlens=torch.zeros(4).int()), ValueError, r"cache_seqlens must be \[B\] = \[5\], got shape \(4,\)"),
    (dict(max_cache_seqlen=44), ValueError, "max_cache_seqlen must be k_cache's 45 tokens, got 44"),
    (dict(max_selected_blocks=4), ValueError, "max_selected_blocks must be block_indices' 3, got 4"),
    (dict(max_selected_blocks=None), TypeError, "max_selected_blocks must be an int, got None"),
    (dict(max_selected_blocks="1"), TypeError, "max_selected_blocks must be an int, got '1'"),
    (dict(max_selected_blocks=-1), ValueError, "max_selected_blocks must be at least 0, got -1"),
    (dict(block_indices=torch.zeros(5, 2, 3)), TypeError, "block_indices must be int32, got torch.float32"),
    (dict(sm_scale="x"), TypeError, r"scale must be a number, got 'x' \(str\)"),
])
def test_refuses_before_any_kernel_runs(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


FUNCTIONS = {
    block_sparse_flash_decode_gqa_indice: ("max_cache_seqlen", "max_selected_blocks", "block_indices"),
    block_sparse_flash_decode_gqa_mask: ("max_cache_seqlen", "block_mask"),
    block_sparse_flash_decode_leftpad_gqa_indice: ("block_indices",),
    block_sparse_flash_decode_leftpad_gqa_mask: ("block_mask",),
}


def decode_everything(function, q, k, v):
    """All blocks of 4 of full caches."""
    batch, capacity, kv_heads, _ = k.shape
    blocks = -(-capacity // 4)
    arguments = dict(max_cache_seqlen=capacity, max_selected_blocks=blocks, block_mask=torch.ones(batch, kv_heads, blocks) > 0,
                     block_indices=torch.arange(blocks, dtype=torch.int32).expand(batch, kv_heads, blocks))
    return function(q, k, v, torch.full((batch,), capacity), **{name: arguments[name] for name in FUNCTIONS[function]}, block_size=4)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kv_heads, spare", [(1, 4), (1, 0), (3, 4)])
def test_a_cache_of_one_token_may_be_a_transposed_view(function, kv_heads, spare):
    """One key each: the result is its value."""
    base = torch.randn(1 + spare, 3, kv_heads, 4)
    kv = base[:1].transpose(0, 1)
    out = decode_everything(function, torch.randn(3, kv_heads, 4), kv, kv)
    assert torch.allclose(out, kv[:, 0])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("batch, capacity", [(0, 8), (2, 0), (0, 0)])
def test_no_sequence_or_no_place_in_the_cache(function, batch, capacity):
    out = decode_everything(function, torch.randn(batch, 2, 4), *torch.randn(2, batch, capacity, 2, 4).unbind())
    assert out.shape == (batch, 2, 4) and (out == 0).all()


def test_debug_is_refused():
    q, k, v = inputs(4, 2, 16, "cpu")
    with pytest.raises(ValueError, match="debug must be False"):
        block_sparse_flash_decode_leftpad_gqa_mask(q, k, v, torch.tensor(LENGTHS), torch.ones(5, 2, 6, dtype=torch.bool), 8, debug=True)
