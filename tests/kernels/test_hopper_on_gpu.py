"""The Hopper kernels on a GPU, forward and backward, dQ deterministic and not: awkward sizes and views, long sequences, the same bits."""

from functools import partial
from pathlib import Path

import pytest
import torch
from cases import LEVELS, levels, ragged
from oracles import assert_as_exact_as_torch, attention_by

from ssta.kernels import BlockLists, PatternFacts, block_sparse_attention, choose_route
from ssta.kernels.reference import reference_attention

pytestmark = pytest.mark.gpu
BENCHMARK = Path(__file__).parent.parent.parent / "benchmark"
orders = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "non-deterministic"])
dims = pytest.mark.parametrize("dim", [64, 128])
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
# Every kernel that is compiled takes seconds, and dtype and head_dim have nothing to do with one another: not all pairs everywhere.
both = pytest.mark.parametrize("dim, dtype", [(64, torch.float16), (128, torch.bfloat16)], ids=["64 fp16", "128 bf16"])
# Neither a block nor the sum is a multiple of 16 or of 64; one block is empty, one short, one just longer than two tiles of 128.
LENGTHS = [384, 131, 0, 333, 257, 7, 200]
HEADS, KV_HEADS = 6, 2


# The forward's programs as they are where there are many, and where there are few. On a real number these tests would have few.
programs = pytest.mark.parametrize("processors", [1, 1 << 20], ids=["large programs", "small programs"])


def attention(blocks, processors, deterministic=True, causal=False):
    """On so many multiprocessors, with the gradients of impl="hopper"."""
    def attend(q, k, v):
        from ssta.kernels.hopper.forward import hopper_forward

        route = choose_route("hopper", q.device, q.dtype, q.shape[3], PatternFacts.of(blocks), heads=q.shape[1], kv_heads=k.shape[1],
                             causal=causal, deterministic=deterministic)
        return attention_by(partial(hopper_forward, processors=processors), lambda *of: route.run_backward(*of, deterministic), blocks,
                            q.shape[3]**-0.5, causal)(q, k, v)

    return attend


def fused(batch, tokens, dim, dtype):
    """q, k and v as a projection leaves them: views into one [B, S, heads, D], every row of which also holds what is nobody's."""
    width = HEADS + 2 * KV_HEADS + 1
    qkv = torch.randn(batch, tokens, width, dim, device="cuda", dtype=dtype).transpose(1, 2)
    return qkv[:, :HEADS], qkv[:, HEADS:HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS:-1]


def some(*shape):
    return torch.rand(shape, device="cuda") < 0.6


def lists(kind):
    """Lists of every kind of sharing over blocks of LENGTHS; of two batch elements the second has shorter blocks."""
    offsets, number = ragged(LENGTHS, "cuda"), len(LENGTHS)
    valid = torch.tensor([LENGTHS, [max(n - 129, 0) for n in LENGTHS]], device="cuda", dtype=torch.int32)[:, None]
    shape = {"shared": (1, 1), "per batch element": (2, 1), "per head": (2, HEADS), "per key head": (1, KV_HEADS)}[kind]
    lengths = dict(q_lengths=valid, kv_lengths=valid) if kind == "per batch element" else {}
    return BlockLists.from_mask(some(*shape, number, number), offsets, offsets, **lengths)


@orders
@dims
@dtypes
@pytest.mark.parametrize("kind", ["shared", "per batch element", "per head", "per key head"])
@programs
def test_views_into_a_batch_of_two_with_ragged_blocks(kind, dtype, dim, deterministic, processors):
    blocks = lists(kind)
    q, k, v = fused(2, sum(LENGTHS), dim, dtype)
    assert_as_exact_as_torch(attention(blocks, processors, deterministic), q, k, v, blocks, block=64)


@both
@pytest.mark.parametrize("kind", ["per batch element", "per key head"])
def test_short_blocks_of_which_several_fill_a_chunk(kind, dtype, dim, monkeypatch):
    """As the tiles of a canvas are that ends within some of them."""
    monkeypatch.setitem(globals(), "LENGTHS", [64, 16, 8, 0, 64, 48, 3, 32, 64, 30, 17, 64, 1, 16, 16, 63, 64, 64, 24, 44] * 2)
    blocks = lists(kind)
    q, k, v = fused(2, sum(LENGTHS), dim, dtype)
    assert_as_exact_as_torch(partial(block_sparse_attention, blocks=blocks, return_lse=True, impl="hopper"), q, k, v, blocks, block=64)


