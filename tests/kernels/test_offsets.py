"""Offsets, lengths and bounds of any values: what lies outside the tensors is neither read nor written, and all implementations agree."""

import pytest
import torch
from cases import everywhere

from ssta.kernels import BlockLists, PatternFacts, block_sparse_attention, choose_route

TOKENS = 40
MANY = 2**31 - 1
# name -> (offsets, the tokens of each block).
OFFSETS = {
    "past the end": ([0, 16, 100], [(0, 16), (16, 40)]),
    "wholly past the end": ([0, 50, 100], [(0, 40), (40, 40)]),
    "far past the end": ([0, 16, MANY], [(0, 16), (16, 40)]),
    "negative": ([-20, 16, 40], [(0, 16), (16, 40)]),
    "far below": ([-MANY, -5, 40], [(0, 0), (0, 40)]),
    "descending": ([0, 30, 20], [(0, 30), (30, 30)]),
    "descending from past the end": ([90, 10, 40], [(40, 40), (10, 40)]),
}


def poisoned(x):
    """x as part of a larger piece of memory that holds NaN, and that memory."""
    memory = torch.full((*x.shape[:-2], x.shape[-2] + 2 * TOKENS, x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
    memory[..., TOKENS:-TOKENS, :] = x
    return memory[..., TOKENS:-TOKENS, :], memory


def dense(q, k, v, q_blocks, kv_blocks, mask):
    """Attention in float64, where block i of the queries, (start, end), sees the key blocks that mask[i] keeps."""
    seen = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    for row, (start, end) in zip(mask, q_blocks):
        for kept, (first, last) in zip(row, kv_blocks):
            seen[start:end, first:last] |= bool(kept)
    q, k, v = (x.double() for x in (q, k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def lists(mask, offsets, axes, device):
    offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    other = torch.tensor([0, 24, 40], dtype=torch.int32, device=device)
    return BlockLists.from_mask(mask.to(device), offsets if "q" in axes else other, offsets if "kv" in axes else other)


@pytest.mark.parametrize("axes", ["q", "kv", "q kv"])
@pytest.mark.parametrize("name", OFFSETS)
@everywhere
def test_what_lies_outside_is_not_touched(device, impl, name, axes):
    dim = 64 if impl == "hopper" else 16
    (q, _), (k, _), (v, _) = (poisoned(torch.randn(1, 2, TOKENS, dim, device=device, dtype=torch.float16)) for _ in range(3))
    offsets, cut = OFFSETS[name]
    other = [(0, 24), (24, 40)]
    mask = torch.tensor([[True, True], [False, True]])
    blocks = lists(mask, offsets, axes, device)
    expected = dense(q, k, v, cut if "q" in axes else other, cut if "kv" in axes else other, mask)
    out = block_sparse_attention(q, k, v, blocks, impl=impl)
    assert (out.double() - expected).abs().max() < 4e-3
    reference = block_sparse_attention(q, k, v, lists(mask, offsets, axes, device), impl="reference")
    if "descending from" not in name:  # the reference finds a token's block by ascending starts
        assert (reference.double() - expected).abs().max() < 4e-3


@pytest.mark.parametrize("name", OFFSETS)
@everywhere
def test_nothing_is_written_beside_the_output(device, impl, name):
    q, k, v = (torch.randn(1, 1, TOKENS, 64 if impl == "hopper" else 16, device=device, dtype=torch.float16) for _ in range(3))
    q, memory = poisoned(q)
    blocks = lists(torch.ones(2, 2, dtype=torch.bool), OFFSETS[name][0], "q kv", device)
    route = choose_route(impl, q.device, q.dtype, q.shape[3], PatternFacts.of(blocks))
    route.run(q, k, v, blocks, q.shape[3] ** -0.5, in_place=True)
    assert memory[..., :TOKENS, :].isnan().all() and memory[..., -TOKENS:, :].isnan().all()


@pytest.mark.parametrize("name", ["past the end", "negative", "descending"])
@everywhere
def test_gradients_stay_inside(device, impl, name):
    dim = 64 if impl == "hopper" else 16
    parts, grads = [poisoned(torch.randn(1, 1, TOKENS, dim, device=device, dtype=torch.float16))[0] for _ in range(3)], []
    mask = torch.tensor([[True, True], [False, True]])
    for one in (impl, "definition"):
        leaves = [x.detach().requires_grad_() for x in parts]
        if one == "definition":
            out = dense(*leaves, OFFSETS[name][1], OFFSETS[name][1], mask)
        else:
            out = block_sparse_attention(*leaves, lists(mask, OFFSETS[name][0], "q kv", device), impl=one)
        grads.append(torch.autograd.grad(out.double().square().sum(), leaves))
    for mine, expected in zip(*grads):
        assert (mine.double() - expected.double()).abs().max() < 2e-2


@everywhere
def test_tokens_past_the_bound_on_a_block_are_not_real(device, impl):
    q, k, v = (torch.randn(1, 1, TOKENS, 64 if impl == "hopper" else 16, device=device, dtype=torch.float16) for _ in range(3))
    offsets = torch.tensor([0, 30, 40], dtype=torch.int32, device=device)
    mask = torch.ones(2, 2, dtype=torch.bool, device=device)
    bounded = BlockLists.from_mask(mask, offsets, offsets, max_q_length=17, max_kv_length=13)
    expected = dense(q, k, v, [(0, 17), (30, 40)], [(0, 13), (30, 40)], mask)
    assert (block_sparse_attention(q, k, v, bounded, impl=impl).double() - expected).abs().max() < 4e-3


@pytest.mark.parametrize("name", OFFSETS)
def test_bounds_lie_inside_the_tensors(name):
    offsets, cut = OFFSETS[name]
    blocks = lists(torch.ones(2, 2, dtype=torch.bool), offsets, "q kv", "cpu")
    for starts, sizes in (blocks.q_bounds(TOKENS), blocks.kv_bounds(TOKENS)):
        found = [(start, start + size) for start, size in zip(starts[0, 0].tolist(), sizes[0, 0].tolist())]
        assert all(0 <= start <= end <= TOKENS for start, end in found)
        assert [x for x in found if x[0] < x[1]] == [x for x in cut if x[0] < x[1]]
