"""Every implementation of a step that moves or chooses gives what plain torch gives: in Triton's interpreter without a GPU, and on one.

The same of what is not selected is in test_estimate.py and test_estimate_backward.py.
"""

import pytest
import torch
from backend_rows import DEVICE, backend_of, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from ssta import DenseRun, TokenLayout, VideoGrid, tile_layout
from ssta.kernels.eager.ranking import topk_blocks
from ssta.kernels.prologue.projection import Move
from ssta.scoring import descriptors
from ssta.text import tile_places

LAYOUT = TokenLayout((VideoGrid(3, 5, 4), DenseRun(7), VideoGrid(2, 3, 3)))
DTYPES = [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def projected(heads, tokens, dim, dtype=torch.float16, batch=2):
    """[B, H, S, D] as a projection leaves it: the heads of a token side by side."""
    return torch.randn(batch, tokens, heads, dim).to(DEVICE, dtype).transpose(1, 2)


def both(row, dtype=torch.float16, dim=64):
    """(the row's steps, plain torch's)"""
    return backend_of(row, dtype, dim), backend_of("torch", dtype, dim)


def same(got, expected):
    """The same bits in the same memory order."""
    assert torch.equal(got, expected) and got.stride() == expected.stride() and got.dtype == expected.dtype


@rows
@dtypes
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dim", [20, 64])
def test_taken_tokens_are_those_of_the_index(row, dim, contiguous, dtype):
    x = projected(3, 50, dim, dtype)
    x = x.contiguous() if contiguous else x
    index = torch.randint(-1, 50, (77,), device=DEVICE)
    steps, plain = both(row, dtype, dim)
    taken = steps.take(x, index)
    same(taken, plain.take(x, index))
    assert torch.equal(taken, torch.stack([x[:, :, i] if i >= 0 else 0 * x[:, :, 0] for i in index.tolist()], 2))


@rows
def test_strange_strides_and_no_tokens_at_all(row):
    x = projected(2, 9, 16)
    index = torch.tensor([8, -1, 0], device=DEVICE)
    steps, plain = both(row, dim=16)
    for view in (x[..., ::2], x.flip(2)[:, :, 3:], x[:, :1].expand(-1, 4, -1, -1), x.permute(0, 1, 3, 2)[:, :, :9, :9]):
        inside = index.clamp(max=view.shape[2] - 1)
        assert torch.equal(steps.take(view, inside), plain.take(view, inside))
    assert steps.take(x, index[:0]).shape == (2, 2, 0, 16) and steps.take(x[:0], index).shape == (0, 2, 3, 16)


@rows
@dtypes
@pytest.mark.parametrize("padding", ["none", "zero", "repeat"])
def test_gathered_blocks_are_the_tokens_of_each_and_their_means(row, padding, dtype):
    """Of one order, and of two: keys of another sequence than the queries'."""
    heads, kv_heads = (2, 2) if dtype == torch.float32 else (4, 1)
    q, k, v = (projected(h, LAYOUT.length, 24, dtype) for h in (heads, kv_heads, kv_heads))
    k = k.contiguous()
    steps, plain = both(row, dtype, 24)
    layout, other = tile_layout(LAYOUT, (2, 2, 3), padding, DEVICE), tile_layout(LAYOUT, (3, 2, 2), padding, DEVICE)
    for kv_layout in (layout, other):
        *tiled, q_means, k_means = steps.gather(q, k, v, layout.move, kv_layout.move)
        for out, expected in zip(tiled, plain.gather(q, k, v, layout.move, kv_layout.move)):
            same(out, expected)
        for mean, out, of in ((q_means, tiled[0], layout), (k_means, tiled[1], kv_layout)):
            exact = descriptors(out.double(), of)
            # Rounded to dtype, after a float32 sum of at most 12 tokens.
            rounding = torch.finfo(dtype).eps * exact.abs().max() + 12 * torch.finfo(torch.float32).eps * out.abs().max()
            assert mean.dtype == torch.float32 and (mean - exact).abs().max() <= rounding
            assert torch.equal(mean, mean.to(dtype).float()), "rounded to the dtype of the tokens"
        for alone, means, x, of in ((tiled[0], q_means, q, layout), (tiled[1], k_means, k, kv_layout)):
            out, found = steps.gather_one(x, of.move)
            same(out, alone)
            same(found, means)
    *tiled, q_means, k_means = steps.gather(q, k, v, layout.move, layout.move)
    # Somewhere in the middle of what is others'.
    around = [x.new_zeros(*x.shape[:2], 5 + x.shape[2], x.shape[3]) for x in tiled[1:]]
    places = [x[:, :, 2:-3] for x in around]
    for out, expected in zip((*steps.gather_into(q, k, v, layout.move, *places), *places), (tiled[0], q_means, k_means, *tiled[1:])):
        assert out is expected is None or torch.equal(out, expected)
    assert not any(x[:, :, :2].any() or x[:, :, -3:].any() for x in around)


@rows
def test_blocks_without_means_and_without_tokens(row):
    steps, plain = both(row, dim=16)
    x = projected(2, 9, 16)
    move = Move(torch.tensor([8, -1, 0], device=DEVICE), torch.tensor([0, 0, 2, 3], dtype=torch.int32, device=DEVICE), 0)
    *tiled, q_means, k_means = steps.gather(x, x, x, move, move)
    for got, expected in zip(tiled, plain.gather(x, x, x, move, move)):
        same(got, expected)
    assert q_means.shape == k_means.shape == (2, 2, 0, 16)
    assert [part.shape for part in steps.gather(x[:0], x[:0], x[:0], move, move)[:3]] == [(0, 2, 3, 16)] * 3


@rows
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("blocks, keys, width", [(37, 37, 20), (1, 1, 8), (5, 5, 150), (6, 17, 16)])
@pytest.mark.parametrize("lambda_", [None, 0.7])
def test_scores_are_those_of_the_definition(row, heads, kv_heads, blocks, keys, width, lambda_):
    q, k = torch.randn(2, heads, blocks, width, device=DEVICE), torch.randn(2, kv_heads, keys, width, device=DEVICE)
    if blocks > 4:
        q[0, 0, 2], k[0, 1, 0, 3], k[1, 0, 4] = float("nan"), float("inf"), 0.0
        k[0, 0, 3] = k[0, 0, 1]
    steps, plain = both(row)
    scores = steps.score(q, k, lambda_)
    # Sums of up to 150 products, as plain torch adds them up and as the kernel does.
    exact = plain.score(q.double(), k.double(), lambda_).double()
    error = (plain.score(q, k, lambda_).double() - exact).nan_to_num(0).abs().max()
    assert torch.equal(scores.isneginf(), exact.isneginf())
    assert (scores.double() - exact).nan_to_num(0).abs().max() <= 2 * error + 1e-6 * exact.nan_to_num(0, 0, 0).abs().max()
    if blocks > 4:
        assert torch.equal(scores[0, 0, :, 3], scores[0, 0, :, 1]), "alike blocks tie"


@rows
@settings(max_examples=15)
@given(scored=st.integers(1, 6), keys=st.integers(1, 6), dense=st.integers(0, 2), masked=st.booleans(), seed=st.integers(0, 1000),
       room=st.integers(1, 8))
@pytest.mark.slow
def test_selected_blocks_are_the_best_and_the_forced(row, scored, keys, dense, masked, seed, room):
    """Scores with many ties, among them infinities, NaN and both zeros; where keys have blocks of their own, and lists room for fewer."""
    generator = torch.Generator().manual_seed(seed)
    keys = scored if masked else keys
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1.5, torch.inf, torch.nan])
    scores = values[torch.randint(0, 7, (1, 2, scored, keys), generator=generator)].to(DEVICE)
    forced = torch.rand(scored + dense, keys + dense, generator=generator).to(DEVICE) < 0.3
    active = torch.rand(1, scored + dense, generator=generator).to(DEVICE) < 0.7 if masked else None
    per_row = torch.randint(0, keys + 1, (1, 2, scored), generator=generator, dtype=torch.int32).to(DEVICE)
    shared = per_row[:, :1].contiguous()
    number = seed % (keys + 1)
    steps, plain = both(row)
    for given_scores, k_per_row, beyond in ((scores, number, False), (scores, per_row, False), (None, 0, False),
                                            (scores, number, True), (scores, per_row, True), (scores, shared, True)):
        counts, indices = steps.select(forced, given_scores, k_per_row, active, beyond, room)
        expected = plain.select(forced, given_scores, k_per_row, active, beyond, room)
        assert counts.dtype == indices.dtype == torch.int32 and torch.equal(counts, expected[0])
        assert indices.shape[-1] == room and counts.max() <= room
        filled = torch.arange(room, device=DEVICE) < counts[..., None]
        assert torch.equal(indices[filled], expected[1][filled])


