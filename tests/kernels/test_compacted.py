"""Listed keys that are compacted in memory before they are attended to: in parts of any size, and just where that is said."""

from functools import partial

import pytest
import torch
from backend_rows import DEVICE
from oracles import assert_as_exact_as_torch, attention_by

from ssta.kernels import BlockLists, choose_route, routing
from ssta.kernels.portable.config import COMPACTED_BYTES

DEVICES = [pytest.param("cuda" if torch.cuda.is_available() else "cpu", "triton", id="triton"),
           pytest.param("cuda", "auto", id="auto", marks=pytest.mark.gpu)]


def inputs(batch, heads, kv_heads, q_len, kv_len, dim, device):
    q = torch.randn(batch, q_len, heads, dim, device=device, dtype=torch.float16).transpose(1, 2)
    return q, *(torch.randn(batch, kv_heads, kv_len, dim, device=device, dtype=torch.float16) for _ in range(2))


def lists(shape, items, q_block, kv_block, device):
    kept = torch.rand(*shape, items, device=device) < 0.5
    kept[..., 1, :] = False  # a block that attends to nothing
    return BlockLists.from_mask(kept, q_block, kv_block)


def compacted(impl, blocks, dim, room=COMPACTED_BYTES):
    """Attention with compacted keys forward and backward, however few rows share a list; ``room``: bytes of the copies."""
    from ssta.kernels.portable.compacted import compacted_backward, compacted_forward

    tiles = choose_route(impl, DEVICE, torch.float16, dim)

    def backward(*given):
        return compacted_backward(tiles.backward.load(), *given, *(True,) * tiles.takes_deterministic, room=room)

    return attention_by(partial(compacted_forward, tiles.forward.load(), room=room), backward, blocks, dim**-0.5)


@pytest.mark.parametrize("device, impl", DEVICES)
@pytest.mark.parametrize("list_heads, parts, kv_block", [(1, "few", 1), (2, "one", 5), (2, "many", 1), (4, "few", 5), (4, "many", 1)])
@pytest.mark.slow
def test_against_float64_in_parts(device, impl, list_heads, parts, kv_block):
    # A list of one head, of all heads of some blocks, of everything.
    room = {"one": 1 << 30, "few": 6_000 if device == "cpu" else 200_000, "many": 0}[parts]
    dim, q_block, kv_len = (64, 128, 143) if device == "cuda" else (16, 16, 23)
    blocks = lists((2, list_heads, 3), -(-kv_len // kv_block), q_block, kv_block, device)
    q, k, v = inputs(2, 4, 2, 2 * q_block + 5, kv_len, dim, device)
    assert_as_exact_as_torch(compacted(impl, blocks, dim, room), q, k, v, blocks)


@pytest.mark.parametrize("device, impl", DEVICES)
def test_ids_out_of_range_are_absent(device, impl):
    indices = torch.tensor([[-1, 7, 3, 99], [50, -5, 60, 1 << 30]], device=device)
    q, k, v = inputs(1, 2, 1, 32, 20, 16 if device == "cpu" else 64, device)
    out, lse = compacted(impl, BlockLists.from_topk(indices, 16, 2), q.shape[3])(q, k, v)
    seen = BlockLists.from_topk(torch.tensor([[7, 3]], device=device), 16, 2)
    expected, _ = compacted(impl, seen, q.shape[3])(q[:, :, :16], k, v)
    assert torch.equal(out[:, :, :16], expected)
    assert (out[:, :, 16:] == 0).all() and (lse[:, :, 16:] == float("-inf")).all()


@pytest.mark.parametrize("device, impl", DEVICES)
def test_same_bits_twice_and_nothing_from_keys_that_are_not_listed(device, impl):
    blocks = lists((1, 2, 3), 40, 16, 1, device)
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 48, 40, 16 if device == "cpu" else 64, device))
    dout = torch.randn_like(q)

    def run(k, v):
        out, _ = compacted(impl, blocks, q.shape[3])(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    first = run(k, v)
    unseen = ~blocks.to_mask()[0].any(1)  # [Hkv, Skv]
    assert unseen.any()
    poisoned = [x.detach().clone().requires_grad_() for x in (k, v)]
    for x in poisoned:
        x.data[0, unseen] = float("nan")
    for a, b in zip(first, run(*poisoned)):
        assert torch.equal(a, b)
    assert all((x[0, unseen] == 0).all() for x in first[2:])


def test_which_lists_are_compacted():
    def asked(q_block=64, kv_block=1, list_heads=2, heads=16, causal=False, backward=False, **fields):
        blocks = lists((1, list_heads, 3), 8, q_block, kv_block, "cpu")
        blocks = BlockLists(blocks.counts, blocks.indices, q_block, kv_block, num_kv_blocks=8, **fields)
        where = routing.Where("cuda", (9, 0), False, torch.float16, 64)
        problem = routing.Problem(where, heads, 2, causal, routing.PatternFacts.of(blocks))
        return problem.compacts(backward)

    assert asked() and asked(list_heads=1) and asked(kv_block=15), "512 rows share a list"
    assert not asked(q_block=63) and not asked(list_heads=16), "rows are too few for the copies to pay"
    assert asked(q_block=1, backward=True), "gradients of single keys have no other good way"
    assert not asked(kv_block=16) and not asked(causal=True) and not asked(causal=True, backward=True)
    assert not asked(kv_lengths=torch.zeros(8, dtype=torch.int32))
