"""Selection against the three-loop definition, and the laws of scores and budgets."""

from dataclasses import replace

import pytest
import ssta_oracle as oracle
import torch
from backend_rows import backend_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from selection_cases import Case, cases, layer_of, selected

from ssta import DenseRun, SSTAConfig, TokenLayout, ssta_3d_attention, tile_layout
from ssta.budget import threshold_counts
from ssta.config import SAMPLING_TYPES
from ssta.kernels.eager.ranking import topk_blocks
from ssta.scoring import RULES, descriptors
from ssta.selection import fixed_tiles

PLAIN = backend_of("torch")


def best(scores, topk, threshold=0.0):
    """The tiles that a budget keeps."""
    return topk_blocks(scores, threshold_counts(scores, topk, threshold) if threshold else topk)


@settings(max_examples=80)
@given(cases())
def test_selection_is_the_definition(case):
    expected = case.expected()
    assume(expected.clear)
    lists = case.select()
    lists.check_values(expected_slots(expected), expected_slots(expected))
    assert torch.equal(lists.to_mask().expand_as(expected.mask), expected.mask)
    if lists.kv_lengths is None:
        assert all(kept == [len(tile.slots) for tile in expected.tiles] for kept in expected.kept)
    else:
        assert lists.kv_lengths[:, 0].tolist() == expected.kept
        assert torch.equal(lists.kv_lengths, lists.q_lengths)


def check_lists(case, **where):
    expected = case.expected()
    assume(expected.clear)
    lists = case.select(**where)
    lists.check_values(expected_slots(expected), expected_slots(expected))
    assert torch.equal(lists.to_mask().cpu().expand_as(expected.mask), expected.mask)


@pytest.mark.gpu
@settings(max_examples=100)
@given(cases(dtypes=(torch.bfloat16, torch.float16, torch.float32)))
def test_selection_on_a_gpu_is_the_definition(case):
    check_lists(case, device="cuda")


@pytest.mark.slow
@settings(max_examples=12)
@given(cases(dtypes=(torch.float16,), head_dim=16))
def test_selection_by_tritons_kernels_is_the_definition(case):
    check_lists(case, impl="triton", device="cuda" if torch.cuda.is_available() else "cpu")


def expected_slots(selection):
    return sum(len(tile.slots) for tile in selection.tiles)


@given(cases(dtypes=(torch.float32,)), st.sampled_from([{}, dict(topk=2), dict(density=0.3), dict(sparse_type="block_attn")]))
def test_lists_have_room_for_what_a_layer_can_select_and_hardly_more(case, changes):
    of = case.config
    if changes:
        window = None if "sparse_type" in changes else of.kernel_thw
        case = replace(case, config=SSTAConfig(tile_thw=of.tile_thw, kernel_thw=window, pad_type=of.pad_type, **changes))
    lists, layout, config = case.select(), case.layout(), case.config
    assert lists.counts.max() <= lists.capacity <= layout.num_tiles
    if layout.num_video_tiles and not layout.num_dense_tiles and config.selected_by != "sta":
        window = 0 if config.selected_by == "block_attn" else max(fixed_tiles(layout, layout, config.window, config.selected_by).window)
        most = window + config.row_topk if config.density is None else max(window, config.density * layout.num_tiles + 1)
        assert lists.capacity <= max(1, most)


@given(cases(dtypes=(torch.float32,)))
def test_a_batch_element_alone_is_the_same_as_in_a_batch(case):
    assume(case.expected().clear)
    together = case.select().to_mask().expand(2, -1, -1, -1)
    for i in range(2):
        alone = Case(case.parts, case.config, case.q[i:i + 1], case.k[i:i + 1], case.valid and case.valid[i:i + 1])
        assert torch.equal(alone.select().to_mask()[0], together[i])