def test_best_blocks_rank_nan_below_everything_but_minus_infinity():
    best, scores = topk_blocks, torch.tensor([[float("nan"), -1.0, -torch.inf, 2.0]])
    assert best(scores, 2).tolist() == [[False, True, False, True]]
    assert best(scores, torch.tensor([3])).tolist() == [[True, True, False, True]], "of equal scores the first"
    apart = torch.tensor([False, True, False, True])
    assert best(scores, 1, apart).tolist() == [[True, False, False, False]]
    assert best(scores, 4, apart).tolist() == [[True, False, True, False]]


@rows
@pytest.mark.parametrize("tokens", [LAYOUT, TokenLayout.video_text((3, 4, 4), 11),
                                    TokenLayout((DenseRun(5), VideoGrid(1, 2, 2), DenseRun(1100)))])
def test_valid_lengths_are_those_of_each_runs_valid_tokens(row, tokens):
    layout = tile_layout(tokens, (2, 2, 3), "none", DEVICE)
    places = tile_places(layout)
    valid = torch.rand(3, tokens.dense_length, 2, device=DEVICE)[..., 1] < 0.6
    valid[1], valid[2] = False, True
    steps, plain = both(row)
    for least in (1, 0):
        out = steps.valid_lengths(valid, *places, layout.lengths, least)
        same(out, plain.valid_lengths(valid, *places, layout.lengths, least))
    for batch, mask in enumerate(valid.tolist()):
        left, lengths_of = [sum(mask[:run.length]) for run in tokens.dense[:1]] + [sum(mask[-run.length:]) for run in tokens.dense[1:]], []
        for count, run in zip(left, layout.dense):
            for first in range(0, run.extent[2], run.tile[2]):
                lengths_of.append(max(0, min(count - first, run.tile[2], run.extent[2] - first)))
        assert out[batch, 0].tolist() == layout.lengths[:layout.num_video_tiles].tolist() + lengths_of


