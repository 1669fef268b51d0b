"""ssta_3d_attention and ssta_attention end to end: against the definition, the laws, bad input, compilation, presets."""

import dataclasses

import pytest
import ssta_oracle as oracle
import torch
from hypothesis import assume, given, settings
from selection_cases import PADDINGS, Case, cases
from torch.nn.functional import scaled_dot_product_attention

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, explain, ssta_3d_attention, ssta_attention

NAN = float("nan")


def run(case, v):
    return ssta_attention(case.q, case.k, v, case.tokens, case.config, text_mask=case.text_mask)


@settings(max_examples=25)
@given(cases(dtypes=(torch.float64,)))
def test_attention_is_the_definition_with_its_gradients(case):
    v = torch.randn_like(case.k)
    selection = case.expected()
    assume(selection.clear)
    inputs = [x.clone().requires_grad_() for x in (case.q, case.k, v)]
    out = run(dataclasses.replace(case, q=inputs[0], k=inputs[1]), inputs[2])
    expected = oracle.attend(*inputs, selection)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(out)
    for got, wanted in zip(torch.autograd.grad((out * weight).sum(), inputs), torch.autograd.grad((expected * weight).sum(), inputs)):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@given(cases(dtypes=(torch.float64,)))
def test_everything_selected_without_padding_is_dense_attention(case):
    everything = dict(topk=1000) if case.config.density is None else dict(density=1.0)
    config = dataclasses.replace(case.config, pad_type="none", sparse_type="ssta", threshold=0.0, **everything)
    v = torch.randn_like(case.k)
    out = run(dataclasses.replace(case, config=config), v)
    mask = torch.ones(2, case.q.shape[2], dtype=torch.bool)
    if case.valid is not None:
        start = 0
        for segment in case.tokens.segments:
            if isinstance(segment, DenseRun):
                place = sum(isinstance(other, DenseRun) for other in case.tokens.segments[:case.tokens.segments.index(segment)])
                for b in range(2):
                    mask[b, start + case.valid[b][place]:start + segment.length] = False
            start += segment.length
    expected = scaled_dot_product_attention(case.q, case.k, v, attn_mask=mask[:, None, None], enable_gqa=True)
    expected = expected.masked_fill(~mask[:, None, :, None], 0)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@given(cases(dtypes=(torch.float32,)))
def test_memory_outside_the_sequence_cannot_matter(case):
    """q, k and v are cut out of larger tensors full of NaN, in the [B, S, H, D] order of model code."""
    v = torch.randn_like(case.k)
    expected = run(case, v)

    def inside_nan(x):
        big = torch.full((2, x.shape[2] + 4, x.shape[1], x.shape[3]), NAN)
        big[:, 2:-2] = x.transpose(1, 2)
        return big[:, 2:-2].transpose(1, 2)

    kept = [x.clone() for x in (case.q, case.k, v)]
    out = run(dataclasses.replace(case, q=inside_nan(case.q), k=inside_nan(case.k)), inside_nan(v))
    assert out.isfinite().all() and torch.equal(out, expected)
    assert all(torch.equal(x, before) for x, before in zip((case.q, case.k, v), kept)), "the caller's tensors are not written to"


