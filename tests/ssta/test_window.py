"""The window against a three-loop definition, and what can be said about it without one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssta.window import near

grids = st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=2)
windows = st.tuples(*[st.integers(1, 7)] * 3)


@given(grids, windows)
def test_window_is_the_definition(tile_grids, window):
    places = [(g, place) for g, grid in enumerate(tile_grids) for place in np.ndindex(*grid)]
    expected = torch.zeros(len(places), len(places), dtype=torch.bool)
    for i, (g, query) in enumerate(places):
        for j, (other, key) in enumerate(places):
            inside = g == other
            for a, b, n, k in zip(query, key, tile_grids[g], window):
                inside = inside and abs(np.clip(a, k // 2, n - 1 - k // 2) - b) <= k // 2
            expected[i, j] = bool(inside)
    assert torch.equal(near(tile_grids, window), expected)


@given(st.tuples(*[st.integers(1, 6)] * 3), st.tuples(*[st.sampled_from((1, 3, 5))] * 3))
def test_an_odd_window_shifts_at_the_border_and_keeps_its_size(grid, window):
    mask = near([grid], window)
    assert mask.diagonal().all()
    size = np.prod([min(n, k) for n, k in zip(grid, window)])
    # Where the window is wider than half the axis on both sides of its centre it covers the whole axis.
    assert (mask.sum(-1) >= size).all()
    if all(n >= k for n, k in zip(grid, window)):
        assert (mask.sum(-1) == size).all()


@given(st.tuples(*[st.integers(1, 4)] * 3))
def test_a_window_wider_than_the_grid_sees_all_of_it(grid):
    assert near([grid], (9, 9, 9)).all()


@pytest.mark.parametrize("window, seen", [((3, 3, 3), 27), ((1, 1, 1), 1), ((6, 6, 10), 6 * 6 * 10), ((2, 2, 2), 27)])
def test_720p_counts(window, seen):
    assert (near([(6, 6, 10)], window).sum(-1) == seen).all()
