"""Queries of one sequence to the keys of another: against the definition in float64, pair by pair of tokens."""

from dataclasses import replace

import pytest
import ssta_oracle as oracle
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, ssta_attention
from ssta.attention import attend
from ssta.config import in_effect

# (queries' segments, keys' segments): new frames to a first frame, cached frames, themselves and text, and less usual ones.
SEQUENCES = [
    ([(2, 4, 6)], [(1, 4, 6), (3, 4, 6), (2, 4, 6), 7]),
    ([(2, 4, 6), 5], [(3, 4, 6), (2, 4, 6), 5]),
    ([(2, 3, 5)], [(2, 3, 5), 4]),
    ([(2, 3, 5), (1, 4, 4)], [(4, 3, 5), (1, 4, 4)]),
    ([(1, 4, 4), (2, 3, 5)], [(2, 3, 5)]),
    ([(2, 3, 5)], [6]),
    ([9], [(2, 3, 5), 4]),
]


def layout_of(parts):
    return TokenLayout(tuple(DenseRun(part) if isinstance(part, int) else VideoGrid(*part) for part in parts))


def selected_tiles(q, k, parts, kv_parts, config):
    """(tiles, keys' tiles, bool [B, H, T, T'], whether no decision is close); window, budget and density by the oracle's loops."""
    (tiles, n), (kv_tiles, m) = (oracle.tiles_of(of, config.tile_thw, "none") for of in (parts, kv_parts))
    grids, kv_grids = ([part for part in of if not isinstance(part, int)] for of in (parts, kv_parts))
    # From the last one backwards, grids of the same size are the same.
    shift = len(kv_grids) - len(grids)
    same = {i: shift + i for i, grid in enumerate(grids) if shift + i >= 0 and kv_grids[shift + i] == grid}
    windows = {} if config.selected_by == "block_attn" else same
    window = [[a.grid in windows and oracle.in_window(replace(a, grid=windows[a.grid]), b, config.window) for b in kv_tiles[:m]]
              for a in tiles[:n]]
    mask, clear = torch.ones(*q.shape[:2], len(tiles), len(kv_tiles), dtype=torch.bool), True
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = [oracle.descriptor(k[b, h // group], tile, None) for tile in kv_tiles[:m]]
            scores = [[float(oracle.descriptor(q[b, h], tile, None) @ key) for key in keys] for tile in tiles[:n]]
            kept = [list(row) for row in window]
            if n and m and config.density is not None:
                kept, margin = oracle.best_beyond(scores, window, oracle.spread_over_rows(window, config.density)[0])
                clear = clear and margin > 1e-6
            elif n and m and config.selected_by != "sta":
                for row, of in zip(kept, scores):
                    chosen, margin, _ = oracle.budget_of(of, config.row_topk, 0.0)
                    clear = clear and margin > 1e-6
                    for place in chosen:
                        row[place] = True
            if n and m:
                mask[b, h, :n, :m] = torch.tensor(kept)
    return tiles, kv_tiles, mask, clear


def dense(q, k, v, tiles, kv_tiles, mask, valid):
    """Softmax over the tokens of the selected tiles, those of text that is valid; float64, differentiable."""
    of_token = [torch.empty(x.shape[2], dtype=torch.int64) for x in (q, k)]
    for places, own in zip(of_token, (tiles, kv_tiles)):
        for number, tile in enumerate(own):
            places[list(tile.slots)] = number
    seen = mask[:, :, of_token[0]][..., of_token[1]] & valid[:, None, None]
    group = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


@settings(max_examples=40)
@given(st.sampled_from(SEQUENCES), st.sampled_from([dict(topk=2), dict(topk=9), dict(density=0.3), dict(density=0.7), dict(density=1.0)]),
       st.sampled_from(["ssta", "block_attn", "sta"]), st.sampled_from([(1, 1, 1), (3, 3, 3)]), st.sampled_from([(1, 2, 3), (2, 2, 2)]),
       st.booleans(), st.booleans(), st.integers(0, 1000))
def test_it_is_the_definition_with_its_gradients(sequences, budget, sparse_type, kernel_thw, tile_thw, grouped, masked, seed):
    assume(sparse_type != "sta" or "topk" in budget)
    parts, kv_parts = sequences
    layout, kv_layout = layout_of(parts), layout_of(kv_parts)
    kernel_thw, topk, _ = in_effect(kernel_thw, budget.get("topk"), 0.0, sparse_type)
    config = SSTAConfig(tile_thw=tile_thw, kernel_thw=kernel_thw, sparse_type=sparse_type, **budget | dict(topk=topk))
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, length, 4, dtype=torch.float64, generator=generator).requires_grad_()
               for heads, length in ((2, layout.length), (1 if grouped else 2, kv_layout.length), (1 if grouped else 2, kv_layout.length)))
    text, valid, text_mask = kv_layout.dense_length, torch.ones(2, kv_layout.length, dtype=torch.bool), None
    # Text, where there is any, is the last or the only segment of the keys.
    if masked and text and kv_layout.video:
        text_mask = torch.arange(text) < torch.tensor([[text - 2], [0]])
        valid[:, -text:] = text_mask
    tiles, kv_tiles, mask, clear = selected_tiles(q.detach(), k.detach(), parts, kv_parts, config)
    assume(clear and mask.any(-1).all())
    call = dict(kv_layout=kv_layout, text_mask=text_mask)
    out, blocks = ssta_attention(q, k, v, layout, config, return_blocks=True, **call)
    assert torch.equal(blocks.to_mask().expand_as(mask), mask)
    expected = dense(q, k, v, tiles, kv_tiles, mask, valid)
    real = expected.isfinite().all(-1, keepdim=True)  # rows whose tiles have no valid token give zeros
    expected = expected.where(real, 0)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    if not real.all():
        return
    weight = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    for got, wanted in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), torch.autograd.grad((expected * weight).sum(), (q, k, v))):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        assert torch.equal(ssta_attention(q, k, v, layout, config, **call), out)