@given(cases(dtypes=(torch.float32, torch.bfloat16)))
def test_a_batch_element_alone_is_the_same_as_in_a_batch(case):
    assume(case.expected().clear)
    v = torch.randn_like(case.k)
    together = run(case, v)
    for i in range(2):
        alone = Case(case.parts, case.config, case.q[i:i + 1], case.k[i:i + 1], case.valid and case.valid[i:i + 1])
        torch.testing.assert_close(run(alone, v[i:i + 1])[0], together[i], rtol=1e-2 if case.q.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@given(cases(dtypes=(torch.float32,)))
def test_the_same_call_gives_the_same_bits(case):
    v = torch.randn_like(case.k)
    assert torch.equal(run(case, v), run(case, v))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("sampling_type", ["similarity", "importance"])
def test_nan_stays_in_the_rows_that_attend_to_it(padding, sampling_type):
    """A NaN key in a far corner: only the rows whose window holds its tile, and dense rows, see it."""
    q, k, v = torch.randn(3, 1, 2, 6 * 6 * 6, 16).unbind()
    config = SSTAConfig(tile_thw=(2, 2, 2), kernel_thw=(1, 1, 1), topk=6, pad_type=padding, sampling_type=sampling_type)
    layout = TokenLayout.video_text((6, 6, 6))
    clean = ssta_attention(q, k, v, layout, config)
    grid = torch.arange(216).reshape(6, 6, 6)
    corner = grid[4:, 4:, 4:].flatten()
    others = torch.ones(216, dtype=torch.bool).index_fill(0, corner, False)
    for spoilt in (k, q):
        kept = spoilt[0, 1, corner[3]].clone()
        spoilt[0, 1, corner[3]] = NAN
        out = ssta_attention(q, k, v, layout, config)
        assert torch.equal(out[:, 0], clean[:, 0]), "the other head"
        assert out[:, :, others].isfinite().all()
        assert out[0, 1, corner[3] if spoilt is q else corner].isnan().all()
        spoilt[0, 1, corner[3]] = kept
    rest = [token for token in corner.tolist() if token != int(corner[3])]
    q[0, 1, corner[3]] = NAN
    assert ssta_attention(q, k, v, layout, config)[0, 1, rest].isfinite().all(), "the other rows of a tile with a NaN query"


def test_the_published_call_runs_unchanged():
    q, k, v = torch.randn(3, 2, 2, 4 * 8 * 9 + 256, 32).unbind()
    text_mask = torch.arange(256) < torch.tensor([[100], [256]])
    out = ssta_3d_attention(q, k, v, (4, 8, 9), topk=128, tile_thw=(4, 4, 4), kernel_thw=(3, 3, 3), text_len=256, sparse_type="ssta",
                            threshold=0.95, pad_type="zero", text_mask=text_mask).permute(0, 2, 1, 3)
    assert out.shape == (2, 4 * 8 * 9 + 256, 2, 32) and out.isfinite().all()


@pytest.mark.parametrize("thw, text_len", [((1, 6, 7), 3), ((2, 3, 4), 0), ((7, 9, 17), 30)])
def test_a_single_frame_and_axes_shorter_than_the_tile(thw, text_len):
    q, k, v = torch.randn(3, 1, 1, thw[0] * thw[1] * thw[2] + text_len, 16, dtype=torch.float64).unbind()
    out = ssta_3d_attention(q, k, v, thw, text_len=text_len)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v), rtol=1e-9, atol=1e-9)


def test_invalid_text_changes_nothing_without_padding():
    q, k, v = torch.randn(3, 2, 2, 2 * 4 * 4 + 20, 16).unbind()
    text_mask = (torch.arange(20) < torch.tensor([[13], [0]])).long()
    arguments = dict(thw=(2, 4, 4), text_len=20, tile_thw=(2, 2, 2), topk=2, text_mask=text_mask)
    expected = ssta_3d_attention(q, k, v, **arguments)
    invalid = torch.cat([torch.zeros(2, 32, dtype=torch.bool), text_mask == 0], 1)[:, None, :, None]
    poisoned = [x.masked_fill(invalid, NAN) for x in (q, k, v)]
    out = ssta_3d_attention(*poisoned, **arguments)
    assert torch.equal(out, expected)
    assert torch.equal(out.masked_select(invalid), torch.zeros(int(invalid.expand_as(out).sum())))


def test_segments_may_come_in_any_order():
    """[text, video] is [video, text] with the two exchanged."""
    video, text = 2 * 5 * 6, 11
    q, k, v = torch.randn(3, 1, 2, video + text, 16).unbind()
    config = SSTAConfig(tile_thw=(2, 2, 4), topk=2, kernel_thw=(1, 1, 1))
    first = ssta_attention(q, k, v, TokenLayout.video_text((2, 5, 6), text), config)
    swapped = [torch.cat([x[:, :, video:], x[:, :, :video]], 2) for x in (q, k, v)]
    second = ssta_attention(*swapped, TokenLayout((DenseRun(text), VideoGrid(2, 5, 6))), config)
    assert torch.equal(first, torch.cat([second[:, :, text:], second[:, :, :text]], 2))


def test_grids_share_one_budget():
    """All of the budget goes to the second grid when its keys are the alike ones."""
    layout = TokenLayout((VideoGrid(2, 4, 4), VideoGrid(2, 4, 4)))
    q, k = torch.ones(2, 1, 1, 64, 16).unbind()
    k = torch.cat([-k[:, :, :32], k[:, :, 32:]], 2)
    v = torch.cat([torch.full((1, 1, 32, 16), 5.0), torch.full((1, 1, 32, 16), 7.0)], 2)
    out = ssta_attention(q, k, v, layout, SSTAConfig(tile_thw=(2, 2, 2), topk=4, sparse_type="block_attn"))
    torch.testing.assert_close(out, torch.full_like(out, 7.0))