@given(cases())
def test_dense_rows_and_columns_are_whole_without_a_text_mask(case):
    mask = Case(case.parts, case.config, case.q, case.k, None).select().to_mask()
    n = tile_layout(case.tokens, case.config.tile_thw, case.config.pad_type).num_video_tiles
    assert mask[..., n:].all() and mask[..., n:, :].all()


@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 100))
def test_topk_takes_the_best_and_of_equals_the_first(n, topk, seed):
    scores = torch.randint(0, 4, (2, 1, n, n), generator=torch.Generator().manual_seed(seed)).float()
    keep = best(scores, topk)
    for row, kept in zip(scores.reshape(-1, n).tolist(), keep.reshape(-1, n).tolist()):
        order = sorted(range(n), key=lambda b: (-row[b], b))[:topk]
        assert kept == [b in order for b in range(n)]


@pytest.mark.parametrize("topk, threshold, count", [
    (20, 0.95, 8),  # One tile has all the mass: at least 8.
    (5, 0.95, 5),  # At most topk, even below 8.
    (100, 0.999, 8),
])
def test_threshold_counts_when_one_tile_dominates(topk, threshold, count):
    scores = torch.zeros(1, 1, 1, 30).index_fill(-1, torch.tensor([17]), 1.0)
    assert int(best(scores, topk, threshold).sum()) == count and best(scores, topk, threshold)[..., 17].all()


@pytest.mark.parametrize("topk, threshold, count", [(30, 0.5, 15), (12, 0.5, 12), (30, 0.31, 10), (40, 0.99999, 30)])
def test_threshold_counts_when_all_tiles_are_alike(topk, threshold, count):
    assert int(best(torch.zeros(1, 1, 1, 30), topk, threshold).sum()) == count


@given(st.integers(0, 1000), st.floats(0.05, 0.95))
def test_threshold_is_a_share_of_the_softmax_at_temperature_a_hundredth(seed, threshold):
    shares = torch.rand(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).add(0.2)
    shares /= shares.sum()
    cumulative = shares.sort(descending=True).values.cumsum(0)
    assume((cumulative - threshold).abs().min() > 1e-4)
    count = int((cumulative < threshold).sum()) + 1
    assert int(best((shares.log() / 100).float()[None], 40, threshold).sum()) == max(count, 8)


@given(st.integers(0, 1000))
def test_importance_is_its_formula_and_ignores_the_length_of_descriptors(seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, 6, 5, generator=generator) for _ in range(2))
    expected = torch.tensor(oracle.scores_of(list(q[0, 0].double()), list(k[0, 0].double()), "importance", 0.7))
    torch.testing.assert_close(PLAIN.score(q, k, 0.7)[0, 0], expected, atol=1e-6, rtol=0, check_dtype=False)
    torch.testing.assert_close(PLAIN.score(3 * q, 7 * k, 0.7), PLAIN.score(q, k, 0.7), atol=1e-6, rtol=0)


