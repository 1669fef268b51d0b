"""The estimate on queries, keys and values of real heads, as benchmark/capture.py took them from a trained video model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ssta import SSTAConfig, TokenLayout
from ssta.attention import attend as ssta_layer

EVERYTHING = dict(kernel_thw=(1, 1, 1), sparse_type="block_attn")
estimates = pytest.mark.parametrize("tile", [(2, 4, 4), (2, 4, 8), (4, 4, 8)], ids=str)


@pytest.fixture(scope="module")
def heads():
    """(thw, q, k, v ``[1, N, S, D]``, dense attention): the most, the middling and the least regular heads at an early and a late step."""
    with np.load(Path(__file__).parent.parent / "data" / "captures.npz") as file:
        qkv = [torch.from_numpy(file[name] * file[f"{name}_step"])[None] for name in "qkv"]
        thw = tuple(file["thw"].tolist())
    return thw, *qkv, torch.nn.functional.scaled_dot_product_attention(*qkv)


def layer(heads, config, selection=None):
    thw, q, k, v, _ = heads
    return ssta_layer(q, k, v, TokenLayout.video_text(thw), config, selection=selection)


def errors(heads, result):
    """Of each head, relative to what dense attention gives."""
    dense = heads[-1]
    return ((result.out - dense).norm(dim=(2, 3)) / dense.norm(dim=(2, 3)))[0]


@estimates
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("density", [0.1, 0.16, 0.3])
def test_no_head_is_worse_than_without(heads, tile, parts, density):
    """With the very same tiles, whatever selected them. Where a tile's tokens are too unlike to be estimated, nothing is."""
    for selected_by in ("similarity", "error"):
        linear = SSTAConfig(tile_thw=tile, density=density, compensation="linear", compensation_parts=parts, sampling_type=selected_by,
                            **EVERYTHING)
        estimated = layer(heads, linear)
        without = layer(heads, replace(linear, compensation="none", compensation_parts=1, sampling_type="similarity"),
                        estimated.selection)
        with_it, left_out = errors(heads, estimated), errors(heads, without)
        assert (with_it <= left_out).all(), list(zip(with_it.tolist(), left_out.tolist()))
        useful = estimated.selection.useful[0]
        assert useful.sum() == 4 and not useful[2] and torch.equal(with_it[~useful], left_out[~useful])
        assert with_it[useful].mean() < 0.6 * left_out[useful].mean()


@estimates
@pytest.mark.parametrize("parts", [1, 2])
def test_tiles_selected_by_error_leave_less_of_it(heads, tile, parts):
    for density in (0.1, 0.16, 0.3):
        config = SSTAConfig(tile_thw=tile, density=density, compensation="linear", compensation_parts=parts, **EVERYTHING)
        by_error, by_similarity = (errors(heads, layer(heads, replace(config, sampling_type=name))) for name in ("error", "similarity"))
        assert by_error.mean() <= by_similarity.mean()


def test_the_captures_are_small_and_whole(heads):
    thw, q, k, v, _ = heads
    assert (Path(__file__).parent.parent / "data" / "captures.npz").stat().st_size <= 300 * 1024
    assert q.shape == k.shape == v.shape == (1, 6, np.prod(thw), 32) and all(x.isfinite().all() for x in (q, k, v))