@pytest.mark.gpu
@rows
@pytest.mark.parametrize("tokens", [(7, 9, 20), (31, 45, 80)])
def test_real_sizes_on_a_gpu(row, tokens):
    layout = tile_layout(TokenLayout.video_text(tokens, 300), (6, 8, 8), "zero", DEVICE)
    q, k, v = (projected(2, layout.tokens.length, 128, torch.bfloat16, batch=1) for _ in range(3))
    steps, plain = both(row, torch.bfloat16, 128)
    *tiled, q_means, k_means = steps.gather(q, k, v, layout.move, layout.move)
    for x, out in zip((q, k, v), tiled):
        same(out, plain.take(x, layout.source))
        assert torch.equal(steps.take(out, layout.inverse), x)
    scores = steps.score(q_means, k_means, 0.7)
    torch.testing.assert_close(scores, plain.score(q_means, k_means, 0.7), atol=1e-5, rtol=1e-5)
    n = layout.num_video_tiles
    forced = torch.zeros(layout.num_tiles, layout.num_tiles, dtype=torch.bool, device=DEVICE)
    forced[:n, :n] = torch.rand(n, n, device=DEVICE) < 0.1
    counts = torch.randint(0, n // 2, scores.shape[:3], device=DEVICE, dtype=torch.int32)
    for k_per_row, beyond in ((20, False), (counts, True)):
        found, expected = (by.select(forced, scores, k_per_row, None, beyond, forced.shape[1]) for by in (steps, plain))
        filled = torch.arange(layout.num_tiles, device=DEVICE) < found[0][..., None]
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1][filled], expected[1][filled])