def test_importance_of_a_lone_tile_and_of_zero_descriptors_is_finite():
    assert PLAIN.score(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0.7).item() == pytest.approx(0.7)
    assert torch.equal(PLAIN.score(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0.5), torch.zeros(1, 1, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile_thw", [(6, 8, 8), (1, 16, 24)])
def test_means_of_half_precision_are_summed_in_more(dtype, tile_thw):
    layout = tile_layout(TokenLayout.video_text((7, 9, 20), 3), tile_thw, "none")
    x = layout.tile((torch.randn(1, 2, layout.tokens.length, 4) + 100).to(dtype))
    for cells in (None, (2, 2, 2)):
        assert torch.equal(descriptors(x, layout, cells), descriptors(x.double(), layout, cells).to(dtype).float())


@given(st.sampled_from(((1, 1, 1), (2, 2, 2), (3, 1, 2), (7, 1, 1))), st.sampled_from(((2, 3, 4), (5, 1, 2))))
def test_adaptive_pooling_is_that_of_torch(cells, tile_thw):
    layout = tile_layout(TokenLayout.video_text(tile_thw), tile_thw)
    x = torch.randn(1, 1, layout.tokens.length, 3, dtype=torch.float64)
    pooled = torch.nn.functional.adaptive_avg_pool3d(x.reshape(*tile_thw, 3).permute(3, 0, 1, 2)[None], cells)
    torch.testing.assert_close(descriptors(x, layout, cells)[0, 0, 0], pooled[0].permute(1, 2, 3, 0).flatten().float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scorer", [lambda q, k: PLAIN.score(q, k, None), lambda q, k: PLAIN.score(q, k, 0.7),
                                    lambda q, k: PLAIN.score_by(lambda q, k: -torch.cdist(q, k), q, k)],
                         ids=["similarity", "importance", "of the user's own"])
def test_scores_of_other_tiles_survive_a_bad_one(bad, scorer):
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    spoilt = k.clone()
    spoilt[0, 1, 3, 2] = bad
    scores, clean = scorer(q, spoilt), scorer(q, k)
    assert torch.equal(scores[0, 0], clean[0, 0]), "another head"
    assert (scores[0, 1, :, 3] == -torch.inf).all() and not scores.isnan().any()
    assert not best(scores, 8)[0, 1, :, 3].any() and best(scores, 9).all(), "taken only when nothing else is left"
    spoilt = q.clone()
    spoilt[0, 1, 3] = bad
    rows = [0, 1, 2, 4, 5, 6, 7, 8]
    scores = scorer(spoilt, k)
    assert torch.equal(scores[:, :, rows], clean[:, :, rows])
    zeroed = torch.where(spoilt.isfinite(), spoilt, 0.0)
    assert torch.equal(scores[0, 1, 3], scorer(zeroed, k)[0, 1, 3]), "counts as zero"


def test_a_configuration_names_every_rule():
    assert tuple(RULES) == SAMPLING_TYPES


def test_a_scorer_and_a_budget_can_be_replaced():
    seen = {}

    def nearest(q, k):
        seen["descriptors"] = q.shape, q.dtype
        return -torch.cdist(q, k)

    def above_the_mean(scores):
        return scores > scores.mean(-1, keepdim=True)

    tokens = TokenLayout.video_text((2, 4, 6), 5)
    layout = tile_layout(tokens, (2, 2, 2))
    q, k = torch.randn(2, 3, 53, 4), torch.randn(2, 3, 53, 4)
    config = SSTAConfig(tile_thw=(2, 2, 2), sparse_type="block_attn", sampling_type=nearest, budget=above_the_mean)
    mask = selected(q, k, tokens, config).blocks.to_mask()
    assert seen["descriptors"] == ((2, 3, 6, 4), torch.float32)
    scores = -torch.cdist(descriptors(layout.tile(q), layout), descriptors(layout.tile(k), layout))
    assert torch.equal(mask[..., :6, :6], above_the_mean(scores))


@pytest.mark.parametrize("changes, error, words", [
    ({"sampling_type": lambda q, k: None}, TypeError, "sampling_type's scores must be a floating-point tensor, got NoneType"),
    ({"sampling_type": lambda q, k: (q @ k.mT)[0]}, ValueError, r"sampling_type's scores must have shape \(1, 1, 2, 2\), got \(1, 2, 2\)"),
    ({"budget": lambda scores: scores}, TypeError, "budget's result must be bool, got torch.float32"),
    ({"budget": lambda scores: scores[..., :1] > 0}, ValueError, r"budget's result must be .* = \[1, 1, 2, 2\]"),
])
def test_replacements_that_do_not_fit_say_so(changes, error, words):
    x = torch.randn(1, 1, 16, 4)
    with pytest.raises(error, match=words):
        selected(x, x, TokenLayout.video_text((2, 2, 4)), SSTAConfig(tile_thw=(2, 2, 2), **changes))


def test_the_window_alone_is_shared_and_made_once():
    tokens = TokenLayout.video_text((4, 4, 4), 9)
    x = torch.randn(3, 2, tokens.length, 4)
    config = SSTAConfig(tile_thw=(2, 2, 2), sparse_type="sta")
    first, again, masked = (selected(x, x, tokens, config, mask).blocks for mask in (None, None, torch.ones(3, 9, dtype=torch.bool)))
    assert first.counts.shape == (1, 1, 10) and masked.kv_lengths.shape == (3, 1, 10)
    assert first.indices is again.indices is masked.indices and first.counts is again.counts is masked.counts


@pytest.mark.parametrize("thw, text_len, padding, length", [
    ((3, 4, 5), 7, "none", None), ((3, 4, 5), 7, "zero", 8), ((3, 4, 5), 7, "repeat", 8), ((4, 4, 2), 16, "none", 8),
    ((4, 4, 2), 9, "none", None)])
def test_tiles_of_one_length_make_uniform_blocks(thw, text_len, padding, length):
    layout = tile_layout(TokenLayout.video_text(thw, text_len), (2, 2, 2), padding)
    assert layout.tile_length == length and set(layout.lengths.tolist()) == {length} or length is None
    x = torch.randn(1, 2, layout.tokens.length, 4)
    lists = selected(x, x, layout.tokens, SSTAConfig(tile_thw=(2, 2, 2), topk=3, pad_type=padding)).blocks
    lists.check_values(layout.num_slots, layout.num_slots)
    for start, size in (lists.q_bounds(layout.num_slots), lists.kv_bounds(layout.num_slots)):
        assert torch.equal(start[0, 0], layout.offsets[:-1]) and torch.equal(size[0, 0], layout.lengths)
    assert isinstance(lists.q_offsets, int) == isinstance(lists.kv_offsets, int) == (length is not None)


def test_a_sequence_without_a_grid_selects_all():
    x = torch.randn(1, 2, 21, 4)
    found = selected(x, x, TokenLayout((DenseRun(10), DenseRun(11))), SSTAConfig(tile_thw=(1, 2, 2), topk=1))
    assert found.blocks.to_mask().all() and layer_of(x, x, TokenLayout((DenseRun(21),)), SSTAConfig()).rule is None


def test_a_window_is_kept_where_nothing_is_estimated_or_it_is_asked_for():
    plain, estimated = SSTAConfig(density=0.2), SSTAConfig(density=0.2, compensation="linear")
    assert (plain.selected_by, estimated.selected_by) == ("ssta", "block_attn")
    # What nobody chose follows the compensation; what somebody chose stays.
    assert replace(plain, compensation="linear").selected_by == "block_attn"
    assert replace(estimated, compensation="none").selected_by == "ssta"
    for chosen, name in (("ssta", "ssta"), ("moba", "block_attn"), ("sta", "sta")):
        config = SSTAConfig(sparse_type=chosen)
        assert config.selected_by == replace(config, compensation="linear").selected_by == name
    varied = SSTAConfig(compensation="linear", variants=((1, {"compensation": "none"}),))
    assert (varied.for_canvas((1, 2, 2)).selected_by, varied.for_canvas((2, 2, 2)).selected_by) == ("ssta", "block_attn")


def test_the_window_by_default_reaches_the_lists():
    q, k, v = torch.randn(3, 1, 1, 4 * 4 * 8, 8).unbind()
    call = dict(thw=(4, 4, 8), tile_thw=(2, 2, 2), topk=2)
    for compensation, name in (("none", "ssta"), ("linear", "block_attn")):
        by_default, named, other = (ssta_3d_attention(q, k, v, **call, compensation=compensation, sparse_type=kind)
                                    for kind in (None, name, {"ssta": "block_attn", "block_attn": "ssta"}[name]))
        assert torch.equal(by_default, named) and not torch.equal(by_default, other)