@both
@pytest.mark.parametrize("lengths", [120, 360, [126] * 9 + [42, 126, 77], [60] * 9 + [30, 60, 9]], ids=str)
@programs
def test_blocks_a_little_shorter_than_a_step(lengths, dtype, dim, processors):
    """Equal ones fill the step of every chunk equally; NaN in the blocks right behind them stays out."""
    cut = lengths if isinstance(lengths, int) else ragged(lengths, "cuda")
    bounds = torch.tensor([0] + ([lengths] * 11 + [lengths // 2] if isinstance(lengths, int) else lengths)).cumsum(0).tolist()
    mask = some(1, HEADS, 12, 12)
    mask[..., 0, 1], mask[..., 0, 0] = False, True
    blocks = BlockLists.from_mask(mask, cut, cut)
    q, k, v = fused(1, bounds[-1], dim, dtype)
    attend = attention(blocks, processors)
    assert_as_exact_as_torch(attend, q, k, v, blocks, block=64)
    before = attend(q, k, v)
    k[:, :, bounds[1]:bounds[2]] = v[:, :, bounds[1]:bounds[2]] = float("nan")
    after = attend(q, k, v)
    for row in range(12):
        rows = slice(bounds[row], bounds[row + 1])
        for head in range(HEADS):
            for old, new in zip(before, after):
                assert new[:, head, rows].isnan().all() if mask[0, head, row, 1] else torch.equal(new[:, head, rows], old[:, head, rows])


@orders
@both
@pytest.mark.parametrize("sizes", [(100, 100), (192, 384)], ids=str)
@programs
def test_lengths_that_are_no_multiples(sizes, dtype, dim, deterministic, processors):
    """Uniform blocks whose last one is partial, on either side; more keys than queries and the other way round."""
    for q_len, kv_len in ((1201, 777), (505, 1313)):
        mask = some(2, 1, -(-q_len // sizes[0]), -(-kv_len // sizes[1]))
        blocks = BlockLists.from_mask(mask, *sizes)
        q, k, v = (torch.randn(2, heads, tokens, dim, device="cuda", dtype=dtype)
                   for heads, tokens in ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len)))
        assert_as_exact_as_torch(attention(blocks, processors, deterministic), q, k, v, blocks, block=64)


@orders
@both
@pytest.mark.parametrize("kind", ["shared", "per batch element", "per key head"])
def test_causal_order(kind, dtype, dim, deterministic):
    """Over ragged blocks, and over uniform ones with more keys than queries and the other way round."""
    blocks = lists(kind)
    q, k, v = fused(2, sum(LENGTHS), dim, dtype)
    uniform = [torch.randn(2, heads, tokens, dim, device="cuda", dtype=dtype) for tokens in (1201, 777) for heads in (HEADS, KV_HEADS)]
    cases = [(q, k, v, blocks)]
    for (many, few), (q_len, kv_len) in (((0, 3), (1201, 777)), ((2, 1), (777, 1201))):
        mask = some(1, HEADS, -(-q_len // 192), -(-kv_len // 384))
        cases.append((uniform[many], uniform[few], uniform[few].flip(2), BlockLists.from_mask(mask, 192, 384)))
    for q, k, v, blocks in cases:
        attend = partial(block_sparse_attention, blocks=blocks, causal=True, return_lse=True, deterministic=deterministic, impl="hopper")
        assert_as_exact_as_torch(attend, q, k, v, blocks, causal=True, block=64)


@dims
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("factor", [1, 3, 10])
@programs
def test_long_queries_and_keys(factor, causal, dim, processors):
    """One key in 50 is ten times as long as that."""
    blocks = lists("per head")
    q, k, v = fused(2, sum(LENGTHS), dim, torch.bfloat16)
    q, k = q * factor, k * factor
    k[:, :, ::50] *= 10
    attend = attention(blocks, processors, causal=causal)
    # A row that is about one key has the weight 1 in eager torch, which is exact; measured from another origin than its maximum it has to
    # be rounded, and dq of such rows is a difference that nearly cancels.
    assert_as_exact_as_torch(attend, q, k, v, blocks, causal=causal, block=64, slack=1.5 if factor == 10 else 1.0)


@dtypes
@pytest.mark.parametrize("name", LEVELS)
@programs
def test_scores_far_above_those_of_the_first_chunk(name, dtype, processors):
    """Where weights overflow, programs walk over their lists again."""
    q, k, v, blocks = levels(*LEVELS[name], device="cuda", dtype=dtype)
    found = attention(blocks, processors)(q, k, v)
    exact = reference_attention(q.double(), k.double(), v.double(), blocks, 0.125)
    for got, right in zip(found, exact):
        torch.testing.assert_close(got.double(), right, rtol=2e-2 if got is found[0] else 1e-4, atol=2e-2 if got is found[0] else 1e-3)


@programs
def test_a_row_that_overflows_changes_no_bits_of_its_neighbours(processors):
    """Though their warpgroups walk again, too; many programs, of which some do."""
    q, k, v = (torch.randn(1, 16, 3840, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    blocks = BlockLists.from_mask(some(1, 16, 10, 10), 384, 384)
    attend = attention(blocks, processors)
    before, _ = attend(q, k, v)
    spoiled = torch.rand(q.shape[:3], device="cuda") < 1e-3
    for factor in (1e4, float("nan")):
        after, _ = attend(torch.where(spoiled[..., None], q * factor, q), k, v)
        assert torch.equal(after[~spoiled], before[~spoiled])
        assert factor != 1e4 or after[spoiled].isfinite().all()


def gradients(q, k, v, dout, blocks, deterministic):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = block_sparse_attention(*leaves, blocks, deterministic=deterministic, impl="hopper")
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@both
def test_the_same_bits_in_every_run(dim, dtype):
    """With several programs on every multiprocessor, which meet in another way each time."""
    tokens, block = 12_345, 384
    q, k, v, dout = (torch.randn(2, heads, tokens, dim, device="cuda", dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    number = -(-tokens // block)
    blocks = BlockLists.from_mask(some(2, HEADS, number, number), block, block)
    first = gradients(q, k, v, dout, blocks, True)
    for _ in range(4):
        assert all(map(torch.equal, gradients(q, k, v, dout, blocks, True), first))


def test_the_same_bits_where_dq_exceeds_the_cache():
    """46,080 tokens of 16 heads: sums of 377 MB, millions of additions, more than an order that holds only mostly would survive."""
    tokens, block = 46_080, 384
    q, k, v, dout = (torch.randn(1, 16, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    chosen = torch.rand(1, 16, tokens // block, tokens // block, device="cuda").topk(48).indices.int()
    blocks = BlockLists.from_topk(chosen, block, block)
    first = gradients(q, k, v, dout, blocks, True)
    for _ in range(20):
        assert all(map(torch.equal, gradients(q, k, v, dout, blocks, True), first))


def test_300_000_tokens_in_heads_beyond_32_bit_offsets(monkeypatch):
    """q has 2.2 thousand million elements. Sampled blocks of out and of all gradients against float64, one in the last head."""
    monkeypatch.syspath_prepend(BENCHMARK)
    from truth import truth

    heads, tokens, dim, block, kept = 57, 300_000, 128, 384, 6
    assert heads * tokens * dim > 1 << 31 and tokens % block
    q, k, v, dout = (torch.randn(1, tokens, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    number = -(-tokens // block)
    chosen = torch.rand(heads, number, number, device="cuda").topk(kept).indices
    blocks = BlockLists.from_topk(chosen, block, block, num_kv_blocks=number)
    exact = truth(q, k, v, blocks, dout)
    for deterministic in (True, False):
        out, *grads = gradients(q, k, v, dout, blocks, deterministic)
        exact.forward_error("hopper", out)
        exact.backward_error(f"hopper, deterministic={deterministic}", grads)
        del out, grads
