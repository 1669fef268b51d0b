"""Budgets of a density against the three-loop definition, on awkward grids and strange scores."""

import math

import pytest
import ssta_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import layer_of, selected

from ssta import DenseRun, SSTAConfig, TokenLayout, VideoGrid, ssta_attention
from ssta.budget import row_counts
from ssta.window import near, window_size

GRIDS = st.sampled_from([[(1, 1, 1)], [(1, 1, 2)], [(3, 1, 1)], [(1, 7, 1)], [(2, 3, 2)], [(5, 3, 1)], [(2, 2, 2), (1, 1, 1)],
                         [(1, 1, 1), (1, 3, 3), (1, 1, 2)]])
WINDOWS = st.tuples(*[st.integers(1, 5)] * 3)
DENSITIES = st.one_of(st.sampled_from((0.0001, 0.16, 0.29, 0.5, 0.999, 1.0)), st.integers(1, 1000).map(lambda x: x / 1000))
# Few values: many ties, among them those of zeros that differ in their sign.
STRANGE = (-math.inf, math.nan, -0.0, 0.0, 1e-40, 2.5, math.inf)


def layout_of(grids, text=0):
    """To be cut into tiles of one token."""
    return TokenLayout((*[VideoGrid(*grid) for grid in grids], *(DenseRun(text) for _ in range(text > 0))))


def select(tokens, scores, **changes):
    """What is selected by ``scores``, as the mask of all tiles, and the window of the video's."""
    batch, heads, _, _ = scores.shape
    if changes.get("sparse_type") == "block_attn":
        changes["kernel_thw"] = None
    config = SSTAConfig(tile_thw=(1, 1, 1), **changes)
    x = torch.zeros(batch, heads, tokens.length, 2)
    layer = layer_of(x, x, tokens, config)
    found = layer.fixed.chosen(layer.backend, scores, layer.budget(scores), layer.room, None, None, None)
    window = near(layer.tiles.tile_grids, config.window) & (config.selected_by == "ssta")
    return found.blocks.to_mask(), window


@given(GRIDS, WINDOWS)
def test_every_tile_of_a_grid_has_a_window_of_one_size(grids, window):
    sizes = [window_size(grid, window) for grid in grids for _ in range(math.prod(grid))]
    assert near(grids, window).sum(-1).tolist() == sizes


@settings(max_examples=150)
@given(GRIDS, WINDOWS, DENSITIES, st.sampled_from(("ssta", "block_attn")))
def test_rows_share_a_density_and_keep_their_window(grids, window, density, sparse_type):
    inside = near(grids, window) & (sparse_type == "ssta")
    sizes = [window_size(grid, window) * (sparse_type == "ssta") for grid in grids]
    n = len(inside)
    got = row_counts(tuple(zip(map(math.prod, grids), sizes)), density, n, torch.device("cpu"))
    assert got.shape == (1, 1, n) and got.dtype == torch.int32 and (got >= 0).all()
    total = got[0, 0] + inside.sum(-1)
    assert total.tolist() == oracle.spread_over_rows(inside.tolist(), density)[0]
    most = max(density * n**2, float(inside.sum()), n)
    assert total.sum() <= most + 1e-6 or (total.sum() < most + n and density * n < 2), "no more than asked, but for rows of their last tile"
    if density * n >= max(sizes) and density * n >= 1:
        assert [math.floor((i + 1) * density * n + 1e-9) - math.floor(i * density * n + 1e-9) for i in range(n)] == total.tolist()