@pytest.mark.parametrize("density", [0.25, 0.5, 0.8])
def test_density_counts_pairs_with_all_tiles_of_the_keys(density):
    layout, kv_layout = layout_of([(2, 8, 8)]), layout_of([(4, 8, 8), (2, 8, 8), 5])
    q, k = torch.randn(1, 2, layout.length, 8), torch.randn(1, 2, kv_layout.length, 8)
    config = SSTAConfig(tile_thw=(1, 2, 2), kernel_thw=(1, 1, 3), density=density)
    _, blocks = ssta_attention(q, k, k, layout, config, kv_layout=kv_layout, return_blocks=True)
    mask = blocks.to_mask()
    videos = 6 * 16
    assert mask[..., videos:].all() and float(mask[..., :videos].float().mean()) == pytest.approx(density, abs=0.5 / videos)


def test_the_same_sequence_said_twice_is_one():
    layout, config = layout_of([(2, 4, 6), 5]), SSTAConfig(tile_thw=(1, 2, 3), topk=2, pad_type="zero")
    q, k, v = torch.randn(3, 1, 2, layout.length, 8).unbind()
    again = layout_of([(2, 4, 6), 5])
    assert torch.equal(ssta_attention(q, k, v, layout, config, kv_layout=again), ssta_attention(q, k, v, layout, config))


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_not_selected_is_estimated(parts):
    """Where all is selected nothing is left to estimate. The kernels compute what plain torch does, with its gradients."""
    layout, kv_layout = layout_of([(2, 4, 6), 5]), layout_of([(3, 4, 6), (2, 4, 6), 5])
    q, k, v = (torch.randn(1, heads, of.length, 16, dtype=torch.float16)
               for heads, of in ((4, layout), (2, kv_layout), (2, kv_layout)))

    def call(q, k, v, topk, impl="torch"):
        config = SSTAConfig(tile_thw=(1, 2, 3), kernel_thw=(1, 1, 1), topk=topk, compensation="linear", compensation_parts=parts)
        return ssta_attention(q, k, v, layout, config, kv_layout=kv_layout, impl=impl)

    def dense(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    wide = [x.double() for x in (q, k, v)]
    torch.testing.assert_close(call(*wide, 1000), dense(*wide))
    # Of keys and values that are all the same every estimate is exact, also of two tokens' halves.
    same = [wide[0], *(x[:, :, :1].expand_as(x).contiguous() for x in wide[1:])]
    torch.testing.assert_close(call(*same, 2), dense(*same))
    assert not torch.allclose(call(*wide, 2), dense(*wide), atol=1e-3)
    if torch.cuda.is_available():
        return
    given = [x.requires_grad_() for x in (q, k, v)]
    out, wanted = call(*given, 2, "triton"), call(*given, 2)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=2**-7)
    for got, expected in zip(*(torch.autograd.grad(x.sum(), given) for x in (out, wanted))):
        torch.testing.assert_close(got, expected, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("compensation", ["none", "linear"])
def test_keys_that_a_mask_leaves_out_have_a_gradient_of_zero(compensation):
    """Not what lay in its memory before: no kernel writes there."""
    layout, kv_layout = layout_of([(1, 2, 3), 5]), layout_of([(2, 2, 3), 5])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 1, of.length, 16, dtype=torch.float16, device=device, requires_grad=True)
               for of in (layout, kv_layout, kv_layout))
    config = SSTAConfig(tile_thw=(1, 2, 2), topk=1, compensation=compensation)
    mask, grads = torch.tensor([[1, 1, 0, 0, 0]], device=device), []
    for impl in ("triton", "torch"):
        out = ssta_attention(q, k, v, layout, config, kv_layout=kv_layout, text_mask=mask, impl=impl)
        grads.append(torch.autograd.grad(out.sum(), (q, k, v)))
    assert all(not x[:, :, -3:].any() for x in grads[0][1:])
    for got, expected in zip(*grads):
        torch.testing.assert_close(got, expected, rtol=2**-5, atol=2**-5)


