"""Key blocks shorter than a tile: how their keys are read, and compacted copies of them against the keys themselves."""

from functools import partial

import pytest
import torch
from cases import INTERPRETED
from oracles import Functions, assert_as_exact_as_torch, attention_with_gradients

from ssta.interfaces.tokens import block_attention
from ssta.interfaces.tokens import blocks as short_blocks
from ssta.interfaces.tokens import compacted as copies
from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.device import DeviceLimits
from ssta.kernels.reference import reference_attention

DEVICES = [pytest.param("cuda" if torch.cuda.is_available() else "cpu", "triton", id="triton"),
           pytest.param("cuda", "auto", id="auto", marks=pytest.mark.gpu)]


def inputs(batch, heads, kv_heads, q_len, kv_len, dim, device):
    q = torch.randn(batch, q_len, heads, dim, device=device, dtype=torch.float16).transpose(1, 2)
    return q, *(torch.randn(batch, kv_heads, kv_len, dim, device=device, dtype=torch.float16) for _ in range(2))


def lists(shape, items, q_block, kv_block, device):
    kept = torch.rand(*shape, items, device=device) < 0.5
    kept[..., 1, :] = False  # a block that attends to nothing
    return BlockLists.from_mask(kept, q_block, kv_block)


def compacted(impl, blocks):
    """Attention with compacted keys forward and backward, however few rows share a list."""
    def attend(q, k, v):
        fields = blocks.counts, blocks.indices, blocks.q_offsets, blocks.kv_offsets
        return copies.compacted_attention(q, k, v, *fields, q.shape[3]**-0.5, True, impl)

    return attend


@pytest.mark.parametrize("device, impl", DEVICES)
@pytest.mark.parametrize("list_heads, parts, kv_block", [(1, "few", 1), (2, "one", 5), (2, "many", 1), (4, "few", 5), (4, "many", 1)])
@pytest.mark.slow
def test_against_float64_in_parts(device, impl, list_heads, parts, kv_block, monkeypatch):
    # All query blocks at once, two, one.
    monkeypatch.setattr(copies, "COPIES", {"one": 1 << 30, "few": 30_000 if device == "cpu" else 1_000_000, "many": 0}[parts])
    dim, q_block, kv_len = (64, 128, 143) if device == "cuda" else (16, 16, 23)
    blocks = lists((2, list_heads, 3), -(-kv_len // kv_block), q_block, kv_block, device)
    q, k, v = inputs(2, 4, 2, 2 * q_block + 5, kv_len, dim, device)
    assert_as_exact_as_torch(compacted(impl, blocks), q, k, v, blocks)


@pytest.mark.parametrize("device, impl", DEVICES)
def test_ids_out_of_range_are_absent(device, impl):
    indices = torch.tensor([[-1, 7, 3, 99], [50, -5, 60, 1 << 30]], device=device)
    q, k, v = inputs(1, 2, 1, 32, 20, 16 if device == "cpu" else 64, device)
    out, lse = compacted(impl, BlockLists.from_topk(indices, 16, 2))(q, k, v)
    seen = BlockLists.from_topk(torch.tensor([[7, 3]], device=device), 16, 2)
    expected, _ = compacted(impl, seen)(q[:, :, :16], k, v)
    assert torch.equal(out[:, :, :16], expected)
    assert (out[:, :, 16:] == 0).all() and (lse[:, :, 16:] == float("-inf")).all()


@pytest.mark.parametrize("device, impl", DEVICES)
def test_same_bits_twice_and_nothing_from_keys_that_are_not_listed(device, impl):
    blocks = lists((1, 2, 3), 40, 16, 1, device)
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 48, 40, 16 if device == "cpu" else 64, device))
    dout = torch.randn_like(q)

    def run(k, v):
        out, _ = compacted(impl, blocks)(q, k, v)
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


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU, so Triton's interpreter, which lowers the lists here, is off")
def test_hopper_attends_to_copies(late, monkeypatch):
    """Runs of copied keys as blocks; two heads share a run."""
    from hopper_emulator import run

    kept = torch.rand(1, 2, 3, 220) < 0.6
    kept[0, 1, 0] = False
    blocks = BlockLists.from_mask(kept, 64, 1)
    leaves = [x.requires_grad_() for x in inputs(1, 4, 2, 150, 220, 64, "cpu")]
    hopper = Functions(partial(run, "forward", causal=False, late=late), lambda *given: run("backward", *given, True, late=late))
    monkeypatch.setattr(copies, "choose_route", lambda *given, **facts: hopper)
    out, lse = compacted("hopper", blocks)(*leaves)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    attend = partial(reference_attention, blocks=blocks, scale=0.125, causal=False)
    exact = attention_with_gradients(attend, *(x.detach().double() for x in leaves), dout, dlse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-4, atol=1e-4)
    for got, right in zip((out, *grads), (exact[0], *exact[2:])):
        torch.testing.assert_close(got.double(), right, rtol=5e-3, atol=5e-3)