@settings(max_examples=150)
@given(GRIDS, WINDOWS, DENSITIES, st.sampled_from(("ssta", "block_attn")), st.booleans(), st.integers(0, 1000))
def test_a_density_keeps_the_best_beside_the_window(grids, window, density, sparse_type, strange, seed):
    layout, generator = layout_of(grids, text=2), torch.Generator().manual_seed(seed)
    n = layout.video_length
    scores = torch.randn(2, 2, n, n, generator=generator)
    if strange:
        scores = torch.tensor(STRANGE)[torch.randint(0, len(STRANGE), scores.shape, generator=generator)]
        scores[1, 0, 0] = math.nan
    before = scores.clone()
    mask, inside = select(layout, scores, kernel_thw=window, density=density, sparse_type=sparse_type)
    assert torch.equal(scores.nan_to_num(7), before.nan_to_num(7)), "given scores are not written to"
    assert mask[..., n:].all() and mask[..., n:, :].all()
    counts = oracle.spread_over_rows(inside.tolist(), density)[0]
    for head, kept in zip(scores.masked_fill(scores.isnan(), -math.inf).flatten(0, 1).tolist(), mask[..., :n, :n].flatten(0, 1)):
        assert kept.tolist() == oracle.best_beyond(head, inside.tolist(), counts)[0]
    if density == 1:
        assert mask.all()


@pytest.mark.parametrize("grid, density", [((5, 3, 3), 0.16), ((5, 3, 3), 0.61), ((4, 9, 10), 0.16), ((1, 4, 79), 0.1), ((6, 6, 10), 0.3),
                                           ((4, 9, 10), 0.09), ((7, 1, 1), 0.5)])
@pytest.mark.parametrize("sparse_type", ["ssta", "block_attn"])
def test_the_density_is_met(grid, density, sparse_type):
    layout = layout_of([grid])
    n = layout.video_length
    kernel_thw = (1, 1, 3) if n < 100 else (3, 3, 3)
    scores = torch.randn(1, 2, n, n).exp() * torch.rand(n, 1).exp()
    mask, window = select(layout, scores, kernel_thw=kernel_thw, density=density, sparse_type=sparse_type)
    found = mask.double().mean((-1, -2))
    assert ((found / density - 1).abs() <= max(0.02, 1 / (density * n**2))).all()
    assert (mask | ~window).all()
    assert (mask.double().mean(-1) >= math.floor(density * n) / n).all()


def test_other_grids_give_up_what_the_window_of_one_takes():
    layout = layout_of([(1, 8, 8), (1, 1, 40)])
    mask, window = select(layout, torch.rand(1, 1, 104, 104), kernel_thw=(1, 7, 7), density=0.32, sparse_type="ssta")
    assert abs(float(mask.double().mean()) / 0.32 - 1) < 0.02 and torch.equal(mask[0, 0, :64], window[:64])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling_type", ["similarity", "importance"])
def test_a_tile_that_is_not_finite_is_taken_last(sampling_type, bad):
    layout = layout_of([(1, 1, 12)])
    q, k = torch.randn(2, 1, 2, 12, 4).unbind()
    k[0, 1, 5, 2] = bad
    for density in (0.5, 11 / 12):
        config = SSTAConfig(tile_thw=(1, 1, 1), sparse_type="block_attn", density=density, sampling_type=sampling_type)
        mask = selected(q, k, layout, config).blocks.to_mask()
        assert (mask.sum((-1, -2)) == round(density * 144)).all() and not mask[0, 1, :, 5].any()


def test_counts_of_many_densities_are_not_all_kept():
    for i in range(1, 100):
        row_counts(((5, 3),), i / 100, 5, torch.device("cpu"))
    assert len(row_counts.kept) <= 64
    again = row_counts(((5, 3),), 0.99, 5, torch.device("cpu"))
    assert again is row_counts(((5, 3),), 0.99, 5, torch.device("cpu"))


def test_everything_at_a_density_of_one_is_dense_attention():
    layout = TokenLayout.video_text((3, 4, 5), 7)
    q, k, v = torch.randn(3, 1, 2, 67, 8, dtype=torch.float64).unbind()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for sparse_type in ("ssta", "block_attn"):
        window = (1, 1, 3) if sparse_type == "ssta" else None
        config = SSTAConfig(tile_thw=(2, 2, 2), kernel_thw=window, density=1.0, sparse_type=sparse_type)
        torch.testing.assert_close(ssta_attention(q, k, v, layout, config), dense)