@pytest.mark.parametrize("padding", PADDINGS)
def test_gradients_by_finite_differences(padding):
    q, k, v = (torch.randn(1, 2, 12 + 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attention(q, k, v):
        return ssta_3d_attention(q, k, v, (2, 2, 3), topk=1, tile_thw=(2, 1, 2), kernel_thw=(1, 1, 1), text_len=3, pad_type=padding)

    assert torch.autograd.gradcheck(attention, (q, k, v))


VALID = dict(query=(2, 4, 40, 16), key=(2, 4, 40, 16), value=(2, 4, 40, 16), thw=(2, 4, 4), tile_thw=(2, 2, 2), text_len=8)


@pytest.mark.parametrize("changes, error, words", [
    ({"thw": (2, 4, 5)}, ValueError, r"thw must multiply to the 32 video tokens of query.*got \(2, 4, 5\) = 40"),
    ({"thw": (2, 4)}, ValueError, r"thw must have three entries \(t, h, w\), got 2"),
    ({"thw": (2, 4, 4.0)}, TypeError, r"thw\[2\] must be an int, got 4.0"),
    ({"thw": 32}, TypeError, "thw must be a tuple of three ints"),
    ({"text_len": 41}, ValueError, "text_len must be at most the sequence's 40 tokens, got 41"),
    ({"text_len": -1}, ValueError, "text_len must be at least 0, got -1"),
    ({"text_len": True}, TypeError, "text_len must be an int, got True"),
    ({"query": (4, 40, 16)}, ValueError, r"query must be \[batch, heads, tokens, head_dim\], got shape \(4, 40, 16\)"),
    ({"query": None}, TypeError, "query must be a tensor, got NoneType"),
    ({"key": (1, 4, 40, 16)}, ValueError, r"key must have query's batch 2 and head_dim 16, got shape \(1, 4, 40, 16\)"),
    ({"key": (2, 4, 40, 8)}, ValueError, "key must have query's batch 2 and head_dim 16"),
    ({"key": (2, 4, 39, 16)}, ValueError, "key must have the layout's 40 tokens, got 39"),
    ({"value": (2, 4, 41, 16)}, ValueError, "value must have the layout's 40 tokens, got 41"),
    ({"value": (2, 2, 40, 16)}, ValueError, r"value must have key's shape \(2, 4, 40, 16\), got \(2, 2, 40, 16\)"),
    ({"key": (2, 3, 40, 16), "value": (2, 3, 40, 16)}, ValueError, "query's heads must be a multiple of key's 3, got 4"),
    ({"key": torch.zeros(2, 4, 40, 16, dtype=torch.float64)}, TypeError, "key must have query's dtype torch.float32, got torch.float64"),
    ({"value": torch.zeros(2, 4, 40, 16, dtype=torch.int64)}, TypeError, "value must be a floating-point tensor, got torch.int64"),
    ({"value": torch.zeros(2, 4, 40, 16, device="meta")}, ValueError, "value must be on query's device cpu, got meta"),
    ({"tile_thw": (2, 0, 2)}, ValueError, r"tile_thw\[1\] must be at least 1, got 0"),
    ({"tile_thw": (2, 2, -2)}, ValueError, r"tile_thw\[2\] must be at least 1, got -2"),
    ({"tile_thw": (2, 2, True)}, TypeError, r"tile_thw\[2\] must be an int, got True"),
    ({"kernel_thw": (0, 3, 3)}, ValueError, r"kernel_thw\[0\] must be at least 1, got 0"),
    ({"kernel_thw": "333"}, TypeError, "kernel_thw must be a tuple of three ints"),
    ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
    ({"topk": 2.5}, TypeError, "topk must be an int, got 2.5"),
    ({"threshold": 1.0}, ValueError, r"threshold must lie in \[0, 1\), got 1.0"),
    ({"threshold": -0.1}, ValueError, r"threshold must lie in \[0, 1\), got -0.1"),
    ({"threshold": NAN}, ValueError, r"threshold must lie in \[0, 1\), got nan"),
    ({"threshold": "0.5"}, TypeError, "threshold must be a number, got '0.5'"),
    ({"threshold": 0.5, "sampling_type": "importance"}, ValueError, "threshold must be 0 with sampling_type 'importance'.*got 0.5"),
    ({"lambda_": 1.5}, ValueError, r"lambda_ must lie in \[0, 1\], got 1.5"),
    ({"lambda_": None}, TypeError, "lambda_ must be a number, got None"),
    ({"sparse_type": "dense"}, ValueError, "sparse_type must be one of 'sta', 'block_attn', 'moba', 'ssta', got 'dense'"),
    ({"sampling_type": "random"}, ValueError, "sampling_type must be one of 'similarity', 'importance', 'error' or .*got 'random'"),
    ({"pad_type": "reflect"}, ValueError, "pad_type must be one of 'none', 'zero', 'repeat', got 'reflect'"),
    ({"pad_type": None}, TypeError, "pad_type must be one of .*got None"),
    ({"impl": "cuda"}, ValueError, "impl must be one of .*got 'cuda'"),
    ({"scale": "1"}, TypeError, "scale must be a number"),
    ({"mask_share_within_head": 1}, TypeError, "mask_share_within_head must be a bool, got int"),
    ({"adaptive_pool": (2, 2)}, ValueError, "adaptive_pool must have three entries"),
    ({"adaptive_pool": (2, 2, 0)}, ValueError, r"adaptive_pool\[2\] must be at least 1, got 0"),
    ({"text_mask": torch.ones(2, 7, dtype=torch.bool)}, ValueError, r"text_mask must be \[batch, dense tokens\] = \(2, 8\), got \(2, 7\)"),
    ({"text_mask": torch.ones(8, dtype=torch.bool)}, ValueError, r"text_mask must be .*got \(8,\)"),
    ({"text_mask": torch.ones(2, 8)}, TypeError, "text_mask must be bool or integer .*got torch.float32"),
    ({"text_mask": [[True] * 8] * 2}, TypeError, "text_mask must be a bool or integer tensor, got list"),
    ({"text_mask": torch.ones(2, 8, dtype=torch.bool).to_sparse()}, TypeError, "text_mask must be a dense, strided tensor"),
    ({"query": (2, 0, 40, 16)}, ValueError, "query must have at least one head"),
    ({"sampling_type": lambda q: q}, TypeError, r"sampling_type must be a function of \(q_descriptors, k_descriptors\), got one of \(q\)"),
    ({"sampling_type": lambda q, k: (q @ k.mT).to("meta")}, ValueError, "sampling_type's scores must be on the descriptors' device cpu"),
    ({"tile_thw": (200, 200, 100), "pad_type": "zero"}, ValueError, "tile_thw must not be so large that padding 'zero' makes more than 64"),
    ({"tile_thw": (2**31, 1, 1)}, ValueError, "tile_thw must have entries of at most 2147483647"),
    ({"tile_thw": (2**16, 2**16, 1)}, ValueError, "tile_thw must make tiles of at most 2147483647 tokens"),
    ({"adaptive_pool": (100, 100, 100)}, ValueError, "adaptive_pool must have at most 4096 cells"),
    ({"text_mask": torch.ones(2, 8, dtype=torch.bool, device="meta")}, ValueError, "text_mask must be on query's device cpu, got meta"),
])
def test_bad_input_says_what_is_wrong(changes, error, words):
    arguments = {**VALID, **changes}
    for name in ("query", "key", "value"):
        if isinstance(arguments[name], tuple):
            arguments[name] = torch.zeros(arguments[name])
    with pytest.raises(error, match=words):
        ssta_3d_attention(**arguments)


@pytest.mark.parametrize("changes, error, words", [
    ({"layout": (2, 4, 4)}, TypeError, "layout must be a TokenLayout, got tuple"),
    ({"config": {}}, TypeError, "config must be an SSTAConfig, got dict"),
    ({"layout": TokenLayout.video_text((2, 4, 4))}, ValueError, "query must have the layout's 32 tokens, got 40 in shape .1, 1, 40, 16.$"),
])
def test_bad_layouts_and_configs_say_what_is_wrong(changes, error, words):
    arguments = {"layout": TokenLayout.video_text((2, 4, 4), 8), "config": SSTAConfig(), **changes}
    with pytest.raises(error, match=words):
        ssta_attention(*torch.zeros(3, 1, 1, 40, 16), **arguments)


def test_heads_behind_the_tokens_are_told_from_a_wrong_length():
    x = torch.zeros(1, 40, 2, 16)
    hint = r"; the order of axes is \[batch, heads, tokens, head_dim\], so transpose\(1, 2\) of the shape \(1, 40, 2, 16\) that came"
    with pytest.raises(ValueError, match="text_len must be at most the sequence's 2 tokens, got 8" + hint):
        ssta_3d_attention(x, x, x, (2, 4, 4), topk=1, text_len=8)
    with pytest.raises(ValueError, match="thw must multiply to the 2 video tokens of query .* = 40" + hint):
        ssta_3d_attention(x, x, x, (2, 4, 5), topk=1)
    with pytest.raises(ValueError, match="query must have the layout's 40 tokens, got 2 in shape .*" + hint):
        ssta_attention(x, x, x, TokenLayout.video_text((2, 4, 4), 8), SSTAConfig())


@pytest.mark.parametrize("fields, error, words", [
    ({"budget": "topk"}, TypeError, "budget must be None or a function of the scores, got 'topk'"),
    ({"budget": torch.isfinite, "threshold": 0.5}, ValueError, "threshold must be 0 with a budget of your own"),
    ({"budget": torch.isfinite, "topk": 4}, ValueError, "topk must be None with a budget of your own, which replaces it, got 4"),
    # What would be without effect.
    ({"kernel_thw": (5, 5, 5), "compensation": "linear"}, ValueError,
     r"kernel_thw must come with sparse_type='ssta' .* got kernel_thw = \(5, 5, 5\) with sparse_type None and compensation 'linear'"),
    ({"kernel_thw": (3, 3, 3), "sparse_type": "moba"}, ValueError, "kernel_thw must come with .* with sparse_type 'block_attn'"),
    ({"variants": ((1, {"sparse_type": "block_attn", "kernel_thw": (1, 3, 3)}),)}, ValueError, r"variants\[0\]: kernel_thw must come with"),
    ({"sparse_type": "sta", "topk": 2}, ValueError, "topk must be None with sparse_type 'sta', which selects by the window alone, got 2"),
    ({"sparse_type": "sta", "threshold": 0.5}, ValueError, "threshold must be 0 with sparse_type 'sta'"),
    ({"sparse_type": "sta", "budget": torch.isfinite}, ValueError, "budget must be None with sparse_type 'sta'"),
    ({"compensation": "linear", "threshold": 0.5}, ValueError, "threshold must be 0 .* 'error', which a compensation chooses tiles by"),
    ({"sampling_type": 3}, TypeError, "sampling_type must be one of .*got 3"),
    ({"variants": ((31, {"topk": 1}), (1, {"topk": 2}))}, ValueError, "variants must ascend in max_frames, got 1 after 31"),
    ({"variants": ((1, {"top": 1}),)}, ValueError, r"variants\[0\] must override fields of SSTAConfig other than variants, got \['top'\]"),
    ({"variants": ((1, {"variants": ()}),)}, ValueError, r"variants\[0\] must override .*got \['variants'\]"),
    ({"variants": ((1, {"topk": 0}),)}, ValueError, "topk must be at least 1, got 0"),
    ({"variants": ((1, [1, 2]),)}, TypeError, r"variants\[0\] overrides must map fields of SSTAConfig to values, got \[1, 2\]"),
    ({"variants": ((1, {1: 2, "topk": 3}),)}, TypeError, r"variants\[0\] overrides must map fields"),
    ({"variants": ((1, [("topk", 1, 2)]),)}, TypeError, r"variants\[0\] overrides must map fields"),
    ({"variants": ((1, [([1], 2)]),)}, TypeError, r"variants\[0\] overrides must map fields"),
    ({"budget": lambda a, b: a}, TypeError, r"budget must be a function of \(scores\), got one of \(a, b\)"),
])
def test_bad_configs_say_what_is_wrong(fields, error, words):
    with pytest.raises(error, match=words):
        SSTAConfig(**fields)


def test_published_calls_give_what_has_no_effect():
    """Published code hands over all settings always; what is wrong with them it hears nevertheless."""
    q, k, v = torch.randn(3, 1, 1, 40, 16).unbind()
    call = dict(thw=(2, 4, 5), tile_thw=(1, 2, 2), topk=2, kernel_thw=(3, 3, 3))
    by_budget = ssta_3d_attention(q, k, v, **call, sparse_type="block_attn")
    assert torch.equal(by_budget, ssta_3d_attention(q, k, v, **call | dict(kernel_thw=(1, 1, 1)), sparse_type="moba"))
    by_window = ssta_3d_attention(q, k, v, **call, sparse_type="sta", threshold=0.3)
    assert torch.equal(by_window, ssta_3d_attention(q, k, v, **call | dict(topk=5), sparse_type="sta"))
    assert not torch.equal(by_window, by_budget)
    assert explain(q, k, **call, sparse_type="sta", threshold=0.3).config == SSTAConfig((1, 2, 2), kernel_thw=(3, 3, 3), sparse_type="sta")
    for wrong, kind in ((dict(kernel_thw=(0, 1, 1)), "moba"), (dict(topk=0), "sta"), (dict(threshold=1.0), "sta")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ssta_3d_attention(q, k, v, **call | wrong, sparse_type=kind)


def test_hunyuan_video_15():
    config = SSTAConfig.hunyuan_video_15()
    assert hash(config) == hash(SSTAConfig.hunyuan_video_15()) and config == SSTAConfig.hunyuan_video_15()
    common = dict(sparse_type="ssta", sampling_type="importance", lambda_=0.7, pad_type="zero")
    assert config.for_canvas((61, 45, 80)) == SSTAConfig(tile_thw=(6, 8, 8), kernel_thw=(3, 3, 3), topk=64, **common)
    assert config.for_canvas((32, 45, 80)).topk == 64
    for frames in (2, 31):
        assert config.for_canvas((frames, 45, 80)) == SSTAConfig(tile_thw=(6, 8, 8), kernel_thw=(3, 3, 3), topk=32, **common)
    assert config.for_canvas((1, 45, 80)) == SSTAConfig(tile_thw=(1, 16, 24), kernel_thw=(1, 1, 1), topk=64, **common)
    plain = SSTAConfig()
    assert plain.for_canvas((1, 2, 3)) is plain


def test_variants_are_resolved_by_the_grid_with_most_frames():
    x = torch.randn(1, 1, 5 * 16 + 16, 16)
    layout = TokenLayout((VideoGrid(1, 4, 4), VideoGrid(5, 4, 4)))
    few, many = SSTAConfig(tile_thw=(1, 2, 2), topk=1), SSTAConfig(tile_thw=(1, 2, 2), topk=7)
    varied = dataclasses.replace(many, variants=((4, {"topk": 1}),))
    assert torch.equal(ssta_attention(x, x, x, layout, varied), ssta_attention(x, x, x, layout, many))
    assert not torch.equal(ssta_attention(x, x, x, layout, few), ssta_attention(x, x, x, layout, many))


# What aot_eager traces, "eager" has traced too; one stays as it is then run, without gradients' graphs of their own.
@pytest.mark.parametrize("backend, sparse_type, padding, masked", [
    ("aot_eager", "ssta", "none", True), ("aot_eager", "sta", "none", False), ("eager", "ssta", "zero", True),
    ("aot_eager", "ssta", "zero", True), ("aot_eager", "block_attn", "repeat", False)])
@pytest.mark.slow
def test_compiles_to_one_graph(backend, sparse_type, padding, masked):
    torch._dynamo.reset()
    inputs = [torch.randn(2, 2, 3 * 5 * 6 + 10, 16, requires_grad=True) for _ in range(3)]
    arguments = dict(topk=9, tile_thw=(2, 2, 4), kernel_thw=(1, 1, 3), text_len=10, sparse_type=sparse_type, pad_type=padding,
                     threshold=0.6 if masked else 0.0, text_mask=torch.arange(10) < torch.tensor([[4], [10]]) if masked else None)
    out = torch.compile(ssta_3d_attention, fullgraph=True, backend=backend)(*inputs, (3, 5, 6), **arguments)
    expected = ssta_3d_attention(*inputs, (3, 5, 6), **arguments)
    torch.testing.assert_close(out, expected)
    for got, wanted in zip(torch.autograd.grad(out.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), inputs)):
        torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_compiled_code_follows_a_new_resolution():
    torch._dynamo.reset()
    compiled = torch.compile(ssta_3d_attention, fullgraph=True, backend="eager")
    for thw in ((2, 4, 4), (3, 4, 6)):
        x = torch.randn(1, 1, thw[0] * thw[1] * thw[2] + 5, 16)
        torch.testing.assert_close(compiled(x, x, x, thw, topk=2, tile_thw=(2, 2, 2), text_len=5),
                                   ssta_3d_attention(x, x, x, thw, topk=2, tile_thw=(2, 2, 2), text_len=5))