@pytest.mark.slow
def test_in_one_graph_and_by_kernels():
    layout, kv_layout = layout_of([(2, 4, 6), 5]), layout_of([(3, 4, 6), (2, 4, 6), 5])
    config = SSTAConfig(tile_thw=(1, 2, 3), density=0.4)
    q, k, v = (torch.randn(1, 2, of.length, 16, dtype=torch.float16).requires_grad_() for of in (layout, kv_layout, kv_layout))

    def call(q, k, v, impl="torch"):
        return ssta_attention(q, k, v, layout, config, kv_layout=kv_layout, impl=impl, return_blocks=True)

    torch._dynamo.reset()
    traced, (out, blocks) = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v)
    assert torch.equal(traced[0], out) and torch.equal(traced[1].to_mask(), blocks.to_mask())
    expected = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(got, wanted) for got, wanted in zip(torch.autograd.grad(traced[0].sum(), (q, k, v)), expected))
    if not torch.cuda.is_available():
        by_kernels, lists = call(q, k, v, "triton")
        assert torch.equal(lists.to_mask(), blocks.to_mask())
        torch.testing.assert_close(by_kernels, out, rtol=2**-9, atol=2**-10)
        for got, wanted in zip(torch.autograd.grad(by_kernels.sum(), (q, k, v)), expected):
            torch.testing.assert_close(got, wanted, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("changes, tokens, kind, words", [
    (dict(pad_type="zero"), 24, ValueError, "pad_type must be 'none' where keys have a kv_layout of their own, got 'zero'"),
    ({}, 23, ValueError, "key must have the kv_layout's 24 tokens, got 23"),
])
def test_what_it_cannot_do_is_refused(changes, tokens, kind, words):
    q, k = torch.zeros(1, 1, 12, 4), torch.zeros(1, 1, tokens, 4)
    with pytest.raises(kind, match=words):
        attend(q, k, k, layout_of([(1, 3, 4)]), SSTAConfig(topk=1, **changes), kv_layout=layout_of([(2, 3, 4)]))
    with pytest.raises(TypeError, match="kv_layout must be a TokenLayout, got int"):
        attend(q, k, k, layout_of([(1, 3, 4)]), SSTAConfig(topk=1), kv_layout=24)