def test_how_short_key_blocks_are_read(monkeypatch):
    """On a GPU that has kernels, which need not be there."""
    monkeypatch.setattr(short_blocks, "choose_token_impl", lambda impl, device, dtype, dim: "torch" if dtype == torch.float32 else "triton")

    def read(q_block=64, kv_block=1, list_heads=2, impl="auto", differentiable=False, dtype=torch.float16, **fields):
        blocks = lists((1, list_heads, 3), 8, q_block, kv_block, "cpu")
        blocks = BlockLists(blocks.counts, blocks.indices, q_block, kv_block, num_kv_blocks=8, **fields)
        q, k = (torch.empty(1, heads, 3, 64, dtype=dtype, device="meta") for heads in (16, 2))
        return short_blocks.how_read(impl, q, k, blocks, differentiable)

    assert read() == read(list_heads=1) == read(kv_block=15) == read(impl="hopper") == "compacted", "512 rows share a list"
    assert read(q_block=63) == read(list_heads=16) == "gathered", "rows are too few for the copies to pay"
    assert read(q_block=1, differentiable=True) == "compacted", "gradients of single keys have no other good way"
    assert read(q_block=1, impl="hopper") == read(q_block=1, dtype=torch.float32) == "compacted", "no kernel gathers these"
    # Copies are made for uniform blocks.
    lengths = dict(kv_lengths=torch.zeros(8, dtype=torch.int32))
    assert read(**lengths) == "tiles" and read(q_block=1, **lengths) == "gathered"


@pytest.mark.parametrize("device, impl", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.slow
def test_short_blocks_against_float64_and_as_tiles(device, impl, causal):
    """The kernels of this floor, and the core's tiles, which are masked for the most part."""
    dim, q_block, kv_len = (64, 64, 143) if device == "cuda" else (16, 16, 23)
    blocks = lists((1, 2, 3), -(-kv_len // 3), q_block, 3, device)
    q, k, v = inputs(1, 4, 2, 2 * q_block + 5, kv_len, dim, device)
    assert_as_exact_as_torch(partial(block_attention, blocks=blocks, causal=causal, impl=impl), q, k, v, blocks, causal=causal)
    tiles = partial(block_sparse_attention, blocks=blocks, causal=causal, return_lse=True, impl=impl)
    assert_as_exact_as_torch(tiles, q, k, v, blocks, causal=causal)


@pytest.mark.parametrize("device, impl", DEVICES)
@pytest.mark.slow
def test_a_compiled_graph_gives_the_same_bits(device, impl):
    blocks = lists((1, 2, 3), 8, 16, 3, device)
    leaves = [x.requires_grad_() for x in inputs(1, 4, 2, 37, 23, 16 if device == "cpu" else 64, device)]
    results = []
    for attend in (block_attention, torch.compile(block_attention, backend="aot_eager", fullgraph=True)):
        out, lse = attend(*leaves, blocks, impl=impl)
        results.append([out, lse, *torch.autograd.grad(out.float().square().sum() + lse.clamp(min=-9).sum(), leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_blocks_of_any_length_are_checked_alike():
    blocks = lists((1, 2, 3), 8, 16, 3, "cpu")
    q, k, v = inputs(1, 4, 2, 37, 23, 16, "cpu")
    longer = torch.cat([k, k], 2)
    for attend in (block_attention, partial(block_sparse_attention, return_lse=True)):
        with pytest.raises(ValueError, match="blocks must have 16 kv blocks of 3 for 46 tokens, got 8"):
            attend(q, longer, longer, blocks, impl="triton")
        with pytest.raises(TypeError, match="causal must be a bool, got int"):
            attend(q, k, v, blocks, causal=1)
        with pytest.raises(ValueError, match="impl must be one of"):
            attend(q, k, v, blocks, impl="gathered")
    assert torch.equal(block_attention(q, k, v, blocks)[0], block_sparse_attention(q, k, v, blocks)), "plain torch has no tiles"


@pytest.mark.parametrize("limits", [
    DeviceLimits(227 << 10, tma=True, products="wgmma"), DeviceLimits(163 << 10, tma=False), DeviceLimits(99 << 10, tma=False)],
    ids=["hopper", "a100", "rtx"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_causal_order_among_listed_keys_takes_one_stage(head_dim, rows, limits):
    # With more, rows miss keys: tests/interfaces/test_flashinfer.py, test_a_causal_order_needs_one_stage.
    from ssta.interfaces.tokens.triton.config import gathered_config

    assert gathered_config(head_dim, rows, True, limits, ordered=True).num_stages == 1
